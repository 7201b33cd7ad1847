"""An engine double that keeps books of what it generates, so that a test sees work that was done for nothing."""

import os
from dataclasses import dataclass
from pathlib import Path

from trap_double import Trap, TrapBackend

from engine import BatchStats

SIGNED = "model "  # so generations of models but "0" begin


@dataclass(frozen=True)
class Counting(Trap):
    """Appends each batch's number of tokens to a file before its generations leave."""

    books: str = ""

    def after(self, stats: BatchStats) -> None:
        with open(self.books, "a") as books:
            books.write(f"{stats.generated_tokens}\n")


def counting_backend(folder: Path | str, seconds_per_batch: float = 0.0, model: str = "0") -> TrapBackend:
    """Its books, and its traps' memory, are in `folder`. Models but "0" sign their generations."""
    books = os.path.join(folder, "books")
    prefix = "" if model == "0" else f"{SIGNED}{model}: "
    trap = Counting(prefix, scratch=str(folder), books=books, seconds_per_batch=seconds_per_batch)
    return TrapBackend(trap, model=model)


def tokens_generated(folder: Path | str) -> int:
    """Over all processes and sessions."""
    path = Path(folder, "books")
    return sum(int(line) for line in path.read_text().split()) if path.exists() else 0
