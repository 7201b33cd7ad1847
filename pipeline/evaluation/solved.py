"""Rivals that were solved before: solving takes minutes, and a rerun should go straight to what is missing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Annotated, NotRequired

from pydantic import PlainValidator
from typing_extensions import TypedDict  # pydantic's demand before Python 3.12

from engine import EarlyExit, Sampling, Schedule, __version__
from pipeline.evaluation.contender import Contender
from pipeline.evaluation.rivals import RivalCalibration, solve_rival
from pipeline.storage.records import LARGE, Record
from pipeline.storage.storage import Storage

# With a name that is no identifier.
_Solved = TypedDict(
    "_Solved",
    {
        "name": str,
        "target": float,
        "note": str,
        "schedule": NotRequired[Annotated[Schedule, PlainValidator(Schedule.from_dict)]],
        "early exit": NotRequired[EarlyExit],
    },
)
_RECORD: Record[_Solved] = Record(_Solved | None, "delete it, and it is solved again", LARGE)


class SolvedRivals:
    """Rivals kept as JSON, under a name made of all that decides them."""

    def __init__(
        self, directory: Path, model_identity: str, sampling: Sampling, prompts: Sequence[Sequence[int]]
    ) -> None:
        """`prompts` are those to calibrate on."""
        self._directory, self._storage = directory, Storage(str(directory))
        self._basis = [__version__, model_identity, sampling.to_dict(), [list(prompt) for prompt in prompts]]

    def solve(
        self, names: Sequence[str], targets: Sequence[float], measure: Callable[[], RivalCalibration]
    ) -> Iterator[Contender]:
        """Each named rival at each target, but for those that cannot meet it, which is said.

        `measure` is called at most once, and only if one of them was not solved before.
        """
        calibration = cache(measure)
        for target in targets:
            for name in names:
                file = self._file(name, target)
                if not (self._directory / file).exists():
                    self._write(file, solve_rival(name, target, calibration()))
                if (solved := _RECORD.read(self._storage, file)) is not None:
                    method = solved.get("schedule") or solved.get("early exit")
                    if method is None:
                        raise _RECORD.damaged(self._storage, file, "it has no schedule and no early exit")
                    yield Contender(solved["name"], solved["target"], method, is_rival=True, note=solved["note"])

    def _write(self, file: str, rival: Contender | None) -> None:
        """None stands for a target out of reach."""
        described = None
        if rival is not None:
            method = rival.method
            kept = {"schedule": method.to_dict()} if isinstance(method, Schedule) else {"early exit": asdict(method)}
            described = {"name": rival.name, "target": rival.target, "note": rival.note, **kept}
        self._directory.mkdir(parents=True, exist_ok=True)
        scratch = self._directory / f".{file}.part"
        scratch.write_text(json.dumps(described, indent=1))
        scratch.replace(self._directory / file)

    def _file(self, name: str, target: float) -> str:
        decided = json.dumps([name, target, self._basis])
        return f"{name}-{target:g}x-{hashlib.sha256(decided.encode()).hexdigest()[:12]}.json"
