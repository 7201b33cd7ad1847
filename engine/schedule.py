"""Which units run at which step: a skip order x a decay, nested by construction."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import ScheduleError
from engine.shape import ModelShape

FORMAT = 1


class Unit(NamedTuple):
    """One sublayer of the decoder: the attention block ("a") or the MLP block ("m") of a layer."""

    kind: str
    layer: int

    def __str__(self) -> str:
        return f"{self.kind}{self.layer}"

    @classmethod
    def parse(cls, text: object) -> Unit:
        """Read "a4" or "m12"; raises ScheduleError on anything else."""
        if not isinstance(text, str) or text[:1] not in ("a", "m") or not text[1:].isdecimal():
            raise ScheduleError(f"{text!r} is not a unit: write 'a' or 'm' and a layer number, as in 'a4'")
        return cls(text[0], int(text[1:]))


class Plateau(NamedTuple):
    """A run of steps with the same active set; it lasts until the next plateau starts."""

    first_step: int
    skipped: int  # how many units from the head of the skip order are skipped


def all_units(layers: int) -> tuple[Unit, ...]:
    """Every unit of a model in the order it runs: a0, m0, a1, m1, ..."""
    return tuple(Unit(kind, layer) for layer in range(layers) for kind in "am")


@dataclass(frozen=True)
class Schedule:
    """Skip order x decay. Step 0 is the forward pass that takes the first generated token as input.

    The number of skipped units never falls from one plateau to the next and units are skipped from the head of one
    order, so active(t + 1) is a subset of active(t): whatever a token attends to has been cached.
    """

    layers: int
    skip_order: tuple[Unit, ...] = ()
    plateaus: tuple[Plateau, ...] = (Plateau(0, 0),)
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ScheduleError(f"layers must be at least 1, got {self.layers}")
        if len(set(self.skip_order)) != len(self.skip_order):
            raise ScheduleError("skip_order names a unit twice")
        for unit in self.skip_order:
            if unit.layer >= self.layers:
                raise ScheduleError(f"skip_order names {unit}, but the model ends at layer {self.layers - 1}")
            if unit.layer == 0:
                raise ScheduleError(f"skip_order names {unit}, but layer 0 always runs")
        if not self.plateaus or self.plateaus[0].first_step != 0:
            raise ScheduleError("skipped must start with a plateau at step 0")
        for before, after in zip(self.plateaus, self.plateaus[1:], strict=False):
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

    @classmethod
    def full_depth(cls, layers: int) -> Schedule:
        """The reference: nothing is skipped."""
        return cls(layers)

    @classmethod
    def build(
        cls, layers: int, order: Sequence[Sequence[Unit]], decay: Callable[[int], int], horizon: int, name: str = ""
    ) -> Schedule:
        """Skip order x decay.

        Args:
            layers: layers of the model.
            order: groups of units skipped together, first group first (see engine.orders).
            decay: groups skipped at a step, never falling (see engine.decays).
            horizon: the step from which on the decay stays at its floor.
            name: kept in the provenance.
        """
        sizes = [0]
        for group in order:
            sizes.append(sizes[-1] + len(group))
        plateaus: list[Plateau] = []
        for step in range(horizon + 1):
            groups = decay(step)
            if not 0 <= groups < len(sizes):
                raise ScheduleError(f"the decay skips {groups} at step {step}, but the order holds {len(order)}")
            if not plateaus or plateaus[-1].skipped != sizes[groups]:
                plateaus.append(Plateau(step, sizes[groups]))
        provenance = {"name": name} if name else {}
        return cls(layers, tuple(unit for group in order for unit in group), tuple(plateaus), provenance)

    def plateau_at(self, step: int) -> int:
        """Index of the plateau that holds `step`."""
        return max(i for i, plateau in enumerate(self.plateaus) if plateau.first_step <= step)

    def active_units(self, plateau: int) -> tuple[Unit, ...]:
        """Units that run on a plateau, in running order."""
        skipped = set(self.skip_order[: self.plateaus[plateau].skipped])
        return tuple(unit for unit in all_units(self.layers) if unit not in skipped)

    def active(self, step: int) -> tuple[Unit, ...]:
        """Units that run at a step, in running order."""
        return self.active_units(self.plateau_at(step))

    @property
    def is_full_depth(self) -> bool:
        return self.plateaus[-1].skipped == 0

    def check_fits(self, shape: ModelShape) -> None:
        """Raises ScheduleError if the schedule was made for a model of another depth."""
        if self.layers != shape.layers:
            raise ScheduleError(
                f"the schedule is for a model of {self.layers} layers, but this {shape.family} model has "
                f"{shape.layers}: make one for this model, or name the model it was made for"
            )

    def to_dict(self) -> dict[str, Any]:
        """The schedule file's object (design: "Schedule file")."""
        return {
            "format": FORMAT,
            "layers": self.layers,
            "skip_order": [str(unit) for unit in self.skip_order],
            "skipped": [list(plateau) for plateau in self.plateaus],
            **self.provenance,
        }

    @classmethod
    def from_dict(cls, data: object) -> Schedule:
        """Read a schedule file's object; raises ScheduleError naming what is wrong with it."""
        if not isinstance(data, dict):
            raise ScheduleError(f"a schedule is a JSON object, got {type(data).__name__}")
        if data.get("format") != FORMAT:
            raise ScheduleError(f"schedule format {data.get('format')!r} is not known, this version reads {FORMAT}")
        layers, order, skipped = (data.get(key) for key in ("layers", "skip_order", "skipped"))
        if not isinstance(layers, int) or isinstance(layers, bool):
            raise ScheduleError(f"layers must be a whole number, got {layers!r}")
        if not isinstance(order, list):
            raise ScheduleError(f"skip_order must be a list of units, got {order!r}")
        if not isinstance(skipped, list) or not all(
            isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair)
            for pair in skipped
        ):
            raise ScheduleError(f"skipped must be a list of [first step, units skipped], got {skipped!r}")
        provenance = {k: v for k, v in data.items() if k not in ("format", "layers", "skip_order", "skipped")}
        return cls(layers, tuple(map(Unit.parse, order)), tuple(Plateau(*pair) for pair in skipped), provenance)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Inverse of `to_json`; raises ScheduleError."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ScheduleError(f"the schedule is not JSON: {error}") from None
        return cls.from_dict(data)

    @classmethod
    def read(cls, path: str | Path) -> Schedule:
        """Read a `schedule.json`, or the one inside a directory; raises ScheduleError naming the path."""
        path = Path(path)
        file = path / "schedule.json" if path.is_dir() else path
        try:
            return cls.from_json(file.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ScheduleError(f"the schedule {str(file)!r} cannot be read: {error}") from None
        except ScheduleError as error:
            raise ScheduleError(f"{str(file)!r}: {error}") from None
