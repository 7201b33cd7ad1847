"""A schedule's files: what schedule.json says of its parts, and bridges.safetensors, which holds their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from engine.errors import ScheduleError
from engine.parts.adapter import ADAPTER_FILE, Adapter
from engine.parts.bridge import Bridge
from engine.parts.head_preview import HeadPreview
from engine.parts.part import SchedulePart
from engine.parts.prompt_bridge import PromptBridge
from engine.parts.tensor_file import read_tensor_file, write_tensor_file
from engine.parts.unit import Block, Unit

BRIDGES_FILE = "bridges.safetensors"
# Names in the file and among the tensors: the prompt bridge's, of what prompts skip a block by, the head preview's.
PROMPTS, PROMPTS_SKIP, HEAD = "prompts", "prompts skip", "head"
Part = TypeVar("Part", bound=SchedulePart)


def write_tensors(path: Path, bridges: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write bridge -> role -> tensor, each named `<bridge>.<role>`."""
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


def read_bridges(data: object, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Bridge]:
    """The bridges that a schedule file describes; raises ScheduleError if these tensors are not theirs."""
    if not isinstance(data, dict):
        raise ScheduleError(f"bridges must map names to what each replaces, got {data!r}")
    bridges = {}
    for name, described in data.items():
        if name not in tensors:
            raise ScheduleError(f"there are no tensors for bridge {name!r}: {BRIDGES_FILE} belongs beside the schedule")
        bridges[name] = Bridge(_block_of(name, described), dict(tensors[name]))
        _check_digest(f"bridge {name!r}", described, bridges[name])
    return bridges


def describe_bridge(bridge: Bridge) -> dict[str, Any]:
    """Where it stands and what it is, as a schedule file says it."""
    block = bridge.block
    place = {"before": str(block.first)} if bridge.corrects else {"replaces": [str(unit) for unit in block]}
    return {**place, "form": bridge.form, "digest": bridge.digest}


def _block_of(name: str, described: object) -> Block:
    """Inverse of `describe_bridge`."""
    if isinstance(described, dict):
        if "before" in described:
            return Block.before(Unit.parse(described["before"]))
        replaces = described.get("replaces")
        if isinstance(replaces, list) and len(replaces) == 2:
            return Block(*map(Unit.parse, replaces))
    raise ScheduleError(
        f"bridge {name!r} must say which units it replaces, [first, last], or before which it stands, got {described!r}"
    )


def read_prompt_bridge(data: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> PromptBridge | None:
    """As `read_bridges`, for the prompt bridge of a schedule file's object; None where it has none."""
    number = ("bridged_from", "from which layer on they are bridged")

    def make(first: int, roles: Mapping[str, Tensor]) -> PromptBridge:
        described = data[PROMPTS].get("skips")
        skips = read_bridges({} if described is None else {PROMPTS_SKIP: described}, tensors).get(PROMPTS_SKIP)
        return PromptBridge(first, roles, skips)

    return _read_part(make, "the prompt bridge", PROMPTS, number, data, tensors)


def describe_prompt_bridge(bridge: PromptBridge) -> dict[str, Any]:
    """As a schedule file says it."""
    skips = {"skips": describe_bridge(bridge.skips)} if bridge.skips else {}
    return {"bridged_from": bridge.first, **skips, "digest": bridge.digest}


def read_head_preview(data: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> HeadPreview | None:
    """As `read_bridges`, for the head preview of a schedule file's object; None where it has none."""
    number = ("candidates", "how many tokens get exact logits")
    return _read_part(HeadPreview, "the head preview", HEAD, number, data, tensors)


def _read_part(
    make: Callable[[int, Mapping[str, Tensor]], Part],
    what: str,
    name: str,
    number: tuple[str, str],
    data: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, Tensor]],
) -> Part | None:
    """As `read_bridges`, for a part that a whole number and tensors make; None where the file has none.

    Args:
        make: it.
        what: it is.
        name: in the file and among the tensors.
        number: its key, and what it says.
        data: the schedule file's object.
        tensors: of all parts.
    """
    described, (key, meaning) = data.get(name), number
    if described is None:
        return None
    value = described.get(key) if isinstance(described, dict) else None
    if not isinstance(described, dict) or type(value) is not int:
        raise ScheduleError(f"{name} must say {meaning}, as {key}, got {described!r}")
    if name not in tensors:
        raise ScheduleError(f"there are no tensors for {what}: {BRIDGES_FILE} belongs beside the schedule")
    part = make(value, dict(tensors[name]))
    _check_digest(what, described, part)
    return part


def read_adapter(data: object, adapter: Adapter | None) -> Adapter | None:
    """The adapter that a schedule file names; raises ScheduleError if this one is not it."""
    if data is None:
        return None
    if not isinstance(data, dict) or adapter is None:
        raise ScheduleError(f"there is no adapter, but the schedule has one: {ADAPTER_FILE} belongs beside it")
    adapter = replace(adapter, changes_prompts=data.get("prompts") is True)
    _check_digest("the adapter", data, adapter, ADAPTER_FILE)
    return adapter


def describe_adapter(adapter: Adapter) -> dict[str, Any]:
    """As a schedule file says it."""
    return {**({"prompts": True} if adapter.changes_prompts else {}), "digest": adapter.digest}


def _check_digest(what: str, described: Mapping[str, Any], part: SchedulePart, file: str = BRIDGES_FILE) -> None:
    if described.get("digest") != part.digest:
        raise ScheduleError(
            f"the tensors of {what} are not those the schedule was made with: "
            f"take {file} from where this schedule comes from"
        )
