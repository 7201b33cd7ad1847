"""The work unit."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """One contiguous row range of one input file, with all samples of each row: read, generated, written and committed
    as a whole.
    """

    id: str
    path: str
    start: int
    rows: int  # of the input
    samples: int = 1  # of each
    stamp: str | None = None  # of the file when the job was planned

    @property
    def generations(self) -> int:
        """Rows of its output."""
        return self.rows * self.samples


def rows_of_whole_unit(rows_per_unit: int, samples: int) -> int:
    """Of the input: as many as make so many rows of the output, but one at least."""
    return max(1, rows_per_unit // samples)
