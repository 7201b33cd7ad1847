"""What has happened to a unit in a session, and what should happen to it next."""

from dataclasses import dataclass
from enum import Enum

from pipeline.execution.wire import Failure

SUSPECT_DEATHS = 2  # processes a unit may take with it before its rows are looked at one by one
SUSPECT_LOSSES = 3  # times a unit may vanish unseen, with its reader or its node, before the same
MOST_BESIDE_LOST = (1 << 30, 64, 4)  # units that are read together, by how often one of them was lost


class Next(Enum):
    AGAIN = "in the next pass, with all others"
    ISOLATE = "alone, to find the row that kills its process"
    GIVE_UP = "record it as failed"


@dataclass(slots=True)
class Attempts:
    """Those at one unit. Bounds every way in which it can come back undone, so that a session ends."""

    failures: int = 0
    deaths: int = 0
    losses: int = 0
    refused: bool = False
    error: str = ""  # the last one

    @property
    def longest_span(self) -> int:
        """How many units may be read with it: the more often it was lost, the fewer are lost with it."""
        return MOST_BESIDE_LOST[min(self.losses, len(MOST_BESIDE_LOST) - 1)]

    @property
    def count(self) -> int:
        return self.failures + self.deaths + self.losses

    def failed(self, failure: Failure) -> None:
        """A stage reported that it could not do the unit."""
        self.failures += 1
        self.refused |= failure.kind == "refused"
        self.error = f"{failure.stage}: {failure.error}"

    def died(self, replica: str) -> None:
        """The replica that had begun it is gone, though its node is not."""
        self.deaths += 1
        self.error = f"generate: the replica died ({replica})"

    def lost(self) -> None:
        """It came back in no shape: waiting at a replica that died, or in a reader or on a node that did."""
        self.losses += 1
        self.error = "its process or node was lost"

    def next(self, limit: int) -> Next:
        """`limit` is how many failures a unit may have."""
        if self.refused or self.failures >= limit:
            return Next.GIVE_UP
        if self.deaths >= SUSPECT_DEATHS or self.losses >= SUSPECT_LOSSES:
            return Next.ISOLATE
        return Next.AGAIN
