"""What a replica says a unit has cost."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pyarrow as pa
import pytest
from engine_double import LAYERS, ByteTokenizer, Echo, EchoBackend
from fixture_types import Job

from engine import BatchStats, Generation, ModelError, Schedule
from pipeline.config import JobConfig
from pipeline.dataset.config import DatasetConfig
from pipeline.execution import stages
from pipeline.execution.cluster import ReplicaResources
from pipeline.execution.stages import Task, UnitGenerator
from pipeline.execution.wire import from_bytes
from pipeline.monitoring.spending import EnergyMeter
from pipeline.reporting.audit import Auditor
from pipeline.rows.rows import prepare
from pipeline.rows.template import PromptTemplate
from pipeline.rows.unit import WorkUnit

AUDIT_S = 0.2
ONE = ReplicaResources(1, 1, 0.0, 0.5, 1)


class NoBoard:
    """Hears everything and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


TEMPLATE, TABLE = PromptTemplate("{text}", format="raw"), pa.table({"text": ["one", "two"]})
PREPARED = prepare(TABLE, TABLE.schema, "text", TEMPLATE, ByteTokenizer(), 100)


def task_of(config: JobConfig, echo: Echo | None = None) -> Task:
    schedule = Schedule.full_depth(LAYERS)
    return Task(config, EchoBackend(echo or Echo()), TEMPLATE, schedule, ("text",), TABLE.schema, 100, "run")


@dataclass(frozen=True)
class Named(Echo):
    """Remembers what rows' random streams are named."""

    ids: list[str] = field(default_factory=list)

    def generate(self, *how: Any, **named: Any) -> Iterator[Generation]:
        self.ids.extend(named.get("sample_ids") or how[4])
        return super().generate(*how, **named)

    def share_prefix(self, tokens: Sequence[int]) -> int:
        return 5


def test_rows_draw_by_their_places_and_what_they_share_is_charged_once(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EnergyMeter, "of_this_process", lambda gpus: EnergyMeter([]))
    engine, config = Named(), DatasetConfig(**job(temperature=1.0).model_dump(), samples_per_prompt=2)
    path = config.input_storage().url.rstrip("/") + "/a.parquet"
    generator = UnitGenerator(task_of(config, engine), ONE, cast(Any, NoBoard()))
    parcels = [generator.run(WorkUnit(f"00000-00000000{start}", path, start, 2, 2), PREPARED) for start in (4, 6)]
    assert engine.ids == [f"a.parquet:{row}" for row in (4, 5, 6, 7)], "the engine adds the sample"
    assert [(parcel.cost or {}).get("flops_prefix") for parcel in parcels] == [5, None]
    rows = [row for parcel in parcels for row in from_bytes(cast(bytes, parcel.table)).to_pylist()]
    assert [(row["text"], row["sample"], row["generation"]) for row in rows] == 2 * [
        (text, sample, text) for text in ("one", "two") for sample in (0, 1)
    ]


def test_the_time_of_an_audit_is_that_of_its_unit(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def audit(*_: object) -> dict[str, float]:
        time.sleep(AUDIT_S)
        return {"audited": 1}

    monkeypatch.setattr(Auditor, "audit", audit)
    monkeypatch.setattr(EnergyMeter, "of_this_process", lambda gpus: EnergyMeter([]))
    generator = UnitGenerator(task_of(job()), replace(ONE, gpus=2.0), cast(Any, NoBoard()))
    parcel = generator.run(WorkUnit("00000-000000000", "in/a.parquet", 0, 2), PREPARED)
    cost = parcel.cost or {}
    assert cost["gpu_seconds"] == 2 * cost["seconds"]
    assert cost["audited"] == 1
    assert cost["seconds"] >= AUDIT_S


def test_an_audit_under_way_is_a_sign_of_life_that_counts_no_rows(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a job whose audits take long would be ended as one in which nothing moves."""
    told: list[tuple[Any, ...]] = []

    class Board(NoBoard):
        def batch_done(self, *what: Any) -> None:
            told.append(what)

    def audit(_: Auditor, prepared: pa.Table, ids: Sequence[str], answers: object, on_batch: Any) -> dict[str, float]:
        told.clear()
        for _batch in range(3):
            on_batch(BatchStats(samples=1, generated_tokens=7))
        return {}

    monkeypatch.setattr(Auditor, "audit", audit)
    monkeypatch.setattr(stages, "TELL_EVERY_S", 0.0)
    generator = UnitGenerator(task_of(job()), ONE, cast(Any, Board()))
    generator.run(WorkUnit("00000-000000000", "in/a.parquet", 0, 2), PREPARED)
    assert told == [("00000-000000000", 0, 0)] * 3


@dataclass(frozen=True)
class Unstarted(Echo):
    def decoding(self, *terms: Any) -> Any:
        raise ModelError("does not start")


def test_an_engine_that_does_not_start_ends_its_replica_before_it_says_that_it_is_ready(
    job: Job,
) -> None:
    """Not the rows of its first unit, one by one."""
    told: list[str] = []

    class Board:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: told.append(name)

    with pytest.raises(ModelError, match="does not start"):
        UnitGenerator(task_of(job(), Unstarted()), ONE, cast(Any, Board()))
    assert told == ["starting"]
