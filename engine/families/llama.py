"""Llama: pre-norm RMSNorm, rotary grouped-query attention, gated SiLU MLP. SmolLM2 is of this shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoint import Weights
from engine.decoder import Attend
from engine.errors import ModelError
from engine.kernels import Kernels, Linear
from engine.rotary import Rotary, interleave
from engine.shape import ModelShape

if TYPE_CHECKING:  # importing it brings in much of transformers, which a process that only tokenises never needs
    from transformers import LlamaConfig


def shape(config: LlamaConfig) -> ModelShape:
    """Sizes from the config; raises ModelError for an activation this decoder does not have."""
    if config.hidden_act not in ("silu", "swish"):
        raise ModelError(f"activation {config.hidden_act!r} is not supported for llama models, only 'silu'")
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
    )


class LlamaDecoder:
    """Weights of a Llama on one device: fused queries/keys/values and gate/up projections."""

    def __init__(self, config: LlamaConfig, weights: Weights, kernels: Kernels, device: torch.device) -> None:
        self.shape = shape(config)
        self._eps = config.rms_norm_eps
        self._rotary = Rotary(config, self.shape, device)

        def linear(*names: str, rotated: int = 0) -> Linear:
            """Projections stacked; the first `rotated` of them rearranged for `Rotary`."""
            parts = [weights.take(f"{name}.weight") for name in names]
            biases = [weights.take(f"{name}.bias") for name in names if f"{name}.bias" in weights]
            for part in (parts, biases):
                part[:rotated] = [interleave(matrix, self.shape.head_dim) for matrix in part[:rotated]]
            bias = torch.cat(biases).to(device) if biases else None
            return kernels.linear(torch.cat(parts).to(device), bias)

        def vector(name: str) -> Tensor:
            return weights.take(f"{name}.weight").to(device)

        layers = [f"model.layers.{i}" for i in range(self.shape.layers)]
        qkv = ("q_proj", "k_proj", "v_proj")
        self._attention_norm = [vector(f"{layer}.input_layernorm") for layer in layers]
        self._qkv = [linear(*(f"{layer}.self_attn.{name}" for name in qkv), rotated=2) for layer in layers]
        self._out = [linear(f"{layer}.self_attn.o_proj") for layer in layers]
        self._mlp_norm = [vector(f"{layer}.post_attention_layernorm") for layer in layers]
        self._gate_up = [linear(f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj") for layer in layers]
        self._down = [linear(f"{layer}.mlp.down_proj") for layer in layers]
        self._final_norm = vector("model.norm")
        self._embedding = vector("model.embed_tokens")
        self._head = kernels.linear(self._embedding) if config.tie_word_embeddings else linear("lm_head")

    def embed(self, tokens: Tensor) -> Tensor:
        """[N] -> [N, hidden]."""
        return F.embedding(tokens, self._embedding)

    def rotations(self, positions: Tensor, lengths: Tensor) -> Tensor:
        """Rotary factors of N tokens at `positions` [N] in sequences of `lengths` [N] tokens, shared by all layers."""
        return self._rotary.factors(positions, lengths)

    def attention(self, layer: int, x: Tensor, rotations: Tensor, attend: Attend) -> Tensor:
        """x + attention block of a layer, [N, hidden]."""
        s = self.shape
        qkv = self._qkv[layer](self._norm(x, self._attention_norm[layer])).view(len(x), -1, s.head_dim)
        rotated = self._rotary.rotate(qkv[:, : s.heads + s.kv_heads], rotations)
        out = attend(layer, rotated[:, : s.heads], rotated[:, s.heads :], qkv[:, s.heads + s.kv_heads :])
        return x + self._out[layer](out)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        """x + MLP block of a layer, [N, hidden]."""
        gate, up = self._gate_up[layer](self._norm(x, self._mlp_norm[layer])).chunk(2, -1)
        return x + self._down[layer](F.silu(gate) * up)

    def logits(self, x: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocab]."""
        return self._head(self._norm(x, self._final_norm))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.shape.hidden,), weight, self._eps)
