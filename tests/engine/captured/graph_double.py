"""CUDA graphs for a CPU: operations recorded once and replayed on the very tensors they were recorded with.

What makes a graph go wrong goes wrong here too: a number that the host had put in, a tensor that has moved since. What
a capture would refuse is refused: looking at a tensor's content, or bringing one from the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.captured.graphs import Graphs

aten = torch.ops.aten
REFUSED = (aten._local_scalar_dense, aten.nonzero, aten.equal, aten.lift_fresh, aten.masked_select)


class Recording(TorchDispatchMode):
    """A graph: runs operations as it records them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket in REFUSED:
            raise AssertionError(f"{function} has no place in a graph")
        out = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, _tensors(out)))
        return out

    def replay(self) -> None:
        for function, args, kwargs, recorded in self.operations:
            for old, new in zip(recorded, _tensors(function(*args, **kwargs)), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


def _tensors(out: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]


@contextmanager
def recorded_graphs() -> Iterator[list[Recording]]:
    """Passes are recorded at first use, and every later one is a replay. Gives the recordings so far."""
    recordings: list[Recording] = []

    def capture(self: Graphs, work: Callable[[], None]) -> Recording:
        recordings.append(Recording())
        with recordings[-1]:
            work()
        return recordings[-1]

    def make(self: Graphs, device: torch.device) -> None:
        self._graphs, self._captures = {}, True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graphs, "__init__", make)
        patch.setattr(Graphs, "_warm_up", lambda self, work: None)  # the recording is the first run
        patch.setattr(Graphs, "_capture", capture)
        yield recordings
