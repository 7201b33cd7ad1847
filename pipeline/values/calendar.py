"""Dates, times and durations as text, from the integers that Arrow keeps: of any size, Python's years end at 9999.

What Python can hold reads as its `str` does.
"""

from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache

import numpy as np
import pyarrow as pa

PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
DAY = 86_400  # seconds
EPOCH = datetime.fromtimestamp(0, UTC)


def date(days: int) -> str:
    """Days since 1970 as year-month-day of the proleptic Gregorian calendar; the year before 1 is 0."""
    text = str(np.datetime64(days, "D"))
    return text.zfill(11) if text.startswith("-") else text  # four digits of a year before 0 too


def time(value: int, unit: str) -> str:
    """Time of a day as hours:minutes:seconds; what is no time of a day reads as if the day were that long."""
    seconds, fraction = divmod(value, PER_SECOND[unit])
    return f"{_clock(seconds, 2)}{_fraction(fraction, unit)}"


def timestamp(value: int, unit: str, zone: str | None) -> str:
    """Date, time and, given a zone, its offset from UTC. In UTC where nobody knows the zone, or its rules for then."""
    seconds, fraction = divmod(value, PER_SECOND[unit])
    try:
        text = str((EPOCH + timedelta(seconds=seconds)).astimezone(UTC if zone is None else _rules(zone)))
        whole, offset = text[:19], text[19:]
    except (OverflowError, ValueError):  # beyond Python's years
        days, second = divmod(seconds, DAY)
        whole, offset = f"{date(days)} {_clock(second, 2)}", "+00:00"
    return f"{whole}{_fraction(fraction, unit)}{'' if zone is None else offset}"


def duration(value: int, unit: str) -> str:
    """As a timedelta reads: days, then hours:minutes:seconds that are never negative."""
    seconds, fraction = divmod(value, PER_SECOND[unit])
    days, second = divmod(seconds, DAY)
    whole = f"{days} day{'' if abs(days) == 1 else 's'}, " if days else ""
    return f"{whole}{_clock(second, 1)}{_fraction(fraction, unit)}"


def _clock(seconds: int, digits: int) -> str:
    minutes, second = divmod(seconds, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:0{digits}d}:{minute:02d}:{second:02d}"


def _fraction(value: int, unit: str) -> str:
    """Of a second: six digits, nine where six are too few, none for nothing."""
    nanoseconds = value * (PER_SECOND["ns"] // PER_SECOND[unit])
    if not nanoseconds:
        return ""
    return f".{nanoseconds:09d}" if nanoseconds % 1_000 else f".{nanoseconds // 1_000:06d}"


@lru_cache(maxsize=64)
def _rules(zone: str) -> tzinfo:
    """UTC for a zone that nobody knows."""
    try:
        found: tzinfo = pa.scalar(0, pa.timestamp("s", zone)).as_py().tzinfo
    except Exception:  # whatever a time zone database makes of an odd name
        return UTC
    return found
