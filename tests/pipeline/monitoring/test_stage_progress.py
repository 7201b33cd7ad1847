"""Progress of stages on one machine."""

import logging
import time

import pytest

from pipeline.monitoring.stage_progress import StageProgress


def test_a_stage_that_comes_again_has_a_rate_of_its_own(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = StageProgress(logging.getLogger("stages"))
    with caplog.at_level(logging.INFO, logger="stages"):
        for now, done, total in ((0.0, 0, 100), (50.0, 50, 100), (100.0, 100, 100), (100.0, 0, 60), (110.0, 20, 60)):  # noqa: B007
            progress("collecting states", done, total)
    assert [record.message for record in caplog.records] == [
        "collecting states: 100",
        "collecting states: 50 of 100, 1.0/s, 0:00:50 left",
        "collecting states: 100 of 100, 1.0/s, 0:00:00 left",
        "collecting states: 60",
        "collecting states: 20 of 60, 2.0/s, 0:00:20 left",
    ]


def test_what_was_there_before_counts_for_no_rate(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = StageProgress(logging.getLogger("stages"))
    with caplog.at_level(logging.INFO, logger="stages"):
        for now, done in ((5.0, 300), (20.0, 300), (35.0, 330), (85.0, 400)):  # noqa: B007
            progress("training", done, 400)
    assert [record.message for record in caplog.records] == [
        "training: 400",
        "training: 330 of 400, 1.0/s, 0:01:10 left",
        "training: 400 of 400, 1.2/s, 0:00:00 left",
    ]
