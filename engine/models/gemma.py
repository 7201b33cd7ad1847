"""Gemma 2 and Gemma 3 (text only).

Gemma 2: Llama with norms before and after each block, scaled embeddings, soft caps, alternating sliding windows.
Gemma 3: Gemma 2 with normed queries and keys instead of soft caps, and a rotary base for each window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.checkpoints.weight_files import Weights
from engine.kernels.base import Kernels
from engine.models import llama
from engine.models.decoder import Attend, Rotations
from engine.models.llama import LlamaDecoder, Qwen3Decoder
from engine.models.rotary import Rotary
from engine.shape import ModelShape

LAYER_TYPES = ("full_attention", "sliding_attention")


def gemma2_shape(config: Any) -> ModelShape:
    """Sizes from a Gemma2Config; raises ModelError."""
    scale = config.query_pre_attn_scalar**-0.5
    kinds = llama.attention_kinds(config, scale, config.attn_logit_softcapping)
    return replace(llama.shape(config), attention_kinds=kinds)


class Gemma2Decoder(LlamaDecoder):
    """Weights of a Gemma 2 on one device."""

    mlp_norm_name = "pre_feedforward_layernorm"

    def __init__(
        self, config: Any, shape: ModelShape, weights: Weights, kernels: Kernels, device: torch.device
    ) -> None:
        super().__init__(config, shape, weights, kernels, device)
        self._attention_post_norm = self._norms("post_attention_layernorm")
        self._mlp_post_norm = self._norms("post_feedforward_layernorm")
        self._embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=weights.dtype, device=device)
        self._logit_softcap: float | None = config.final_logit_softcapping

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [N, hidden] of tokens [N]."""
        return super().embed(tokens, positions) * self._embedding_scale

    def attention(self, layer: int, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """x + normed attention block of a layer, [N, hidden]."""
        return x + self._norm(self._attention_block(layer, x, rotations, attend), self._attention_post_norm[layer])

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        """x + normed MLP block of a layer, [N, hidden]."""
        return x + self._norm(self._mlp_block(layer, x), self._mlp_post_norm[layer])

    def capped(self, products: Tensor) -> Tensor:
        """Softly capped, where the model caps them."""
        if self._logit_softcap is None:
            return products
        return (products / self._logit_softcap).tanh_().mul_(self._logit_softcap)

    def _norm_weight(self, name: str) -> Tensor:
        return super()._norm_weight(name) + 1  # a checkpoint holds how far each weight is from 1


def gemma3_shape(config: Any) -> ModelShape:
    """Sizes from a Gemma3TextConfig; raises ModelError."""
    kinds = llama.attention_kinds(config, config.query_pre_attn_scalar**-0.5)
    return replace(llama.shape(config), attention_kinds=kinds)


class Gemma3Decoder(Qwen3Decoder, Gemma2Decoder):
    """Weights of a Gemma 3 on one device."""

    def _place(self, layer: int, qk: Tensor, rotations: Rotations) -> Tensor:
        windowed = self.shape.attention_kind(layer).window is not None
        return super()._place(layer, qk, (rotations[windowed],))

    def _make_rotaries(self, config: Any) -> tuple[Rotary, ...]:
        return tuple(Rotary(config, self.shape, self._device, layer_type) for layer_type in LAYER_TYPES)
