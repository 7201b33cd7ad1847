"""What a session does with units that come back undone, beside a cluster that is stood in for."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from pipeline.config import JobConfig
from pipeline.execution import session
from pipeline.execution.interruption import Interruption
from pipeline.execution.session import Session
from pipeline.monitoring.board import _BoardActor
from pipeline.rows.unit import WorkUnit

UNITS = [WorkUnit("00000-000000000", "a.parquet", 0, 256), WorkUnit("00000-000000256", "a.parquet", 256, 256)]


def test_rows_of_units_that_are_lost_or_given_up_are_not_counted_as_done(
    job: Callable[..., JobConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    board = _BoardActor()
    monkeypatch.setattr(session, "Board", lambda: board)
    monkeypatch.setattr(session, "replica_resources", lambda config: None)
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "node", "Alive": True}])
    task: Any = SimpleNamespace(config=job(), run="run")
    plan: Any = SimpleNamespace(rows=512)
    under_way = Session(task, plan, [], Interruption())
    under_way._pending = {unit.id: unit for unit in UNITS}
    for unit in UNITS:
        board.take(unit.id, "process 1", "node")
        board.batch_done(unit.id, 200, 800)

    under_way._account_for([UNITS[0].id])
    assert (board.read([]).rows, under_way._attempts.of(UNITS[0].id).deaths) == (200, 1)
    under_way._give_up(UNITS[1])
    assert board.read([]).rows == 0
