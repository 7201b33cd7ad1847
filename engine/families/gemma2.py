"""Gemma 2: Llama with norms before and after each block, scaled embeddings, soft caps, alternating sliding windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.decoder import Attend, Rotations
from engine.families import llama
from engine.families.llama import LlamaDecoder
from engine.kernels import Kernels
from engine.shape import ModelShape
from engine.weight_files import Weights


def shape(config: Any) -> ModelShape:
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
