"""Log lines on stderr: text for people, or a JSON object each for machines, which names what the line is about."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Literal

from pythonjsonlogger.json import JsonFormatter

from pipeline.redaction import redacted

LogFormat = Literal["text", "json"]
PACKAGES = ("engine", "pipeline", "jobs")


class _About(logging.Filter):
    """Lets lines name what all of this process or thread are about, unless they name something else themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: dict[str, str] = {}
        self.here: ContextVar[dict[str, str] | None] = ContextVar("here", default=None)
        self.machines = False

    def filter(self, record: logging.LogRecord) -> bool:
        for name, value in (self.ids | (self.here.get() or {})).items():
            if not hasattr(record, name):
                setattr(record, name, value)
        return True


_about = _About()


class _Text(logging.Formatter):
    """Without what is secret in a URL, wherever a line has it from."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


class _Json(JsonFormatter):
    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


def set_up(format: LogFormat) -> None:
    """Send our own progress, and other packages' warnings, to stderr, in the format of the last call."""
    handler = logging.StreamHandler()
    if format == "json":
        names = {"levelname": "level", "name": "logger"}
        shown = " ".join(f"%({name})s" for name in (*names, "message"))
        handler.setFormatter(_Json(shown, rename_fields=names, timestamp="time"))
        handler.addFilter(_about)
    else:
        handler.setFormatter(_Text("%(asctime)s %(message)s"))
    _about.machines = format == "json"
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for package in PACKAGES:
        logging.getLogger(package).setLevel(logging.INFO)


def for_machines() -> bool:
    """Whether lines are JSON."""
    return _about.machines


def name_lines(**ids: str) -> None:
    """What this process' lines are about from now on, as fields of JSON: run, replica and the like."""
    _about.ids = _about.ids | ids


@contextmanager
def about(**ids: str) -> Iterator[None]:
    """What this thread's are about for a while, such as a unit."""
    before = _about.here.set((_about.here.get() or {}) | ids)
    try:
        yield
    finally:
        _about.here.reset(before)


@cache
def set_up_worker(format: LogFormat, run: str) -> None:
    """For a process of Ray's, once: Ray collects its lines in files."""
    if format == "json":
        set_up(format)
        name_lines(run=run, replica=str(os.getpid()), host=socket.gethostname())
    elif logging.lastResort is not None:  # where lines go in a process that has no handlers
        logging.lastResort.setFormatter(_Text())
