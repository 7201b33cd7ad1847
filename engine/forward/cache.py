"""The key/value cache: places that rows take in the layers they attend in, and give back layer by layer.

Rows of similar length at their end share a block, so none is padded to a much longer one, and a block is compact: who
leaves it is replaced by its last row. What a block computes with is therefore one tensor without holes.
"""

from collections.abc import Iterable, Sequence
from typing import Self

import torch
from torch import Tensor

from engine.shape import ModelShape

ROWS = 8  # by which a block grows and shrinks at the most
SPARE_BYTES = 1 << 25  # that a block may have memory for in a layer before it goes by fewer rows
LEAST_SLOTS = 64  # of a row


def slots_for(tokens: int) -> int:
    """Slots of a row that ends with so many tokens: 64, 96, 128, 192, ...; few sizes, so that rows share blocks."""
    size = LEAST_SLOTS
    while size < tokens:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def rows_held(rows: int, row_bytes: int) -> int:
    """Rows that a block has memory for when so many have come and none has left, each of so many bytes in a layer."""
    step = _step(rows, row_bytes)
    return -(-rows // step) * step


def _step(rows: int, row_bytes: int) -> int:
    """By how many rows a block of so many grows and shrinks: of long ones by few, by an eighth of many."""
    most = min(ROWS, max(SPARE_BYTES // row_bytes, rows // ROWS, 1))
    return 1 << (most.bit_length() - 1)  # a power of two, so that more rows never need less


class RowBlock:
    """Rows of one size in the layers of one span. Slots that no token has written are zero."""

    def __init__(self, shape: ModelShape, layers: int, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.seats: list[int] = []  # place -> whose
        self.place: dict[int, int] = {}  # seat -> place
        # Of each layer [keys or values, rows, kv_heads, slots, head_dim]: where a block grows, one layer at a time has
        # old and new. Zeros, not empty: a masked slot is multiplied by zero, and 0 x NaN would not be zero.
        size = (2, 0, shape.kv_heads, slots, shape.head_dim)
        self._row_bytes = shape.cache_elements(slots) * dtype.itemsize  # in a layer
        self._store = [torch.zeros(size, dtype=dtype, device=device) for _ in range(layers)]

    @property
    def bytes(self) -> int:
        return sum(layer.nbytes for layer in self._store)

    @property
    def capacity(self) -> int:
        """Rows that it has memory for."""
        return self._store[0].shape[1]

    def layer(self, within: int) -> Tensor:
        """Keys and values of the rows, by place: [2, rows, kv_heads, slots, head_dim], a view."""
        return self._store[within][:, : len(self.seats)]

    def row(self, seat: int, within: int) -> Tensor:
        """Keys and values of a row in a layer, [2, kv_heads, slots, head_dim], a view."""
        return self._store[within][:, self.place[seat]]

    def add(self, seats: Iterable[int]) -> None:
        """Places for rows, after those that are there."""
        for seat in seats:
            self.place[seat] = len(self.seats)
            self.seats.append(seat)
        if len(self.seats) > self.capacity:
            self._resize()

    def remove(self, seat: int) -> None:
        """Give a row's place to the last one, and leave nothing behind, which might be no finite number."""
        place, last = self.place.pop(seat), self.seats.pop()
        for layer in self._store:
            if last != seat:
                layer[:, place] = layer[:, len(self.seats)]
            layer[:, len(self.seats)] = 0
        if last != seat:
            self.seats[place], self.place[last] = last, place
        rows = len(self.seats)
        if self.capacity - rows_held(rows, self._row_bytes) > _step(rows, self._row_bytes):
            self._resize()

    def _resize(self) -> None:
        rows = len(self.seats)
        kept, capacity = min(rows, self.capacity), rows_held(rows, self._row_bytes)
        for index, old in enumerate(self._store):
            self._store[index] = old.new_zeros(old.shape[0], capacity, *old.shape[2:])
            self._store[index][:, :kept] = old[:, :kept]


class KVCache:
    """Keys and values of the rows that run. A span is the layers that rows give back at the same time."""

    def __init__(
        self, shape: ModelShape, spans: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self.spans = spans
        self.place = {layer: (s, i) for s, span in enumerate(spans) for i, layer in enumerate(span)}
        self._blocks: list[dict[int, RowBlock]] = [{} for _ in spans]  # of each span, by slots
        self._slots: dict[int, int] = {}  # of each row

    @property
    def bytes(self) -> int:
        """Memory held, all layers."""
        return sum(block.bytes for blocks in self._blocks for block in blocks.values())

    def row_bytes(self, longest: int) -> int:
        """Bytes in a layer of a row that will end with so many tokens at the most."""
        return self._shape.cache_elements(slots_for(longest)) * self._dtype.itemsize

    def growth(self, longest: int, rows: int, before: int = 0) -> int:
        """Bytes by which room for rows adds to what is held, all layers, once some others of their size have entered.

        Args:
            longest: tokens that each of them will end with at the most.
            rows, before: how many enter, and how many of their size before them.
        """
        slots, row_bytes, total = slots_for(longest), self.row_bytes(longest), 0
        for span, blocks in zip(self.spans, self._blocks, strict=True):
            block = blocks.get(slots)
            there, held = (len(block.seats), block.capacity) if block is not None else (0, 0)
            then, now = (max(held, rows_held(there + more, row_bytes)) for more in (before + rows, before))
            total += (then - now) * row_bytes * len(span)
        return total

    def blocks(self, span: int) -> Iterable[RowBlock]:
        """Those that hold rows."""
        return self._blocks[span].values()

    def enter(self, longest: dict[int, int]) -> None:
        """Room in every layer for rows, by seat the number of tokens that each will end with at the most."""
        by_slots: dict[int, list[int]] = {}
        for seat, tokens in longest.items():
            self._slots[seat] = slots_for(tokens)
            by_slots.setdefault(self._slots[seat], []).append(seat)
        for span, blocks in zip(self.spans, self._blocks, strict=True):
            for slots, seats in by_slots.items():
                if slots not in blocks:
                    blocks[slots] = RowBlock(self._shape, len(span), slots, self._dtype, self._device)
                blocks[slots].add(seats)

    def holds(self, seat: int, span: int) -> bool:
        block = self._blocks[span].get(self._slots[seat])
        return block is not None and seat in block.place

    def row(self, seat: int, layer: int) -> Tensor:
        """Keys and values of a row, [2, kv_heads, slots, head_dim], a view."""
        span, within = self.place[layer]
        return self._blocks[span][self._slots[seat]].row(seat, within)

    def copy_row(self, other: Self, theirs: int, ours: int, tokens: int) -> None:
        """The first tokens of a row of a cache, for a row of this one, in all layers that both hold."""
        for layer, (span, _) in self.place.items():
            if self.holds(ours, span) and other.holds(theirs, other.place[layer][0]):
                self.row(ours, layer)[:, :, :tokens] = other.row(theirs, layer)[:, :, :tokens]

    def give_back(self, seat: int, span: int) -> None:
        """A row's memory in the layers of a span, where it has any."""
        blocks, slots = self._blocks[span], self._slots[seat]
        if self.holds(seat, span):
            blocks[slots].remove(seat)
            if not blocks[slots].seats:
                del blocks[slots]

    def leave(self, seat: int) -> None:
        """All that a row still has."""
        for span in range(len(self.spans)):
            self.give_back(seat, span)
        del self._slots[seat]
