"""What has happened to each unit of a session, and what should happen to it next."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import Enum

from pipeline.execution.wire import Failure

SUSPECT_DEATHS = 2  # processes a unit may take with it before its rows are looked at one by one
SUSPECT_LOSSES = 3  # times a unit may vanish unseen, with its reader or its node, before the same


class Next(Enum):
    AGAIN = "in the next pass, with all others"
    ISOLATE = "alone, to find the row that kills its process"
    GIVE_UP = "record it as failed"


@dataclass(slots=True)
class UnitHistory:
    """Of one unit."""

    failures: int = 0
    deaths: int = 0
    losses: int = 0
    refused: bool = False
    error: str = ""  # the last one

    @property
    def attempts(self) -> int:
        return self.failures + self.deaths + self.losses


class Attempts:
    """Bounds every way in which a unit can come back undone, so that a session ends."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._units: defaultdict[str, UnitHistory] = defaultdict(UnitHistory)

    def of(self, unit: str) -> UnitHistory:
        return self._units[unit]

    def failed(self, unit: str, failure: Failure) -> None:
        """A stage reported that it could not do the unit."""
        history = self._units[unit]
        history.failures += 1
        history.refused |= failure.kind == "refused"
        history.error = f"{failure.stage}: {failure.error}"

    def died(self, unit: str, replica: str) -> None:
        """The replica that had begun it is gone, though its node is not."""
        self._units[unit].deaths += 1
        self._units[unit].error = f"generate: the replica died ({replica})"

    def lost(self, unit: str) -> None:
        """It came back in no shape: waiting at a replica that died, or in a reader or on a node that did."""
        self._units[unit].losses += 1
        self._units[unit].error = "its process or node was lost"

    def next(self, unit: str) -> Next:
        history = self._units[unit]
        if history.refused or history.failures >= self._limit:
            return Next.GIVE_UP
        if history.deaths >= SUSPECT_DEATHS or history.losses >= SUSPECT_LOSSES:
            return Next.ISOLATE
        return Next.AGAIN
