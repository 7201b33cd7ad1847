"""Candidates for a schedule: one contiguous block above the warm-up layers that grows along the answer, bridged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.bridge import Bridge
from engine.calibration.growth import Growth
from engine.calibration.moments import Moments
from engine.orders import lowest_first
from engine.schedule import Plateau, Schedule


@dataclass(frozen=True, slots=True)
class Candidate:
    """A block [warmup, warmup + k) with k by step, and how its bridges are fitted."""

    warmup: int  # layers below the block
    growth: Growth
    ridge: float

    @classmethod
    def constant(cls, warmup: int, skipped: int, ridge: float) -> Candidate:
        return cls(warmup, ((0, skipped),), ridge)

    @property
    def ends(self) -> list[int]:
        """Layers where a bridged block ends."""
        return [self.warmup + skipped for _, skipped in self.growth if skipped]


class Bridges:
    """Fits bridges, each once."""

    def __init__(self, moments: Mapping[int, Moments]) -> None:
        """Moments by warm-up depth."""
        self._moments = moments
        self._fitted: dict[tuple[int, int, float], Bridge] = {}

    def schedule(self, layers: int, candidate: Candidate) -> Schedule:
        """The candidate's schedule with its bridges."""
        bridges = {
            f"{candidate.warmup}-{end}": self._fit(candidate.warmup, end, candidate.ridge) for end in candidate.ends
        }
        return self.assembled(layers, candidate, bridges)

    @staticmethod
    def assembled(layers: int, candidate: Candidate, bridges: Mapping[str, Bridge]) -> Schedule:
        """The candidate's schedule with bridges named "<first layer>-<layer after the last>"."""
        warmup = candidate.warmup
        deepest = max(skipped for _, skipped in candidate.growth)
        order = tuple(unit for group in lowest_first(layers, warmup)[:deepest] for unit in group)
        plateaus = tuple(
            Plateau(first, 2 * skipped, (f"{warmup}-{warmup + skipped}",) if skipped else ())
            for first, skipped in candidate.growth
        )
        return Schedule(layers, order, plateaus, bridges=bridges)

    def _fit(self, warmup: int, end: int, ridge: float) -> Bridge:
        key = (warmup, end, ridge)
        if key not in self._fitted:
            self._fitted[key] = self._moments[warmup].fit(2 * end, ridge)
        return self._fitted[key]
