"""Decays: how many layers (groups of the skip order) are skipped at step t. None ever falls as t grows.

Each goes from `start` at step 0 to `floor` at `horizon` and stays there. Fractions are rounded to the nearest layer.
"""

import math
from collections.abc import Callable, Sequence

from engine.errors import ScheduleError

Decay = Callable[[int], int]


def constant(floor: int) -> Decay:
    """The same number at every step."""
    return lambda step: floor


def linear(start: int, floor: int, horizon: int) -> Decay:
    """SkipDecode's own (arXiv 2307.02628): an even ramp over the horizon."""
    return _ramp(start, floor, horizon, lambda x: x)


def power_law(start: int, floor: int, horizon: int, exponent: float = 0.5) -> Decay:
    """x^exponent: fast at first for exponents below 1."""
    if exponent <= 0:
        raise ScheduleError(f"exponent must be > 0, got {exponent}")
    return _ramp(start, floor, horizon, lambda x: x**exponent)


def exponential(start: int, floor: int, horizon: int, rate: float = 5.0) -> Decay:
    """(1 - e^(-rate x)) / (1 - e^(-rate)): the larger the rate, the earlier most of it is gone."""
    if rate <= 0:
        raise ScheduleError(f"rate must be > 0, got {rate}")
    return _ramp(start, floor, horizon, lambda x: math.expm1(-rate * x) / math.expm1(-rate))


def cosine(start: int, floor: int, horizon: int) -> Decay:
    """(1 - cos(pi x)) / 2: slow at both ends."""
    return _ramp(start, floor, horizon, lambda x: (1 - math.cos(math.pi * x)) / 2)


def step(counts: Sequence[tuple[int, int]]) -> Decay:
    """Explicit plateaus: (first step, layers skipped from there on), the first at step 0."""
    if not counts or counts[0][0] != 0:
        raise ScheduleError(f"a step decay starts at step 0, got {list(counts)}")
    return lambda t: max((first, skipped) for first, skipped in counts if first <= t)[1]


def _ramp(start: int, floor: int, horizon: int, shape: Callable[[float], float]) -> Decay:
    """`shape` maps [0, 1] onto [0, 1] and never falls."""
    if not 0 <= start <= floor:
        raise ScheduleError(f"a decay goes from few skipped layers to more, got {start} to {floor}")
    if horizon < 1:
        raise ScheduleError(f"horizon must be >= 1, got {horizon}")
    return lambda t: round(start + (floor - start) * shape(min(t, horizon) / horizon))
