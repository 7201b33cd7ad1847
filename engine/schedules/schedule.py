"""Which units run at which step: a skip order x a decay, nested by construction."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeGuard

from torch import Tensor

from engine.errors import ScheduleError
from engine.json_text import read_json
from engine.parts.adapter import Adapter
from engine.parts.bridge import Bridge
from engine.parts.head_preview import HeadPreview
from engine.parts.prompt_bridge import PromptBridge
from engine.parts.unit import Unit, all_units
from engine.schedules import schedule_file
from engine.schedules.schedule_file import ADAPTER, ADAPTER_FILE, BRIDGES_FILE, HEAD, PROMPTS, SCHEDULE_FILE, AnyPart
from engine.shape import ModelShape

FORMAT = 1
_LATE = 1 << 20  # a step that no answer comes to
MOST_LAYERS, MOST_PLATEAUS = 10_000, 10_000  # far beyond any model and any use


class Plateau(NamedTuple):
    """A run of steps with the same active set; it lasts until the next plateau starts."""

    first_step: int
    skipped: int  # how many units from the head of the skip order are skipped
    bridges: tuple[str, ...] = ()  # those that stand in for skipped blocks


class PromptPlan(NamedTuple):
    """What prompts run: schedules with the same one share a pass over them."""

    bridge: PromptBridge | None = None
    adapter: Adapter | None = None

    @property
    def is_full_depth(self) -> bool:
        return self.bridge is None and self.adapter is None


@dataclass(frozen=True)
class Schedule:
    """Skip order x decay. Step 0 is the forward pass that takes the first generated token as input.

    The number of skipped units never falls from one plateau to the next and units are skipped from the head of one
    order, so active(t + 1) is a subset of active(t): whatever a token attends to has been cached. Skipped units that no
    bridge replaces are skipped bare. Prompts run the model as it is unless there is a prompt bridge or an adapter that
    changes them; what the bridge skips, decoding skips from its first step on, unless it gives keys and values there.
    """

    layers: int
    skip_order: tuple[Unit, ...] = ()
    plateaus: tuple[Plateau, ...] = (Plateau(0, 0),)
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False)
    bridges: Mapping[str, Bridge] = field(default_factory=dict, hash=False)  # by name
    prompt_bridge: PromptBridge | None = None
    adapter: Adapter | None = None  # changes units for decode tokens, and for prompts' tokens if it says so
    head_preview: HeadPreview | None = None  # stands in for the vocabulary head of decode tokens

    def __post_init__(self) -> None:
        if not 1 <= self.layers <= MOST_LAYERS:
            raise ScheduleError(f"layers must be 1 to {MOST_LAYERS:,}, got {self.layers}")
        if len(set(self.skip_order)) != len(self.skip_order):
            raise ScheduleError("skip_order names a unit twice")
        for unit in self.skip_order:
            if unit.layer >= self.layers:
                raise ScheduleError(f"skip_order names {unit}, but the model ends at layer {self.layers - 1}")
            if unit.layer == 0:
                raise ScheduleError(f"skip_order names {unit}, but layer 0 always runs")
        if len(self.plateaus) > MOST_PLATEAUS:
            raise ScheduleError(f"a schedule has {MOST_PLATEAUS:,} plateaus at most, got {len(self.plateaus):,}")
        if not self.plateaus or self.plateaus[0].first_step != 0:
            raise ScheduleError("skipped must start with a plateau at step 0")
        for before, after in pairwise(self.plateaus):
            if after.first_step <= before.first_step:
                raise ScheduleError(f"plateaus must start at increasing steps, got {before} then {after}")
            if after.skipped < before.skipped:
                raise ScheduleError(
                    f"a schedule may only shrink, but it skips {before.skipped} units at step {before.first_step} and "
                    f"{after.skipped} at step {after.first_step}"
                )
        if not 0 <= self.plateaus[0].skipped <= self.plateaus[-1].skipped <= len(self.skip_order):
            raise ScheduleError(
                f"skipped units must lie between 0 and the skip order's {len(self.skip_order)}, "
                f"got {[p.skipped for p in self.plateaus]}"
            )
        for index in range(len(self.plateaus)):
            self._check_bridges(index)
        if taken := sorted(self.bridges.keys() & self._named_parts().keys()):
            raise ScheduleError(f"no bridge may be called {taken[0]!r}, which another part of the schedule is")
        if self.prompt_bridge is not None and self.prompt_bridge.skips and not self.prompt_bridge.keeps_skipped:
            block = self.prompt_bridge.skips.block
            if running := self._running(block.units, 0):
                raise ScheduleError(
                    f"prompts skip {block}, but decode tokens run {running} at step 0 and would find no keys and "
                    "values there"
                )

    def _named_parts(self) -> dict[str, AnyPart]:
        """Those whose tensors stand beside the bridges', by the names that they have there."""
        skips = None if self.prompt_bridge is None else self.prompt_bridge.skips
        parts = {PROMPTS: self.prompt_bridge, schedule_file.PROMPTS_SKIP: skips, HEAD: self.head_preview}
        return {name: part for name, part in parts.items() if part is not None}

    def _check_bridges(self, plateau: int) -> None:
        """Each of a plateau's bridges replaces a block of skipped units, no unit is replaced twice.

        A correction, a bridge over no unit, stands before a unit that runs, and is the only one there.
        """
        step = self.plateaus[plateau].first_step
        replaced: set[Unit] = set()
        corrected: set[Unit] = set()
        for name in self.plateaus[plateau].bridges:
            if name not in self.bridges:
                known = ", ".join(self.bridges) or "none"
                raise ScheduleError(f"step {step} uses bridge {name!r}, but the schedule's bridges are: {known}")
            block = self.bridges[name].block
            if self.bridges[name].corrects:
                if block.first not in self.active_units(plateau):
                    raise ScheduleError(f"bridge {name!r} stands {block}, which does not run at step {step}")
                if block.first in corrected:
                    raise ScheduleError(f"two bridges stand {block} at step {step}")
                corrected.add(block.first)
                continue
            if (running := self._running(block.units, plateau)) or not block.units:
                raise ScheduleError(
                    f"bridge {name!r} replaces {block}, but at step {step} {running or 'that is no unit'} still runs"
                )
            if twice := replaced & set(block.units):
                raise ScheduleError(f"two bridges replace {min(twice)} at step {step}")
            replaced |= set(block.units)

    def _running(self, units: Sequence[Unit], plateau: int) -> str:
        """Those of these units that run on a plateau."""
        skipped = self.skipped_units(plateau)
        return ", ".join(str(unit) for unit in units if unit not in skipped)

    @classmethod
    def full_depth(cls, layers: int) -> Self:
        """The reference: nothing is skipped."""
        return cls(layers)

    @classmethod
    def build(
        cls, layers: int, order: Sequence[Sequence[Unit]], decay: Callable[[int], int], horizon: int, name: str = ""
    ) -> Self:
        """Skip order x decay.

        Args:
            layers: layers of the model.
            order: groups of units skipped together, first group first (see `orders`).
            decay: groups skipped at a step, never falling (see `decays`).
            horizon: the step from which on the decay stays at its floor.
            name: kept in the provenance.

        Raises ScheduleError for a decay that skips more than there is, or more after the horizon than at it.
        """
        sizes = list(accumulate(map(len, order), initial=0))
        plateaus: list[Plateau] = []
        for step in range(horizon + 1):
            groups = decay(step)
            if not 0 <= groups < len(sizes):
                raise ScheduleError(f"the decay skips {groups} at step {step}, but the order holds {len(order)}")
            if not plateaus or plateaus[-1].skipped != sizes[groups]:
                plateaus.append(Plateau(step, sizes[groups]))
        if (later := decay(_LATE)) != decay(horizon):
            raise ScheduleError(f"the decay skips {later} in the end, and {decay(horizon)} at the horizon, {horizon}")
        provenance = {"name": name} if name else {}
        return cls(layers, tuple(unit for group in order for unit in group), tuple(plateaus), provenance)

    def plateau_at(self, step: int) -> int:
        """Index of the plateau that holds `step`."""
        return max(i for i, plateau in enumerate(self.plateaus) if plateau.first_step <= step)

    def skipped_units(self, plateau: int) -> frozenset[Unit]:
        """Units that do not run on a plateau."""
        return frozenset(self.skip_order[: self.plateaus[plateau].skipped])

    def bridges_on(self, plateau: int) -> tuple[Bridge, ...]:
        """The bridges that a plateau applies."""
        return tuple(self.bridges[name] for name in self.plateaus[plateau].bridges)

    def active_units(self, plateau: int) -> tuple[Unit, ...]:
        """Units that run on a plateau, in running order."""
        skipped = self.skipped_units(plateau)
        return tuple(unit for unit in all_units(self.layers) if unit not in skipped)

    def active(self, step: int) -> tuple[Unit, ...]:
        """Units that run at a step, in running order."""
        return self.active_units(self.plateau_at(step))

    @property
    def prompt_plan(self) -> PromptPlan:
        """What prompts run."""
        adapter = self.adapter if self.adapter is not None and self.adapter.changes_prompts else None
        return PromptPlan(self.prompt_bridge, adapter)

    @property
    def first_place(self) -> int:
        """Place of the first unit that some decode token skips, has changed or has a bridge before; 2L if none is."""
        bridged = {bridge.block.first for bridge in self.bridges.values()}
        skipped = self.skip_order[: self.plateaus[-1].skipped]
        changed = bridged.union(skipped, self.adapter.changes if self.adapter else ())
        return min((unit.place for unit in changed), default=2 * self.layers)

    @property
    def changed_from(self) -> int:
        """Place below which prompts and decode tokens are as at full depth."""
        return self.first_place if self.prompt_bridge is None else min(self.first_place, self.prompt_bridge.first_place)

    @property
    def all_bridges(self) -> tuple[Bridge, ...]:
        """Those of decode tokens, and what prompts skip a block by."""
        skips = self.prompt_bridge.skips if self.prompt_bridge else None
        return (*self.bridges.values(), *([skips] if skips else []))

    @property
    def is_full_depth(self) -> bool:
        parts = (*self.bridges.values(), self.prompt_bridge, self.adapter, self.head_preview)
        return self.plateaus[-1].skipped == 0 and all(part is None for part in parts)

    @property
    def with_whole_head(self) -> Self:
        """As vLLM runs it."""
        return replace(self, head_preview=None)

    def check_fits(self, shape: ModelShape) -> None:
        """Raises ScheduleError if the schedule was made for a model of another depth or width."""
        if self.layers != shape.layers:
            raise ScheduleError(
                f"the schedule is for a model of {self.layers} layers, but this {shape.family} model has "
                f"{shape.layers}: make one for this model, or name the model it was made for"
            )
        for name, bridge in self.bridges.items():
            if bridge.hidden != shape.hidden:
                raise ScheduleError(
                    f"bridge {name!r} maps hidden states of width {bridge.hidden}, but those of this {shape.family} "
                    f"model have width {shape.hidden}: calibrate a schedule for this model"
                )
        for part in (self.prompt_bridge, self.adapter, self.head_preview):
            if part is not None:
                part.check_fits(shape)

    def to_dict(self) -> dict[str, Any]:
        """The schedule file's object (design: "Schedule file"). Digests stand for the parts' tensors."""
        bridged = {
            "bridges": {name: schedule_file.describe(bridge) for name, bridge in self.bridges.items()},
            "bridged": [list(plateau.bridges) for plateau in self.plateaus],
        }
        parts: dict[str, AnyPart | None] = {PROMPTS: self.prompt_bridge, ADAPTER: self.adapter, HEAD: self.head_preview}
        return {
            "format": FORMAT,
            "layers": self.layers,
            "skip_order": [str(unit) for unit in self.skip_order],
            "skipped": [[plateau.first_step, plateau.skipped] for plateau in self.plateaus],
            **(bridged if self.bridges else {}),
            **{name: schedule_file.describe(part) for name, part in parts.items() if part is not None},
            **self.provenance,
        }

    @classmethod
    def from_dict(
        cls, data: object, tensors: schedule_file.Tensors | None = None, adapter: Mapping[str, Tensor] | None = None
    ) -> Self:
        """Read a schedule file's object; raises ScheduleError naming what is wrong with it.

        Args:
            data: the object.
            tensors: bridge -> role -> tensor, where the object names bridges; the prompt bridge is named "prompts",
                what prompts skip a block by "prompts skip", the head preview "head".
            adapter: its tensors, where the object names one.
        """
        if not isinstance(data, dict):
            raise ScheduleError(f"a schedule is a JSON object, got {type(data).__name__}")
        if data.get("format") != FORMAT:
            raise ScheduleError(f"schedule format {data.get('format')!r} is not known, this version reads {FORMAT}")
        layers, order = data.get("layers"), data.get("skip_order")
        skipped: Any = data.get("skipped")
        if type(layers) is not int:
            raise ScheduleError(f"layers must be a whole number, got {layers!r}")
        if not isinstance(order, list):
            raise ScheduleError(f"skip_order must be a list of units, got {order!r}")
        if not _is_lists_of(int, skipped) or any(len(pair) != 2 for pair in skipped):
            raise ScheduleError(f"skipped must be a list of [first step, units skipped], got {skipped!r}")
        bridged: Any = data.get("bridged", None if data.get("bridges") else [[]] * len(skipped))
        if not _is_lists_of(str, bridged) or len(bridged) != len(skipped):
            raise ScheduleError(f"bridged must list the names of bridges for each plateau of skipped, got {bridged!r}")
        for key in _NUMBERS:
            value = data.get(key)
            if value is not None and not (type(value) in (int, float) and abs(value) <= sys.float_info.max):
                raise ScheduleError(f"{key} must be a finite number, got {value!r}")
        for key in _RECORDS:
            if (value := data.get(key)) is not None and not isinstance(value, dict):
                raise ScheduleError(f"{key} must be an object, got {value!r}")
        bridges, tensors = data.get("bridges", {}), tensors or {}
        if not isinstance(bridges, dict):
            raise ScheduleError(f"bridges must map names to what each replaces, got {bridges!r}")
        prompts, adapted, head = (data.get(name) for name in (PROMPTS, ADAPTER, HEAD))
        read = cls(
            layers,
            tuple(map(Unit.parse, order)),
            tuple(Plateau(first, count, tuple(names)) for (first, count), names in zip(skipped, bridged, strict=True)),
            {key: value for key, value in data.items() if key not in _OWN_KEYS},
            {name: schedule_file.read_bridge(name, described, tensors) for name, described in bridges.items()},
            None if prompts is None else schedule_file.read_prompt_bridge(prompts, tensors),
            None if adapted is None else schedule_file.read_adapter(adapted, adapter),
            None if head is None else schedule_file.read_head_preview(head, tensors),
        )
        if unnamed := sorted(tensors.keys() - read.bridges.keys() - read._named_parts().keys()):
            raise ScheduleError(f"{BRIDGES_FILE} has tensors of {unnamed[0]!r}, which {SCHEDULE_FILE} does not name")
        return read

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def write(self, directory: str | Path) -> None:
        """Write `schedule.json`, its bridges and its adapter; the directory is made if need be."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        named = [(name, part.tensors) for name, part in {**self.bridges, **self._named_parts()}.items()]
        if named:
            tensors = {f"{name}.{role}": tensor for name, roles in named for role, tensor in roles.items()}
            schedule_file.write_tensors(directory / BRIDGES_FILE, tensors)
        if self.adapter is not None:
            schedule_file.write_tensors(directory / ADAPTER_FILE, self.adapter.tensors)
        (directory / SCHEDULE_FILE).write_text(self.to_json())

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a `schedule.json`, or the one inside a directory, and the bridges and adapter beside it.

        Raises ScheduleError naming the path.
        """
        path = Path(path)
        file = path / SCHEDULE_FILE if os.path.isdir(path) else path  # a Path raises for a name too long

        def beside(name: str, belong: str, *keys: str) -> dict[str, Tensor] | None:
            """Tensors in a file beside it, if the object has one of these keys."""
            needed = isinstance(data, dict) and any(data.get(key) for key in keys)
            return schedule_file.read_tensors(file.parent / name, belong) if needed else None

        try:
            data = read_json(file)
            bridges = schedule_file.by_part(beside(BRIDGES_FILE, "the bridges belong", "bridges", PROMPTS, HEAD) or {})
            return cls.from_dict(data, bridges, beside(ADAPTER_FILE, "the adapter belongs", ADAPTER))
        except ScheduleError as error:
            raise ScheduleError(f"{str(file)!r}: {error}") from None
        except (OSError, ValueError) as error:
            raise ScheduleError(f"the schedule {str(file)!r} cannot be read: {error}") from None


def _is_lists_of(kind: type, value: object) -> TypeGuard[list[list[Any]]]:
    return isinstance(value, list) and all(
        isinstance(each, list) and all(type(item) is kind for item in each) for each in value
    )


# Of the provenance, what jobs reckon with.
_NUMBERS = ("target_speedup", "target_sample_speedup", "decode_flop_speedup", "sample_flop_speedup")
_RECORDS = ("calibrated_on", "adapted_on")
_OWN_KEYS = ("format", "layers", "skip_order", "skipped", "bridges", "bridged", PROMPTS, ADAPTER, HEAD)
