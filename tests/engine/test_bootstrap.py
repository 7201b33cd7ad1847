"""Intervals say what their names say."""

import numpy as np
import pytest

from engine.bootstrap import Bootstrap


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    draw = np.random.default_rng(1)
    covered = 0
    for seed in range(200):
        estimate = Bootstrap(80, seed).mean(draw.exponential(2.0, 80))
        covered += estimate.low <= 2.0 <= estimate.high
    assert 0.88 < covered / 200 < 0.98


def test_shares_of_the_same_rows_are_paired() -> None:
    draw = np.random.default_rng(2)
    full = draw.uniform(0, 1, 200)
    estimate = Bootstrap(200).ratio(full * 0.9, full)
    assert estimate == pytest.approx((0.9, 0.9, 0.9))
    unpaired = Bootstrap(200).ratio(draw.permutation(full) * 0.9, full)
    assert unpaired is not None
    assert unpaired.high - unpaired.low > 0.05


def test_a_difference_of_ratios_is_paired() -> None:
    draw = np.random.default_rng(3)
    full, tokens = draw.uniform(10, 90, 200), draw.uniform(10, 60, 200)
    bootstrap = Bootstrap(200)
    assert bootstrap.difference((full, tokens), (full, tokens)) == (0, 0, 0)
    assert bootstrap.difference((full + 0.3 * tokens, tokens), (full, tokens)) == pytest.approx((0.3, 0.3, 0.3))
    assert bootstrap.difference((full, tokens), (full, np.zeros(200))) is None


def test_a_ratio_without_a_denominator_is_no_figure() -> None:
    assert Bootstrap(3).ratio(np.ones(3), np.zeros(3)) is None
    with pytest.raises(ValueError, match="needs a row"):
        Bootstrap(0)
