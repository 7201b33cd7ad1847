"""What a process spends, shared by the units that it has under way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock


@dataclass(eq=False)
class Share:
    """Of one unit."""

    seconds: float = 0.0
    joules: float = 0.0


class Spending:
    """Seconds and joules since a unit was begun, in equal shares with those that are under way at the same time."""

    def __init__(self, joules: Callable[[], float]) -> None:
        """`joules` counts up."""
        self._joules = joules
        self._lock = Lock()
        self._shares: list[Share] = []
        self._seconds_then = self._joules_then = 0.0

    def begin(self) -> Share:
        """A unit is under way."""
        with self._lock:
            self._spend()
            self._shares.append(share := Share())
        return share

    def so_far(self, share: Share) -> Share:
        """What it has come to, while it goes on."""
        with self._lock:
            self._spend()
            return Share(share.seconds, share.joules)

    def end(self, share: Share) -> None:
        """The unit is not under way any more."""
        with self._lock:
            self._spend()
            self._shares.remove(share)

    def _spend(self) -> None:
        now, joules = time.perf_counter(), self._joules()
        for share in self._shares:
            share.seconds += (now - self._seconds_then) / len(self._shares)
            share.joules += max(0.0, joules - self._joules_then) / len(self._shares)
        self._seconds_then, self._joules_then = now, joules
