"""SIGTERM (a spot notice, a scheduler's stop) and Ctrl-C ask a job to end; they don't cut it off."""

import signal
import threading
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """While it is entered, remembers the first signal; a second one ends the process as usual."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python takes handlers from no other
            self._before = {number: signal.signal(number, self._remember) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
