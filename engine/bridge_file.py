"""bridges.safetensors: the tensors of a schedule's bridges, each named `<bridge>.<role>`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from engine.errors import ScheduleError

BRIDGES_FILE = "bridges.safetensors"


def write_tensors(path: Path, bridges: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write bridge -> role -> tensor."""
    tensors = {
        f"{name}.{role}": tensor.detach().cpu().contiguous()
        for name, roles in bridges.items()
        for role, tensor in roles.items()
    }
    path.write_bytes(save(tensors))  # safetensors' own files are their owner's alone to read


def read_tensors(path: Path) -> dict[str, dict[str, Tensor]]:
    """Bridge -> role -> tensor; raises ScheduleError naming a file that is missing or damaged."""
    tensors: dict[str, dict[str, Tensor]] = {}
    try:
        for key, tensor in load_file(path).items():
            name, _, role = key.rpartition(".")
            tensors.setdefault(name, {})[role] = tensor
    except (OSError, SafetensorError) as error:
        raise ScheduleError(
            f"the schedule's bridges {str(path)!r} cannot be read ({error}): they belong beside its schedule.json"
        ) from None
    return tensors
