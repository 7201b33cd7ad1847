"""What all parts that a schedule brings along do with their tensors."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from engine.errors import ScheduleError

# Of fewer bits there are types that torch can neither look at nor convert.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class SchedulePart(ABC):
    """Equal to another of its kind with the same digest."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """Of its tensors and what else it is made of: it changes when a bit of them does."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def check_roles(what: str, tensors: Mapping[str, Tensor], roles: Sequence[str]) -> None:
    """Raises ScheduleError unless there is a tensor for each of two roles or more, and no other."""
    if set(tensors) != set(roles):
        needed = f"{', '.join(roles[:-1])} and {roles[-1]}"
        raise ScheduleError(f"{what} holds {', '.join(sorted(tensors)) or 'nothing'}: it needs {needed}")


def check_numbers(what: str, tensors: Mapping[str, Tensor]) -> None:
    """Raises ScheduleError, naming the role, where a tensor holds anything but finite floating-point numbers."""
    if all(tensor.dtype in FLOATS for tensor in tensors.values()) and are_finite(tensors.values()):
        return
    for role, tensor in tensors.items():
        if tensor.dtype not in FLOATS or not are_finite([tensor]):
            raise ScheduleError(f"{role} of {what} holds something that is no finite number of 16 bits or more")


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Of one device, which is asked but once."""
    found = [tensor.isfinite().all() for tensor in tensors]
    return not found or bool(torch.stack(found).all())


def digest_of(what: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 of a text and of tensors with their roles, in this order, bit for bit."""
    digest = hashlib.sha256(what.encode())
    for role, tensor in tensors:
        digest.update(f"{role} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def rounded(tensor: Tensor) -> Tensor:
    """As tensors are stored: in half precision, whose rounding is far below the error of any fit or training; in single
    precision if that overflows.
    """
    half = tensor.half()
    return half if bool(half.isfinite().all()) else tensor.float()
