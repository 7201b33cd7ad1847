"""Processes that train together, each on answers of its own: what they tell each other."""

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Peers:
    """The processes of torch's default process group, or this one alone where none is set up."""

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if together else 0
        self.count = dist.get_world_size() if together else 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, values: Sequence[T]) -> Sequence[T]:
        """This process's part of what all of them have: neighbours, in the order of ranks."""
        return values[self.rank * len(values) // self.count : (self.rank + 1) * len(values) // self.count]

    def mean(self, gradients: Sequence[Tensor]) -> None:
        """Replace every gradient by its mean over the processes."""
        if self.count == 1:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, mean in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient) / self.count)

    def firsts(self, value: T) -> T:
        """What the first process has."""
        if self.count == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def everyones(self, value: T) -> list[T]:
        """What each process has, in the order of ranks."""
        if self.count == 1:
            return [value]
        values: list[T | None] = [None] * self.count
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]
