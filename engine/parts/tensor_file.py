"""The safetensors files beside a schedule: what it brings along, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from engine.errors import ScheduleError
from engine.json_text import check_is_file


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, from whatever device they are on."""
    content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    path.write_bytes(content)  # safetensors' own files are their owner's alone to read


def read_tensor_file(path: Path, what: str, belong: str) -> dict[str, Tensor]:
    """Inverse of `write_tensor_file`.

    Args:
        path: of the file.
        what: part of the schedule it holds, and
        belong: that this belongs beside the schedule, for the message.

    Raises:
        ScheduleError: it is missing or damaged.
    """
    try:
        check_is_file(path)
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise ScheduleError(
            f"the schedule's {what} {str(path)!r} cannot be read ({error}): {belong} beside its schedule.json"
        ) from None
