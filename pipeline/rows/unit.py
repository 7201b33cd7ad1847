"""The work unit: what is read, generated, written and committed as a whole."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """One contiguous row range of one input file: read, generated, written and committed as a whole."""

    id: str
    path: str
    start: int
    rows: int
    sample: int = 0  # which of each row's samples
    stamp: str | None = None  # of the file when the job was planned

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkUnit:
        return cls(**json.loads(text))
