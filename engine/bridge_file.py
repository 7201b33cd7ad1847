"""bridges.safetensors: the tensors of a schedule's bridges, each named `<bridge>.<role>`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from engine.tensor_file import read_tensor_file, write_tensor_file

BRIDGES_FILE = "bridges.safetensors"


def write_tensors(path: Path, bridges: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write bridge -> role -> tensor."""
    write_tensor_file(
        path, {f"{name}.{role}": tensor for name, roles in bridges.items() for role, tensor in roles.items()}
    )


def read_tensors(path: Path) -> dict[str, dict[str, Tensor]]:
    """Bridge -> role -> tensor; raises ScheduleError naming a file that is missing or damaged."""
    tensors: dict[str, dict[str, Tensor]] = {}
    for key, tensor in read_tensor_file(path, "bridges", "they belong").items():
        name, _, role = key.rpartition(".")
        tensors.setdefault(name, {})[role] = tensor
    return tensors
