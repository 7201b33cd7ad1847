"""Bootstrap intervals of sums over sums, all from the same resamples, so that comparisons are paired.

As `scipy.stats.bootstrap` gives them with its percentile method; the engine does without scipy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

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
        """sum(numerator) / sum(denominator) over rows; None where a denominator sums to nothing."""
        if not denominator.sum():
            return None
        above, below = self._counts @ numerator, self._counts @ denominator
        ratios = above[below != 0] / below[below != 0]
        low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return Estimate(float(numerator.sum() / denominator.sum()), float(low), float(high))

    def mean(self, values: Values) -> Estimate:
        """Mean over rows."""
        estimate = self.ratio(values, np.ones_like(values))
        assert estimate is not None
        return estimate
