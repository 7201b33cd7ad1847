"""How fast a training learns, and what its first points say of its last."""

import pytest

from engine.adaptation.curve import Point, is_early_look, reachable_kl
from engine.adaptation.recipe import Recipe


def test_the_rate_rises_and_falls_however_few_the_steps_are() -> None:
    for steps in (1, 3, 10, 12, 200):
        rates = [Recipe(steps=steps).rate(step) for step in range(steps)]
        assert max(rates) <= 1e-3
        assert sorted(rates[min(10, steps // 4) :], reverse=True) == rates[min(10, steps // 4) :]
        assert steps < 10 or rates[-1] < 0.2 * max(rates)
    assert Recipe().rate(4) == 5e-4  # of ten steps of warm-up


def test_the_early_estimate_goes_on_along_a_power_law() -> None:
    def after(step: int) -> Point:
        return Point(step, 1.0, 0.5 * (1 + step / 2) ** -0.1, 0.8, 1.0)

    points = [after(step) for step in (0, 20, 40, 60)]
    assert reachable_kl(points[:2], 300) == pytest.approx(after(300).kl)
    assert [is_early_look(points[: count + 1], 300) for count in range(4)] == [False, False, True, False]
    assert not is_early_look([after(0), after(20)], 20)
    assert reachable_kl(points[:2], 20) == pytest.approx(points[1].kl)
