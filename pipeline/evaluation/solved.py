"""Rivals that were solved before: solving takes minutes, and a rerun should go straight to what is missing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict  # pydantic's demand before Python 3.12

from engine import EarlyExit, Sampling, Schedule, __version__
from engine.decoding.early_exit import Kind
from pipeline.errors import one_line
from pipeline.evaluation.contender import Contender
from pipeline.evaluation.rivals import RivalCalibration, rivals
from pipeline.storage.records import LARGE, Count, Record
from pipeline.storage.storage import Storage


class _Rule(TypedDict):
    kind: Kind
    checks: list[Count]
    threshold: float


# With a name that is no identifier.
_Solved = TypedDict(
    "_Solved",
    {
        "name": str,
        "target": float,
        "note": str,
        "schedule": NotRequired[dict[str, Any]],
        "early exit": NotRequired[_Rule],
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
        """As `rivals`; `measure` is called at most once, and only if one of them was not solved before."""
        calibration = cache(measure)
        for target in targets:
            for name in names:
                file = self._file(name, target)
                if not file.exists():
                    self._write(file, next(rivals([name], [target], calibration()), None))
                described = _RECORD.read(self._storage, file.name)
                if described is not None:
                    yield self._contender(described, file.name)

    def _write(self, file: Path, rival: Contender | None) -> None:
        """None stands for a target out of reach."""
        described = None
        if rival is not None:
            if isinstance(rival.method, Schedule):
                method = {"schedule": rival.method.to_dict()}
            else:
                method = {"early exit": asdict(rival.method)}
            described = {"name": rival.name, "target": rival.target, "note": rival.note, **method}
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(".part")
        scratch.write_text(json.dumps(described, indent=1))
        scratch.replace(file)

    def _file(self, name: str, target: float) -> Path:
        decided = json.dumps([name, target, self._basis])
        return self._directory / f"{name}-{target:g}x-{hashlib.sha256(decided.encode()).hexdigest()[:12]}.json"

    def _contender(self, described: _Solved, name: str) -> Contender:
        method: Schedule | EarlyExit
        try:
            if "schedule" in described:
                method = Schedule.from_dict(described["schedule"])
            elif "early exit" in described:
                rule = described["early exit"]
                method = EarlyExit(rule["kind"], tuple(rule["checks"]), rule["threshold"])
            else:
                raise ValueError("it has no schedule and no early exit")
        except ValueError as error:
            raise _RECORD.damaged(self._storage, name, one_line(error)) from error
        return Contender(described["name"], described["target"], method, is_rival=True, note=described["note"])
