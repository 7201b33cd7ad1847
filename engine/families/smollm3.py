"""SmolLM3: Llama with layers that know no positions (NoPE), every fourth by default."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.decoder import Rotations
from engine.families.llama import LlamaDecoder
from engine.families.qwen2 import shape
from engine.kernels import Kernels
from engine.shape import ModelShape
from engine.weight_files import Weights

__all__ = ["SmolLM3Decoder", "shape"]


class SmolLM3Decoder(LlamaDecoder):
    """Weights of a SmolLM3 on one device."""

    def __init__(
        self, config: Any, shape: ModelShape, weights: Weights, kernels: Kernels, device: torch.device
    ) -> None:
        super().__init__(config, shape, weights, kernels, device)
        self._rotated = config.no_rope_layers  # 1 where the layer does rotate

    def _place(self, layer: int, qk: Tensor, rotations: Rotations) -> Tensor:
        return super()._place(layer, qk, rotations) if self._rotated[layer] else qk
