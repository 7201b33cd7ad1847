"""The work unit."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """One contiguous row range of one input file: read, generated, written and committed as a whole."""

    id: str
    path: str
    start: int
    rows: int
    sample: int = 0  # which of each row's samples
    stamp: str | None = None  # of the file when the job was planned
