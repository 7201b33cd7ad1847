"""JSON that every program reads alike, and files that hold it: nothing is read beyond a limit, nothing but a file."""

import errno
import json
import math
import os
from pathlib import Path
from typing import Any, NoReturn

MOST_VALUES = 4_000_000  # in one text: as Python objects they take some 500 MB
MOST_BYTES = 2**24  # of a file
DEEPEST = 64


def parse_json(text: str | bytes) -> Any:
    """JSON as RFC 8259 has it. Raises ValueError for what is none, too deep, too much, or out of range."""
    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        # At most so many values are made of it: what little a value takes is none without one of these.
        if sum(map(decoded.count, ",[{")) > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES:,} values")
        value = json.loads(decoded, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level = [value]
    for _ in range(DEEPEST):
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                deeper += item.values()
            elif isinstance(item, list):
                deeper += item
            elif isinstance(item, float) and not math.isfinite(item):
                raise ValueError("a number is beyond what a double holds")
        if not deeper:
            return value
        level = deeper
    raise ValueError(f"nested deeper than {DEEPEST} levels")


def read_json(path: Path, limit: int = MOST_BYTES) -> Any:
    """A file's JSON. Raises OSError; ValueError for what is none, no file, or larger than `limit` bytes."""
    check_is_file(path)
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit:,} bytes")
    return parse_json(content)


def check_is_file(path: Path) -> None:
    """Raises OSError, for what is not there too: a pipe would be waited for, a device may have no end."""
    path.stat()
    if not path.is_file():
        raise OSError("it is no file")
    if not os.access(path, os.R_OK):  # safetensors would say that it is not there
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
