"""What a model family provides: its units, on tokens laid side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from engine.shape import ModelShape

# layer, queries [N, heads, head_dim], keys and values [N, kv_heads, head_dim] of N new tokens -> [N, heads * head_dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Decoder(Protocol):
    """A model on one device. x is the hidden states of N tokens, [N, hidden]."""

    shape: ModelShape

    def embed(self, tokens: Tensor) -> Tensor:
        """[N] -> [N, hidden]."""

    def rotations(self, positions: Tensor, lengths: Tensor) -> Tensor:
        """What `attention` needs to know of tokens at `positions` [N] in sequences of `lengths` [N] tokens."""

    def attention(self, layer: int, x: Tensor, rotations: Tensor, attend: Attend) -> Tensor:
        """x + the attention block of a layer."""

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        """x + the MLP block of a layer."""

    def logits(self, x: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocab]."""
