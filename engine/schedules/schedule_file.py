"""A schedule's files: what schedule.json says of its parts, and the safetensors beside it, which hold their tensors."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from engine.errors import ScheduleError
from engine.json_text import check_is_file
from engine.parts.adapter import Adapter
from engine.parts.bridge import Bridge
from engine.parts.head_preview import HeadPreview
from engine.parts.part import SchedulePart
from engine.parts.prompt_bridge import PromptBridge
from engine.parts.unit import Block, Unit

SCHEDULE_FILE, BRIDGES_FILE, ADAPTER_FILE = "schedule.json", "bridges.safetensors", "adapter.safetensors"
# Names in the file and among the tensors: the prompt bridge's, of what prompts skip a block by, the head preview's.
PROMPTS, PROMPTS_SKIP, HEAD = "prompts", "prompts skip", "head"
ADAPTER = "adapter"  # in the file
Tensors = Mapping[str, Mapping[str, Tensor]]  # part -> role -> tensor
AnyPart = Bridge | PromptBridge | HeadPreview | Adapter
Part = TypeVar("Part", bound=SchedulePart)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, from whatever device they are on; those of a part are named `<part>.<role>`."""
    # Copies: two parts may be of the same numbers, and safetensors refuses memory that is shared.
    content = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
    path.write_bytes(content)  # safetensors' own files are their owner's alone to read


def read_tensors(path: Path, belong: str) -> dict[str, Tensor]:
    """Inverse of `write_tensors`; raises ScheduleError naming a file that is missing or damaged."""
    try:
        check_is_file(path)
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise ScheduleError(f"{str(path)!r} cannot be read ({error}): {belong} beside its {SCHEDULE_FILE}") from None


def by_part(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors named `<part>.<role>`: part -> role -> tensor."""
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, role = key.rpartition(".")
        parts.setdefault(name, {})[role] = tensor
    return parts


def describe(part: AnyPart) -> dict[str, Any]:
    """What a schedule file says of a part. A digest stands for its tensors."""
    said: dict[str, Any] = {}
    if isinstance(part, Bridge):
        block = part.block
        place = {"before": str(block.first)} if part.corrects else {"replaces": [str(unit) for unit in block]}
        said = {**place, "form": part.form}
    elif isinstance(part, PromptBridge):
        said = {"bridged_from": part.first, **({"skips": describe(part.skips)} if part.skips else {})}
    elif isinstance(part, HeadPreview):
        said = {"candidates": part.candidates}
    elif part.changes_prompts:
        said = {"prompts": True}
    return {**said, "digest": part.digest}


def read_bridge(name: str, described: Any, tensors: Tensors) -> Bridge:
    """The bridge that a schedule file describes; raises ScheduleError if these tensors are not its own."""
    return _read(lambda roles: Bridge(_block_of(name, described), roles), f"bridge {name!r}", name, described, tensors)


def _block_of(name: str, described: object) -> Block:
    if isinstance(described, dict):
        if "before" in described:
            return Block.before(Unit.parse(described["before"]))
        replaces = described.get("replaces")
        if isinstance(replaces, list) and len(replaces) == 2:
            return Block(*map(Unit.parse, replaces))
    raise ScheduleError(
        f"bridge {name!r} must say which units it replaces, [first, last], or before which it stands, got {described!r}"
    )


def read_prompt_bridge(described: Any, tensors: Tensors) -> PromptBridge:
    """As `read_bridge`, for the prompt bridge."""
    first = _number(PROMPTS, described, "bridged_from", "from which layer on they are bridged")

    def make(roles: Mapping[str, Tensor]) -> PromptBridge:
        skips = described.get("skips")
        return PromptBridge(first, roles, None if skips is None else read_bridge(PROMPTS_SKIP, skips, tensors))

    return _read(make, "the prompt bridge", PROMPTS, described, tensors)


def read_head_preview(described: Any, tensors: Tensors) -> HeadPreview:
    """As `read_bridge`, for the head preview."""
    candidates = _number(HEAD, described, "candidates", "how many tokens get exact logits")
    return _read(lambda roles: HeadPreview(candidates, roles), "the head preview", HEAD, described, tensors)


def read_adapter(described: Any, tensors: Mapping[str, Tensor] | None) -> Adapter:
    """The adapter that a schedule file names; raises ScheduleError if these tensors are not its own."""
    if not isinstance(described, dict) or tensors is None:
        raise ScheduleError(f"there is no adapter, but the schedule has one: {ADAPTER_FILE} belongs beside it")
    adapter = Adapter(tensors, described.get("prompts") is True)
    _check_digest("the adapter", described, adapter, ADAPTER_FILE)
    return adapter


def _number(name: str, described: object, key: str, meaning: str) -> int:
    value = described.get(key) if isinstance(described, dict) else None
    if type(value) is not int:
        raise ScheduleError(f"{name} must say {meaning}, as {key}, got {described!r}")
    return value


def _read(
    make: Callable[[Mapping[str, Tensor]], Part], what: str, name: str, described: Mapping[str, Any], tensors: Tensors
) -> Part:
    """A part, by what makes it of its tensors."""
    if name not in tensors:
        raise ScheduleError(f"there are no tensors for {what}: {BRIDGES_FILE} belongs beside the schedule")
    part = make(tensors[name])
    _check_digest(what, described, part, BRIDGES_FILE)
    return part


def _check_digest(what: str, described: Mapping[str, Any], part: SchedulePart, file: str) -> None:
    if described.get("digest") != part.digest:
        raise ScheduleError(
            f"the tensors of {what} are not those the schedule was made with: "
            f"take {file} from where this schedule comes from"
        )
