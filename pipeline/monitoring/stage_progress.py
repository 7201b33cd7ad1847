"""Progress of a job on one machine that goes through stages."""

from __future__ import annotations

import logging
import time

SAY_EVERY_S = 10


class StageProgress:
    """Says every few seconds how far a stage is, how fast it goes and how long it still takes."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._stage, self._done, self._start, self._said = "", 0, 0.0, 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage or done < self._done:  # a stage may come again, over others
            self._stage, self._start, self._said = stage, now, now
            self._log.info("%s: %d", stage, total)
        elif now - self._said >= SAY_EVERY_S or done == total:
            rate = done / max(now - self._start, 1e-9)
            self._log.info("%s: %d of %d, %.1f/s, %.0f s left", stage, done, total, rate, (total - done) / rate)
            self._said = now
        self._done = done
