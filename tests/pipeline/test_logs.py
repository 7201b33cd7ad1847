"""Log lines for machines: every one an object that says what it is about."""

import json
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

from jobs import command_line
from pipeline import logs
from pipeline.errors import JobError, NothingToDo

log = logging.getLogger("pipeline.test")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The process' logging as it was."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    logs.set_up("text")
    logs._ids.clear()
    logs.set_up_worker.cache_clear()
    root.handlers[:] = before
    root.setLevel(level)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_line_is_one_object_whatever_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up("json")
    log.info('two\nlines and a "quote" of %s', "é")
    try:
        raise ValueError("inside")
    except ValueError:
        log.exception("failed")
    first, second = lines(capsys.readouterr().err)
    assert first["message"] == 'two\nlines and a "quote" of é'
    assert (first["level"], first["logger"]) == ("INFO", "pipeline.test")
    assert first["time"].endswith("+00:00")
    assert "ValueError: inside" in second["exc_info"]


def test_a_line_stays_one_object_where_a_quoted_url_ends_in_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up("json")
    log.warning('reading "https://h/x?v=1&sig=5ecret" failed\nhttps://h/x?sig=5ecret\nagain')
    (line,) = lines(capsys.readouterr().err)
    assert line["message"] == 'reading "https://h/x?v=1" failed\nhttps://h/x\nagain'


def test_a_worker_names_run_and_replica_and_for_a_while_its_unit(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up_worker("json", "run7")
    logs.set_up_worker("json", "run7")  # once per unit, yet lines come once
    with logs.about(unit="00000-000000000"):
        log.warning("within")
        log.warning("of another", extra={"unit": "00001-000000000"})
    log.warning("after")
    within, other, after = lines(capsys.readouterr().err)
    assert (within["run"], within["replica"], within["unit"]) == ("run7", str(os.getpid()), "00000-000000000")
    assert other["unit"] == "00001-000000000"
    assert "unit" not in after


def test_a_worker_without_handlers_says_nothing_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert logging.lastResort is not None
    monkeypatch.setattr(logging.lastResort, "formatter", None)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as Ray starts one
    logs.set_up_worker("text", "run7")
    log.warning("reading %s", "s3://key:5ecret@bucket/in?sig=5ecret")
    assert capsys.readouterr().err == "reading s3://bucket/in\n"


def test_text_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up("text")
    log.info("plain", extra={"unit": "00000-000000000"})
    logging.getLogger("some.package").info("chatter")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" plain")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (JobError("input 'x' is gone"), 1, "error: input 'x' is gone"),
        (NothingToDo("another is at work"), 0, "nothing to do: another is at work"),
        (ZeroDivisionError("division"), 1, "job.py: defect"),
        (None, 0, "done"),
    ],
)
def test_how_a_job_ended_is_a_line_too(
    capsys: pytest.CaptureFixture[str], error: Exception | None, code: int, message: str
) -> None:
    def job() -> None:
        if error is not None:
            raise error

    logs.set_up("json")
    assert command_line.run("job.py", job) == code
    (line,) = lines(capsys.readouterr().err)
    assert line["message"] == message
    assert (line["program"], line["exit_code"]) == ("job.py", code)
