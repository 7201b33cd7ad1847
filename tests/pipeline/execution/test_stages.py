"""What a replica says a unit has cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from engine_double import LAYERS, ByteTokenizer, EchoBackend

from engine import Schedule
from pipeline.config import JobConfig
from pipeline.execution.stages import Task, UnitGenerator
from pipeline.monitoring.spending import EnergyMeter
from pipeline.reporting.audit import Auditor
from pipeline.rows.rows import prepare
from pipeline.rows.template import PromptTemplate
from pipeline.rows.unit import WorkUnit

AUDIT_S = 0.2


class NoBoard:
    """Hears everything and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def test_the_time_of_an_audit_is_that_of_its_unit(
    job: Callable[..., JobConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def audit(*_: object) -> dict[str, float]:
        time.sleep(AUDIT_S)
        return {"audited": 1}

    monkeypatch.setattr(Auditor, "audit", audit)
    monkeypatch.setattr(EnergyMeter, "of_this_process", lambda gpus: EnergyMeter([]))
    template, table = PromptTemplate("{text}", format="raw"), pa.table({"text": ["one", "two"]})
    schedule = Schedule.full_depth(LAYERS)
    task = Task(job(), EchoBackend(), template, schedule, ("text",), table.schema, 100, "run")
    board: Any = NoBoard()
    prepared = prepare(table, table.schema, "text", template, ByteTokenizer(), 100)
    parcel = UnitGenerator(task, 1, board).run(WorkUnit("00000-000000000", "in/a.parquet", 0, 2), prepared)
    cost = parcel.cost or {}
    assert cost["audited"] == 1
    assert cost["seconds"] >= AUDIT_S
