"""Log lines on stderr: text for people, or a JSON object each for machines, which names what the line is about."""

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


_ids: dict[str, str] = {}  # what lines of this process are about
_here: ContextVar[dict[str, str]] = ContextVar("here")  # and those of this thread, for a while


def _name(record: logging.LogRecord) -> bool:
    """Lets a line name what it is about, unless it names something else itself."""
    for name, value in (_ids | _here.get({})).items():
        if not hasattr(record, name):
            setattr(record, name, value)
    return True


class _Text(logging.Formatter):
    """Without what is secret in a URL, wherever a line has it from."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


class _Json(_Text, JsonFormatter):
    """The same of a line that is an object."""


def set_up(format: LogFormat) -> None:
    """Send our own progress, and other packages' warnings, to stderr, in the format of the last call."""
    handler = logging.StreamHandler()
    if format == "json":
        names = {"levelname": "level", "name": "logger"}
        shown = " ".join(f"%({name})s" for name in (*names, "message"))
        handler.setFormatter(_Json(shown, rename_fields=names, timestamp="time"))
        handler.addFilter(_name)
    else:
        handler.setFormatter(_Text("%(asctime)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for package in ("engine", "pipeline", "jobs"):
        logging.getLogger(package).setLevel(logging.INFO)


def for_machines() -> bool:
    """Whether lines are JSON."""
    return any(isinstance(handler.formatter, _Json) for handler in logging.getLogger().handlers)


def name_lines(**ids: str) -> None:
    """What this process' lines are about from now on, as fields of JSON: run, replica and the like."""
    _ids.update(ids)


@contextmanager
def about(**ids: str) -> Iterator[None]:
    """What this thread's are about for a while, such as a unit."""
    before = _here.set(_here.get({}) | ids)
    try:
        yield
    finally:
        _here.reset(before)


@cache
def set_up_worker(format: LogFormat, run: str) -> None:
    """For a process of Ray's, once: Ray collects its lines in files."""
    if format == "json":
        set_up(format)
        name_lines(run=run, replica=str(os.getpid()), host=socket.gethostname())
    elif logging.lastResort is not None:  # where lines go in a process that has no handlers
        logging.lastResort.setFormatter(_Text())
