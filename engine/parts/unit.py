"""The unit: one sublayer of the decoder. And the block: neighbouring units."""

import re
from typing import NamedTuple, Self

from engine.errors import ScheduleError


class Unit(NamedTuple):
    """One sublayer of the decoder: the attention block ("a") or the MLP block ("m") of a layer."""

    kind: str
    layer: int

    def __str__(self) -> str:
        return f"{self.kind}{self.layer}"

    @property
    def place(self) -> int:
        """Position in running order: a0, m0, a1, m1, ..."""
        return 2 * self.layer + (self.kind == "m")

    @classmethod
    def at(cls, place: int) -> Self:
        """Inverse of `place`."""
        return cls("am"[place % 2], place // 2)

    @classmethod
    def parse(cls, text: object) -> Self:
        """Read "a4" or "m12"; raises ScheduleError on anything else."""
        if not isinstance(text, str) or not re.fullmatch("[am][0-9]{1,6}", text):
            raise ScheduleError(f"{text!r} is not a unit: write 'a' or 'm' and a layer number, as in 'a4'")
        return cls(text[0], int(text[1:]))


class Block(NamedTuple):
    """Units that follow each other in running order, from `first` to `last`, both included.

    An empty block is a place between units: `last` then comes right before `first`.
    """

    first: Unit
    last: Unit

    def __str__(self) -> str:
        return f"{self.first}..{self.last}" if self.units else f"before {self.first}"

    @property
    def units(self) -> tuple[Unit, ...]:
        return tuple(map(Unit.at, range(self.first.place, self.last.place + 1)))

    @classmethod
    def of_layers(cls, first: int, end: int) -> Self:
        """Layers [first, end)."""
        return cls(Unit("a", first), Unit("m", end - 1))

    @classmethod
    def before(cls, unit: Unit) -> Self:
        """The empty block right before a unit."""
        return cls(unit, Unit.at(unit.place - 1))


def all_units(layers: int) -> tuple[Unit, ...]:
    """Every unit of a model in running order."""
    return tuple(map(Unit.at, range(2 * layers)))
