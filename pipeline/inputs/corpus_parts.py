"""Which part of a corpus a row belongs to: schedules are fitted on one, trained on another, judged on a third."""

from __future__ import annotations

import hashlib
from typing import Literal

Part = Literal["calibrate", "train", "test", "all"]

TEST_SHARE, CALIBRATE_SHARE = 1 / 8, 1 / 8  # of all rows; the rest is for training


def part_of(key: str) -> Part:
    """The part of the row of this id or text: a hash of it, so the same in every run and every file. Never "all"."""
    place = int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big") / 2**48  # uniform in [0, 1)
    if place < TEST_SHARE:
        return "test"
    return "calibrate" if place < TEST_SHARE + CALIBRATE_SHARE else "train"
