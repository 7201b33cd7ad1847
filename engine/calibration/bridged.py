"""Candidates for a schedule: one contiguous block above the warm-up layers that grows along the answer, bridged.

Above it there may be more bridges, over single layers or as corrections.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch

from engine.calibration.growth import Growth
from engine.calibration.moments import Moments
from engine.calibration.own_states import OwnStates
from engine.forward.target import Lengths, decode_flop_speedup
from engine.parts.bridge import Bridge
from engine.parts.head_preview import HeadPreview
from engine.parts.unit import Block
from engine.schedules.orders import lowest_first
from engine.schedules.schedule import Plateau, Schedule
from engine.shape import ModelShape

MOST_FITTED = 64  # bridges that are kept: a search goes on from the newest
APART_RIDGE = 1e-2  # of bridges above the first


@dataclass(frozen=True, slots=True)
class Candidate:
    """A block [warmup, warmup + k) with k by step, and how its bridges are fitted."""

    warmup: int  # layers below the block
    growth: Growth
    ridge: float
    gain: float
    apart: tuple[Block, ...] = ()  # above it, in running order, bridged one by one wherever the first block is
    head: HeadPreview | None = None

    @classmethod
    def constant(cls, warmup: int, skipped: int, ridge: float, gain: float) -> Self:
        return cls(warmup, ((0, skipped),), ridge, gain)

    @property
    def ends(self) -> list[int]:
        """Layers where the block ends, where there is one."""
        return [self.warmup + skipped for _, skipped in self.growth if skipped]

    def blocks(self, end: int) -> dict[str, Block]:
        """All that is bridged where the first block ends there, by the bridge's name, in running order."""
        first = f"{self.warmup}-{end}"
        return {first: Block.of_layers(self.warmup, end)} | {f"{block} over {first}": block for block in self.apart}

    def schedule(self, layers: int, bridge: Callable[[str, Block], Bridge]) -> Schedule:
        """Its schedule, with a bridge for each name and block."""
        order = [unit for block in self.apart for unit in block.units]
        apart, deepest = len(order), max(skipped for _, skipped in self.growth)
        order += [unit for group in lowest_first(layers, self.warmup)[:deepest] for unit in group]
        named = {end: self.blocks(end) for end in self.ends}
        plateaus = tuple(
            Plateau(first, apart + 2 * skipped, tuple(named[self.warmup + skipped])) if skipped else Plateau(first, 0)
            for first, skipped in self.growth
        )
        bridges = {name: bridge(name, block) for blocks in named.values() for name, block in blocks.items()}
        return Schedule(layers, tuple(order), plateaus, bridges=bridges, head_preview=self.head)

    def counted(self, shape: ModelShape) -> Schedule:
        """Its schedule with bridges that are only good for counting FLOPs."""
        zeros = torch.zeros(shape.hidden, shape.hidden), torch.zeros(shape.hidden)
        return self.schedule(shape.layers, lambda _, block: Bridge.affine(block, *zeros))

    def speedup(self, shape: ModelShape, lengths: Lengths) -> float:
        """Its decode FLOP speed-up on samples of these lengths."""
        return decode_flop_speedup(shape, self.counted(shape), lengths)


class Bridges:
    """Fits bridges, the newest of which are kept."""

    def __init__(self, moments: Mapping[int, Moments], own: OwnStates | None = None) -> None:
        """Moments by warm-up depth, and what is needed for bridges above the first."""
        self._moments, self._own = moments, own
        self._fitted: dict[Candidate, Bridge] = {}  # by the constant candidate that it is the last bridge of

    def schedule(self, layers: int, candidate: Candidate) -> Schedule:
        """The candidate's schedule with its bridges."""
        bridges: dict[str, Bridge] = {}
        for end in candidate.ends:
            constant = replace(candidate, growth=((0, end - candidate.warmup),), head=None)
            for count, name in enumerate(candidate.blocks(end)):
                bridges[name] = self._last(layers, replace(constant, apart=candidate.apart[:count]))
        return candidate.schedule(layers, lambda name, _: bridges[name])

    def _last(self, layers: int, constant: Candidate) -> Bridge:
        """The last bridge of a constant candidate, given those below it."""
        if constant in self._fitted:
            return self._fitted[constant]
        if constant.apart:
            assert self._own is not None
            below = self.schedule(layers, replace(constant, apart=constant.apart[:-1]))
            fitted = self._own.fit(below, constant.apart[-1], APART_RIDGE)
        else:
            fitted = self._moments[constant.warmup].fit(2 * constant.ends[0], constant.ridge, constant.gain)
        if len(self._fitted) >= MOST_FITTED:
            del self._fitted[next(iter(self._fitted))]
        self._fitted[constant] = fitted
        return fitted
