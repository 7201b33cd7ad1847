"""Llama and those that change one thing or two of it: Mistral, Qwen2, Qwen3, SmolLM3. SmolLM2 is a Llama.

Pre-norm RMSNorm, rotary grouped-query attention, gated MLP.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoints.weight_files import Weights
from engine.kernels.activations import activation
from engine.kernels.base import Kernels
from engine.models.decoder import Attend, Rotations
from engine.models.head import Headed
from engine.models.projections import Layout, Projected, Projections
from engine.models.rotary import Rotary, interleave
from engine.shape import AttentionKind, ModelShape

LAYOUTS = {
    "a": Layout({name: f"self_attn.{name}_proj" for name in "qkv"}, {"o": "self_attn.o_proj"}),
    "m": Layout({name: f"mlp.{name}_proj" for name in ("gate", "up")}, {"down": "mlp.down_proj"}),
}


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


class LlamaDecoder(Projected, Headed):
    """Weights of a Llama on one device: fused queries/keys/values and gate/up projections."""

    mlp_norm_name = "post_attention_layernorm"

    def __init__(
        self, config: Any, shape: ModelShape, weights: Weights, kernels: Kernels, device: torch.device
    ) -> None:
        self.shape = shape
        self._weights, self._kernels, self._device = weights, kernels, device
        self._eps = config.rms_norm_eps
        self._activation = activation(_activation_name(config))
        self._rotaries = self._make_rotaries(config)
        self._layers = layers = [f"model.layers.{i}" for i in range(shape.layers)]
        rotated = dict.fromkeys("qk", partial(interleave, head_dim=shape.head_dim))  # for `Kernels.rotate`
        self._projections = Projections(layers, LAYOUTS, rotated, weights, kernels, device)
        self._attention_norm = self._norms("input_layernorm")
        self._mlp_norm = self._norms(self.mlp_norm_name)
        self._final_norm = self._norm_weight("model.norm")
        self._embedding = weights.take("model.embed_tokens.weight").to(device)
        self._tied = config.tie_word_embeddings
        self._head = kernels.linear(self.head_weight())

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [N, hidden] of tokens [N]."""
        return F.embedding(tokens, self._embedding)

    def rotations(self, positions: Tensor, lengths: Tensor) -> Rotations:
        """Rotary factors of N tokens at `positions` [N] in sequences of `lengths` [N] tokens, shared by all layers."""
        return tuple(rotary.factors(positions, lengths) for rotary in self._rotaries)

    def attention(self, layer: int, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """x + attention block of a layer, [N, hidden]."""
        return x + self._attention_block(layer, x, rotations, attend)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        """x + MLP block of a layer, [N, hidden]."""
        return x + self._mlp_block(layer, x)

    def keys_and_values(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """What a layer keeps of hidden states [N, hidden], each [N, kv_heads, head_dim], keys without positions."""
        qk, v = self._project(layer, x)
        return qk[:, self.shape.heads :], v

    def place_keys(self, layer: int, k: Tensor, rotations: Rotations) -> Tensor:
        """Such keys with their positions."""
        return self._place(layer, k, rotations)

    def head_input(self, x: Tensor) -> Tensor:
        """Normed hidden states [N, hidden]."""
        return self._norm(x, self._final_norm)

    def _attention_block(self, layer: int, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        heads = self.shape.heads
        qk, v = self._project(layer, x)
        qk = self._place(layer, qk, rotations)
        return self._projections.attention[layer].out(attend(layer, qk[:, :heads], qk[:, heads:], v))

    def _project(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [N, heads + kv_heads, head_dim], values [N, kv_heads, head_dim]."""
        s = self.shape
        into = self._projections.attention[layer].into
        qkv = into(self._norm(x, self._attention_norm[layer])).view(len(x), -1, s.head_dim)
        return qkv[:, : s.heads + s.kv_heads], qkv[:, s.heads + s.kv_heads :]

    def _place(self, layer: int, qk: Tensor, rotations: Rotations) -> Tensor:
        """Queries, keys or both [N, any number of heads, head_dim] as they attend: with their positions."""
        return self._kernels.rotate(qk, rotations[0])

    def _mlp_block(self, layer: int, x: Tensor) -> Tensor:
        maps = self._projections.mlp[layer]
        return maps.out(self._kernels.gate(maps.into(self._norm(x, self._mlp_norm[layer])), self._activation))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, weight, self._eps)

    def _make_rotaries(self, config: Any) -> tuple[Rotary, ...]:
        return (Rotary(config, self.shape, self._device),)

    def _norm_weight(self, name: str) -> Tensor:
        return self._weights.take(f"{name}.weight").to(self._device)

    def _norms(self, name: str) -> list[Tensor]:
        """The norm of that name of every layer."""
        return [self._norm_weight(f"{layer}.{name}") for layer in self._layers]


class Qwen3Decoder(LlamaDecoder):
    """Weights of a Qwen3 on one device: each head's queries and keys have an RMSNorm."""

    def __init__(
        self, config: Any, shape: ModelShape, weights: Weights, kernels: Kernels, device: torch.device
    ) -> None:
        super().__init__(config, shape, weights, kernels, device)
        self._head_norm = [self._head_norm_weight(layer) for layer in self._layers]

    def _project(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        qk, v = super()._project(layer, x)
        return self._norm(qk, torch.ones_like(qk[0, 0])) * self._head_norm[layer], v

    def _head_norm_weight(self, layer: str) -> Tensor:
        """[heads + kv_heads, head_dim], in the order of the queries and keys that `Rotary` wants."""
        counts = {"q_norm": self.shape.heads, "k_norm": self.shape.kv_heads}
        weights = [
            interleave(self._norm_weight(f"{layer}.self_attn.{name}"), self.shape.head_dim).expand(count, -1)
            for name, count in counts.items()
        ]
        return torch.cat(weights)


class SmolLM3Decoder(LlamaDecoder):
    """Weights of a SmolLM3 on one device: some layers, by default every fourth, know no positions (NoPE)."""

    def __init__(
        self, config: Any, shape: ModelShape, weights: Weights, kernels: Kernels, device: torch.device
    ) -> None:
        super().__init__(config, shape, weights, kernels, device)
        self._rotated = config.no_rope_layers  # 1 where the layer does rotate

    def _place(self, layer: int, qk: Tensor, rotations: Rotations) -> Tensor:
        return super()._place(layer, qk, rotations) if self._rotated[layer] else qk


def _activation_name(config: Any) -> str:
    name: str = getattr(config, "hidden_act", None) or config.hidden_activation
    return name
