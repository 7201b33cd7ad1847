"""Metrics and intervals say what their names say."""

from __future__ import annotations

import numpy as np
import pytest

from engine.bootstrap import Bootstrap
from pipeline.reporting.text_metrics import overlap, repetition


def test_a_text_overlaps_itself_wholly_and_a_stranger_not_at_all() -> None:
    assert overlap("A fast mail server.", "A fast mail server.") == pytest.approx((1, 1, 1, 1))
    assert overlap("zzz", "A fast mail server.") == pytest.approx((0, 0, 0, 0))
    assert overlap("", "A fast mail server.") == pytest.approx((0, 0, 0, 0))
    assert overlap("", " ") == (1, 1, 1, 1)


def test_rouge_is_an_f_measure_of_words_in_order() -> None:
    found = overlap("the cat sat", "the cat on the mat sat")
    assert found.rouge1 == pytest.approx(2 * 1 * (3 / 6) / (1 + 3 / 6))
    assert found.rouge2 == pytest.approx(2 * (1 / 2) * (1 / 5) / (1 / 2 + 1 / 5))
    assert found.rouge_l == pytest.approx(found.rouge1)
    assert overlap("sat cat the", "the cat on the mat sat").rouge_l < found.rouge_l


def test_only_what_was_there_before_counts_as_repeated() -> None:
    assert repetition([1, 2, 3]) == 0
    assert repetition(list(range(20))) == 0
    assert repetition([7] * 20) == pytest.approx(1 - 1 / 17)
    assert repetition([1, 2] * 10) == pytest.approx(1 - 2 / 17)


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


def test_a_ratio_without_a_denominator_is_no_figure() -> None:
    assert Bootstrap(3).ratio(np.ones(3), np.zeros(3)) is None
    with pytest.raises(ValueError, match="needs a row"):
        Bootstrap(0)
