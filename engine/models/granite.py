"""Granite: Llama with a factor on the embeddings, the attention scores, what each block adds, and the logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.checkpoints.weight_files import Weights
from engine.kernels.base import Kernels
from engine.models import llama
from engine.models.decoder import Attend, Rotations
from engine.models.llama import LlamaDecoder
from engine.shape import AttentionKind, ModelShape


def shape(config: Any) -> ModelShape:
    """Sizes from a GraniteConfig; raises ModelError for an unknown activation."""
    plain = llama.shape(config)
    return replace(plain, attention_kinds=(AttentionKind(config.attention_multiplier),) * plain.layers)


class GraniteDecoder(LlamaDecoder):
    """Weights of a Granite on one device."""

    def __init__(
        self, config: Any, shape: ModelShape, weights: Weights, kernels: Kernels, device: torch.device
    ) -> None:
        super().__init__(config, shape, weights, kernels, device)
        self._embedding_factor: float = config.embedding_multiplier
        self._block_factor: float = config.residual_multiplier
        self._logit_divisor: float = config.logits_scaling

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [N, hidden] of tokens [N]."""
        return super().embed(tokens, positions) * self._embedding_factor

    def attention(self, layer: int, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """x + scaled attention block of a layer, [N, hidden]."""
        return x + self._attention_block(layer, x, rotations, attend) * self._block_factor

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        """x + scaled MLP block of a layer, [N, hidden]."""
        return x + self._mlp_block(layer, x) * self._block_factor

    def capped(self, products: Tensor) -> Tensor:
        """Products with the head's matrix, divided."""
        return products.div_(self._logit_divisor)
