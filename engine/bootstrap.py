"""Bootstrap intervals of sums over sums, all from the same resamples, so that comparisons are paired.

As `scipy.stats.bootstrap` gives them with its percentile method; the engine does without scipy.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
_Sums = Callable[[Values], Any]  # of values by row: one sum, or one per resample

RESAMPLES = 2000
LEVEL = 0.95


class Estimate(NamedTuple):
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float


class Bootstrap:
    """Resamples of n rows, drawn once (Efron's percentile bootstrap).

    A ratio of sums covers means (denominator 1), means over tokens (sums and counts by row), and shares of full depth
    (both metrics by row): numerator and denominator are resampled together, so what rows have in common cancels.
    """

    def __init__(self, rows: int, seed: int = 0) -> None:
        if rows < 1:
            raise ValueError("a bootstrap needs a row")
        draw = np.random.default_rng(seed)
        # How often each resample holds each row, [RESAMPLES, rows].
        self._counts = draw.multinomial(rows, np.full(rows, 1 / rows), size=RESAMPLES).astype(np.float64)

    def ratio(self, numerator: Values, denominator: Values) -> Estimate | None:
        """sum(numerator) / sum(denominator) over rows; None where a denominator sums to nothing, or none is finite."""
        return self._estimate(lambda sums: sums(numerator) / sums(denominator), denominator)

    def difference(self, first: tuple[Values, Values], second: tuple[Values, Values]) -> Estimate | None:
        """The first ratio of sums less the second; None as for `ratio`."""
        return self._estimate(
            lambda sums: sums(first[0]) / sums(first[1]) - sums(second[0]) / sums(second[1]), first[1], second[1]
        )

    def _estimate(self, figure: Callable[[_Sums], Values], *denominators: Values) -> Estimate | None:
        """Of a figure that is made of sums over rows; resamples without one of its denominators don't count."""
        if not all(denominator.sum() for denominator in denominators):
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            resampled = figure(lambda values: self._counts @ values)
        finite = resampled[np.isfinite(resampled)]
        if not len(finite):
            return None
        low, high = np.quantile(finite, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return Estimate(float(figure(lambda values: values.sum())), float(low), float(high))

    def mean(self, values: Values) -> Estimate:
        """Mean over rows."""
        estimate = self.ratio(values, np.ones_like(values))
        assert estimate is not None
        return estimate
