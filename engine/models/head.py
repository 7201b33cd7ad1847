"""The vocabulary head of every family: one matrix, tied to the embedding or the checkpoint's own."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from engine.checkpoints.weight_files import Weights
from engine.kernels.base import Linear


class Headed:
    """What every decoder does with its head."""

    _weights: Weights
    _device: torch.device
    _embedding: Tensor
    _tied: bool  # whether the embedding is the head's matrix too
    _head: Linear

    def logits(self, x: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocab]."""
        return self.capped(self._head(self.head_input(x)))

    @abstractmethod
    def head_input(self, x: Tensor) -> Tensor:
        """What the head's matrix multiplies, [N, w], of hidden states [N, hidden] after the last layer."""

    def head_weight(self) -> Tensor:
        """The head's matrix [vocab, w]; read again where it is its own, as kernels may keep it in another layout."""
        return self._embedding if self._tied else self._weights.take("lm_head.weight").to(self._device)

    def capped(self, products: Tensor) -> Tensor:
        """Logits, of their products with the head's matrix: the same, but for families that cap or scale them."""
        return products
