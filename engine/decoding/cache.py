"""The key/value cache: one pair of tensors per layer, rows of different lengths side by side."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from copy import copy

import torch
from torch import Tensor

from engine.shape import ModelShape

GROWTH = 128  # slots added when a row outgrows the cache


class KVCache:
    """Keys and values of B rows, right-padded: row b holds `lengths[b]` tokens, slots beyond are zero.

    Only layers whose attention runs in decoding have tensors, each [B, kv_heads, capacity, head_dim].
    """

    def __init__(
        self,
        shape: ModelShape,
        layers: Iterable[int],
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Zeros, not empty: a masked slot is multiplied by zero, and 0 x NaN would not be zero.
        self._layers = {
            layer: torch.zeros(2, rows, shape.kv_heads, capacity, shape.head_dim, dtype=dtype, device=device)
            for layer in layers
        }
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self._rows = torch.arange(rows, device=device)
        self.capacity = capacity

    def __contains__(self, layer: int) -> bool:
        return layer in self._layers

    @property
    def rows(self) -> int:
        return self.lengths.shape[0]

    @property
    def bytes(self) -> int:
        """Memory held, all layers."""
        return sum(pair.nbytes for pair in self._layers.values())

    def write_prompt(self, layer: int, row: int, k: Tensor, v: Tensor) -> None:
        """Keys and values [n, kv_heads, head_dim] of a row's prompt, into its first n slots."""
        pair = self._layers[layer]
        pair[0, row, :, : k.shape[0]] = k.transpose(0, 1)
        pair[1, row, :, : v.shape[0]] = v.transpose(0, 1)

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """One token per row, [B, kv_heads, head_dim], into the slot after its last; the caller advances `lengths`."""
        pair = self._layers[layer]
        pair[0, self._rows, :, self.lengths] = k
        pair[1, self._rows, :, self.lengths] = v

    def view(self, layer: int, rows: slice, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` slots of some rows: keys and values [rows * kv_heads, length, head_dim], no copies."""
        k, v = self._layers[layer][:, rows].flatten(1, 2)
        return k[:, :length], v[:, :length]

    def reserve(self, length: int) -> None:
        """Make room for rows of `length` tokens."""
        if length <= self.capacity:
            return
        grown = length + GROWTH
        for layer, pair in self._layers.items():
            bigger = pair.new_zeros(*pair.shape[:3], grown, pair.shape[4])
            bigger[:, :, :, : self.capacity] = pair
            self._layers[layer] = bigger
        self.capacity = grown

    def copy(self, layers: Collection[int]) -> KVCache:
        """A cache of its own with the same content, of the given layers."""
        twin = copy(self)
        twin._layers = {layer: pair.clone() for layer, pair in self._layers.items() if layer in layers}
        twin.lengths = self.lengths.clone()
        return twin

    def keep_rows(self, rows: Tensor) -> None:
        """Compact the batch to these row indices [B'], in this order."""
        for layer, pair in self._layers.items():
            self._layers[layer] = pair.index_select(1, rows)
        self.lengths = self.lengths[rows]
        self._rows = self._rows[: self.rows]

    def keep_layers(self, layers: set[int]) -> None:
        """Free every other layer: what is skipped once is never attended to again."""
        for layer in self._layers.keys() - layers:
            del self._layers[layer]
