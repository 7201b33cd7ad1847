"""Llama and those that change one thing or two of it: Mistral, Qwen2, Qwen3, SmolLM3. SmolLM2 is a Llama.

Pre-norm RMSNorm, rotary grouped-query attention, gated MLP.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.decoder import Attend, Decoder, Rotations, activation
from engine.models.projections import Layout
from engine.models.rotary import Rotary, interleave
from engine.shape import AttentionKind, ModelShape


def shape(config: Any) -> ModelShape:
    """Sizes from a LlamaConfig or one of its relatives; raises ModelError for an unknown activation."""
    activation(_activation_name(config))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return ModelShape(
        family=config.model_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=config.vocab_size,
        context=config.max_position_embeddings,
        attention_parameters=config.hidden_size * head_dim * (2 * heads + 2 * kv_heads),
        mlp_parameters=3 * config.hidden_size * config.intermediate_size,
        head_parameters=config.vocab_size * config.hidden_size,
    )


def attention_kinds(config: Any, scale: float, softcap: float | None = None) -> tuple[AttentionKind, ...]:
    """Of every layer, for configs that name sliding windows in `layer_types`."""
    return tuple(
        AttentionKind(scale, config.sliding_window if kind == "sliding_attention" else None, softcap)
        for kind in config.layer_types
    )


def mistral_shape(config: Any) -> ModelShape:
    """Sizes from a MistralConfig: a sliding window in every layer. Raises ModelError."""
    plain = shape(config)
    return replace(plain, attention_kinds=(AttentionKind(plain.head_dim**-0.5, config.sliding_window),) * plain.layers)


def windowed_shape(config: Any) -> ModelShape:
    """Sizes from the config of a Qwen2, Qwen3 or SmolLM3: sliding windows in some layers. Raises ModelError."""
    plain = shape(config)
    return replace(plain, attention_kinds=attention_kinds(config, plain.head_dim**-0.5))


class LlamaDecoder(Decoder):
    """Weights of a Llama on one device: fused queries/keys/values and gate/up projections."""

    prefix = "model"
    layouts: ClassVar = {
        "a": Layout({name: f"self_attn.{name}_proj" for name in "qkv"}, {"o": "self_attn.o_proj"}),
        "m": Layout({name: f"mlp.{name}_proj" for name in ("gate", "up")}, {"down": "mlp.down_proj"}),
    }
    rotated = "qk"
    mlp_norm_name = "post_attention_layernorm"
    layer_types: Sequence[str | None] = (None,)  # those whose rotary embeddings differ

    def _read(self, config: Any) -> None:
        self._eps = config.rms_norm_eps
        self._activation = activation(_activation_name(config))
        self._rotaries = [Rotary(config, self.shape, self._device, kind) for kind in self.layer_types]
        self._attention_norm = self._norms("input_layernorm")
        self._mlp_norm = self._norms(self.mlp_norm_name)
        self._final_norm = self._norm_weight("model.norm")

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return F.embedding(tokens, self._embedding)

    def rotations(self, positions: Tensor, lengths: Tensor) -> Rotations:
        return tuple(rotary.factors(positions, lengths) for rotary in self._rotaries)

    def attention(self, layer: int, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        heads = self.shape.heads
        qk, v = self._project(layer, x)
        qk = self.place_keys(layer, qk, rotations)
        block = self._projections.attention[layer].out(attend(layer, qk[:, :heads], qk[:, heads:], v))
        return self._add(x, block, "a", layer)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        maps = self._projections.mlp[layer]
        gate, up = maps.into(self._norm(x, self._mlp_norm[layer])).chunk(2, -1)
        return self._add(x, maps.out(self._activation(gate) * up), "m", layer)

    def keys_and_values(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        qk, v = self._project(layer, x)
        return qk[:, self.shape.heads :], v

    def place_keys(self, layer: int, k: Tensor, rotations: Rotations) -> Tensor:
        return self._kernels.rotate(k, rotations[0])

    def head_input(self, x: Tensor) -> Tensor:
        return self._norm(x, self._final_norm)

    def _add(self, x: Tensor, block: Tensor, kind: str, layer: int) -> Tensor:
        """The residual connection of a unit."""
        return x + block

    def _project(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [N, heads + kv_heads, head_dim], values [N, kv_heads, head_dim]."""
        s = self.shape
        into = self._projections.attention[layer].into
        qkv = into(self._norm(x, self._attention_norm[layer])).view(len(x), -1, s.head_dim)
        return qkv[:, : s.heads + s.kv_heads], qkv[:, s.heads + s.kv_heads :]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, weight, self._eps)

    def _norm_weight(self, name: str) -> Tensor:
        return self._take(f"{name}.weight")

    def _norms(self, name: str) -> list[Tensor]:
        """The norm of that name of every layer."""
        return [self._norm_weight(f"{layer}.{name}") for layer in self._layers]


class Qwen3Decoder(LlamaDecoder):
    """Weights of a Qwen3 on one device: each head's queries and keys have an RMSNorm."""

    def _read(self, config: Any) -> None:
        super()._read(config)
        self._head_norm = [self._head_norm_weight(layer) for layer in self._layers]

    def _project(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        qk, v = super()._project(layer, x)
        return (self._unit_norm(qk) * self._head_norm[layer]).to(v.dtype), v

    def _unit_norm(self, qk: Tensor) -> Tensor:
        """Each head's queries and keys, before its weights."""
        return self._norm(qk, torch.ones_like(qk[0, 0]))

    def _head_norm_weight(self, layer: str) -> Tensor:
        """[heads + kv_heads, head_dim], in the order of the queries and keys that `Rotary` wants."""
        counts = {"q_norm": self.shape.heads, "k_norm": self.shape.kv_heads}
        weights = [
            interleave(self._norm_weight(f"{layer}.self_attn.{name}"), self.shape).expand(count, -1)
            for name, count in counts.items()
        ]
        return torch.cat(weights)


class SmolLM3Decoder(LlamaDecoder):
    """Weights of a SmolLM3 on one device: some layers, by default every fourth, know no positions (NoPE)."""

    def _read(self, config: Any) -> None:
        super()._read(config)
        self._rotated = config.no_rope_layers  # 1 where the layer does rotate

    def place_keys(self, layer: int, k: Tensor, rotations: Rotations) -> Tensor:
        return super().place_keys(layer, k, rotations) if self._rotated[layer] else k


def _activation_name(config: Any) -> str:
    name: str = getattr(config, "hidden_activation", None) or config.hidden_act  # Gemma may have both, and means this
    return name
