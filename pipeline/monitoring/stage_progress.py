"""Progress of a job on one machine that goes through stages."""

import logging
import time
from datetime import timedelta

SAY_EVERY_S = 10


class StageProgress:
    """Says every few seconds how far a stage is, how fast it goes and how long it still takes."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._stage, self._done, self._first, self._start, self._said = ("", 0), 0, 0, 0.0, 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if (stage, total) != self._stage or done < self._done:  # a stage may come again, over others
            self._stage, self._first = (stage, total), done  # what was resumed took no time
            self._start = self._said = now
            self._log.info("%s: %d", stage, total)
        elif done > self._first and (now - self._said >= SAY_EVERY_S or done == total):
            rate = (done - self._first) / max(now - self._start, 1e-9)
            left = timedelta(seconds=round((total - done) / rate))
            pace = f"{rate:.1f}" if rate >= 1 else f"{rate:.2g}"
            self._log.info("%s: %d of %d, %s/s, %s left", stage, done, total, pace, left)
            self._said = now
        self._done = done
