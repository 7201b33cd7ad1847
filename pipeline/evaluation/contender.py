"""The contender: a schedule, or an adaptive rule, to judge against full depth."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Self

from pydantic import Discriminator, PlainSerializer, PlainValidator, Tag

from engine import EarlyExit, Schedule

FULL_DEPTH = "full depth"


def _described(schedule: Schedule) -> dict[str, Any]:
    """Raises ValueError for one with bridges or other tensors: JSON has none."""
    if schedule.all_bridges or schedule.prompt_bridge or schedule.adapter or schedule.head_preview:
        raise ValueError("a schedule with tensors is no JSON")
    return schedule.to_dict()


def _is_exit(value: object) -> bool:
    return isinstance(value, EarlyExit) or (isinstance(value, dict) and "kind" in value)


_Bare = Annotated[Schedule, PlainValidator(Schedule.from_dict), PlainSerializer(_described), Tag("schedule")]
_Exit = Annotated[EarlyExit, Tag("exit")]


@dataclass(frozen=True)
class Contender:
    """A way to decode, under the name that the report shows."""

    name: str  # the same at every target, and whatever is done with prompts
    target: float | None  # decode FLOP speed-up it was made for, where it was made for one
    method: Annotated[_Bare | _Exit, Discriminator(lambda value: "exit" if _is_exit(value) else "schedule")]
    is_rival: bool = False
    note: str = ""  # how it was fitted to its target

    @classmethod
    def full_depth(cls, layers: int) -> Self:
        """The reference of every comparison."""
        return cls(FULL_DEPTH, None, Schedule.full_depth(layers))

    @property
    def prompt_layers(self) -> int | None:
        """Layers that all tokens of a prompt run, where a prompt bridge stands in for the others."""
        bridge = self.method.prompt_bridge if isinstance(self.method, Schedule) else None
        return None if bridge is None else bridge.layers

    @property
    def line(self) -> str:
        """What shares a line in the figures: its name, and what it does with prompts."""
        return self.name if self.prompt_layers is None else f"{self.name}, {self.prompt_layers} layers on prompts"

    @property
    def label(self) -> str:
        return self.line + ending(self.target)

    @property
    def identity(self) -> str:
        """What decides its outputs, 16 hexadecimal digits: not its name, and no provenance."""
        if isinstance(self.method, Schedule):
            described = {k: v for k, v in self.method.to_dict().items() if k not in self.method.provenance}
        else:
            described = asdict(self.method)
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def file_name(self) -> str:
        """Its label as one."""
        return re.sub(r"[^a-z0-9.]+", "-", self.label.lower()).strip("-")


def ending(target: float | None) -> str:
    """Of the name of what was made for a target: without it, schedules of one kind share a line in the figures."""
    return "" if target is None else f", {target:g}x"
