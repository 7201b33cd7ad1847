"""Qwen3: Qwen2 with an RMSNorm on every head's queries and keys instead of the biases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.families.llama import LlamaDecoder
from engine.families.qwen2 import shape
from engine.kernels import Kernels
from engine.rotary import interleave
from engine.shape import ModelShape
from engine.weight_files import Weights

__all__ = ["Qwen3Decoder", "shape"]


class Qwen3Decoder(LlamaDecoder):
    """Weights of a Qwen3 on one device."""

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
