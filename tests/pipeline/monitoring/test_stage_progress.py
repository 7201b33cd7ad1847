"""Progress of stages on one machine."""

import logging
import time
from collections.abc import Callable, Iterable

import pytest

from pipeline.monitoring.stage_progress import StageProgress

Told = Callable[[str, Iterable[tuple[float, int, int]]], list[str]]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Told:
    """What is said of a stage: at each time so much is done of so much."""

    def tell(stage: str, course: Iterable[tuple[float, int, int]]) -> list[str]:
        now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: now)
        progress = StageProgress(logging.getLogger("stages"))
        with caplog.at_level(logging.INFO, logger="stages"):
            for now, done, total in course:  # noqa: B007
                progress(stage, done, total)
        return [record.message for record in caplog.records]

    return tell


def test_a_stage_that_comes_again_has_a_rate_of_its_own(told: Told) -> None:
    course = ((0.0, 0, 100), (50.0, 50, 100), (100.0, 100, 100), (100.0, 0, 60), (110.0, 20, 60))
    assert told("collecting states", course) == [
        "collecting states: 100",
        "collecting states: 50 of 100, 1.0/s, 0:00:50 left",
        "collecting states: 100 of 100, 1.0/s, 0:00:00 left",
        "collecting states: 60",
        "collecting states: 20 of 60, 2.0/s, 0:00:20 left",
    ]


def test_a_stage_over_fewer_is_another_though_it_is_as_far(told: Told) -> None:
    course = ((0.0, 0, 30), (30.0, 30, 30), (30.0, 0, 4), (34.0, 4, 4), (90.0, 4, 30), (100.0, 14, 30))
    assert told("collecting states", course)[-2:] == [
        "collecting states: 30",
        "collecting states: 14 of 30, 1.0/s, 0:00:16 left",
    ]


def test_what_was_there_before_counts_for_no_rate(told: Told) -> None:
    course = ((5.0, 300, 400), (20.0, 300, 400), (35.0, 330, 400), (85.0, 400, 400))
    assert told("training", course) == [
        "training: 400",
        "training: 330 of 400, 1.0/s, 0:01:10 left",
        "training: 400 of 400, 1.2/s, 0:00:00 left",
    ]
