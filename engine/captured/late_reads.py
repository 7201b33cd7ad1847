"""Tokens on their way from the device to the host, which reads them when later passes have been started."""

from __future__ import annotations

import torch
from torch import Tensor

IN_FLIGHT = 2  # sets of tokens sent and not yet received: while one is read, the pass after it is running


class LateReads:
    """A queue of at most IN_FLIGHT sets of tokens.

    On CUDA they are copied asynchronously into pinned memory; receiving waits for the pass that made them and for
    nothing started later.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        """`rows`: most tokens in a set."""
        cuda = device.type == "cuda"
        self._buffers = torch.empty(IN_FLIGHT, rows, dtype=torch.long, pin_memory=cuda)
        self._events = [torch.cuda.Event() for _ in range(IN_FLIGHT)] if cuda else []
        self._widths: list[int] = []  # of the sets sent so far
        self._received = 0

    def __len__(self) -> int:
        """Sets sent and not yet received."""
        return len(self._widths) - self._received

    def send(self, tokens: Tensor) -> None:
        """Start the copy of tokens [B]."""
        assert len(self) < IN_FLIGHT
        place = len(self._widths) % IN_FLIGHT
        self._buffers[place, : len(tokens)].copy_(tokens, non_blocking=True)
        if self._events:
            self._events[place].record()
        self._widths.append(len(tokens))

    def receive(self) -> list[int]:
        """The oldest set."""
        place, width = self._received % IN_FLIGHT, self._widths[self._received]
        if self._events:
            self._events[place].synchronize()
        self._received += 1
        tokens: list[int] = self._buffers[place, :width].tolist()
        return tokens
