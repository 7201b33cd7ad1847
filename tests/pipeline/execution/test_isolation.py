"""How a unit is taken apart that kills processes: without Ray, whose part is to say how each range ended."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import ray
from engine_double import EchoBackend
from fixture_types import Job, ReadOutput, WriteParquet
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError
from trap_double import Trap

from engine import ModelError
from pipeline.dataset.config import DatasetConfig
from pipeline.execution import isolation
from pipeline.execution.cluster import ReplicaResources
from pipeline.execution.isolation import MOST_DEATHS, MOST_SPLITS, Isolation, _assemble, _Cell
from pipeline.execution.stages import Task
from pipeline.execution.wire import Parcel, to_bytes
from pipeline.preparing.preparation import prepare_run
from pipeline.rows.row_generator import RowGenerator, TooManyRowsFailed
from pipeline.rows.rows import TOKENS, generate
from pipeline.rows.unit import WorkUnit


@dataclass
class Here(Isolation):
    """Ranges are done in this process; Ray would end it for those that are HUNGRY."""

    task: Task
    begun: list[tuple[int, int]] = field(default_factory=list)
    rows: RowGenerator | None = None  # one for all ranges until a process dies, as theirs is

    def __post_init__(self) -> None:
        board: Any = SimpleNamespace(read=lambda units: None)
        super().__init__(self.task, ReplicaResources(1, 1, 0.0, 1.0, 1), board, lambda: None)

    def _begin(self, part: WorkUnit) -> tuple[Any, Any]:
        self.begun.append((part.start, part.rows))
        ((_, prepared),) = self.task.prepared([part])
        if any(b"HUNGRY" in bytes(tokens or []) for tokens in prepared[TOKENS].to_pylist()):
            return OutOfMemoryError("Task was killed due to the node running low on memory."), None
        self.rows = self.rows or RowGenerator(
            self.task.backend.engine(self.task.config, None), self.task.config.sampling(), None, 32
        )
        try:
            output = generate(prepared, [str(row) for row in range(part.rows)], self.rows)
        except TooManyRowsFailed as error:
            return RayTaskError("run", "", error).as_instanceof_cause(), None
        return None, Parcel(part, table=to_bytes(output), cost={"flops_padding": 0, "seconds": 0})

    def _wait(self, reference: Any) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        self.rows = None


@pytest.fixture
def task(tmp_path: Path, job: Job, write_parquet: WriteParquet, monkeypatch: pytest.MonkeyPatch) -> "Make":
    """A run of these texts in one unit."""

    def get(fate: Any) -> None:
        if fate is not None:
            raise fate

    monkeypatch.setattr(ray, "get", get)

    def make(texts: list[str | None], samples: int = 1, **options: Any) -> tuple[Task, WorkUnit]:
        write_parquet(tmp_path / "in/a.parquet", {"text": pa.array(texts, pa.string())})
        config = job(rows_per_unit=samples * len(texts), max_new_tokens=40, temperature=1.0, **options).model_dump()
        ready = prepare_run(DatasetConfig(**config, samples_per_prompt=samples), EchoBackend(Trap()))
        (unit,) = ready.plan.units
        plan = ready.plan
        return Task(
            ready.config, ready.backend, ready.template, ready.schedule, plan.read_columns, plan.kept,
            ready.longest_prompt, "run",
        ), unit  # fmt: skip

    return make


Make = Callable[..., tuple[Task, WorkUnit]]


def done(task: Task, unit: WorkUnit, isolation: Here, read_output: ReadOutput) -> list[dict[str, Any]]:
    parts, killers = isolation._bisect(unit)
    parcel = _assemble(task, unit, sorted(killers.items()), *parts)
    assert parcel.failure is None
    return read_output(task.config.output).to_pylist()


def test_rows_that_all_raise_in_a_part_of_their_unit_have_errors_of_their_own(
    task: Make, read_output: ReadOutput
) -> None:
    made, unit = task(["row 0", "RAISE 1", None, "row 3", "RAISE 4", "RAISE 5", None, "RAISE 7"])
    rows = done(made, unit, Here(made), read_output)
    assert [row["generation"] for row in rows] == ["row 0", None, None, "row 3", None, None, None, None]
    errors = [row["error"] for row in rows]
    assert errors[2] == errors[6] == "text is null"
    for row in (1, 4, 5, 7):
        assert errors[row] == f"ValueError: cannot generate for 'RAISE {row}'"


def test_rows_that_raise_beside_one_that_kills_have_errors_of_their_own(task: Make, read_output: ReadOutput) -> None:
    """However many there are before the first good one."""
    made, unit = task([*(f"RAISE {row}" for row in range(8)), "HUNGRY", "RAISE 9", "row 10", "row 11"])
    rows = done(made, unit, Here(made), read_output)
    assert [row["generation"] for row in rows] == [None] * 10 + ["row 10", "row 11"]
    assert [row["error"] for row in rows if "RAISE" in row["text"]] == [
        f"ValueError: cannot generate for 'RAISE {row}'" for row in (*range(8), 9)
    ]


@pytest.mark.parametrize("samples", [1, 3])
def test_a_row_that_kills_is_an_error_where_no_column_is_kept(
    task: Make, read_output: ReadOutput, samples: int
) -> None:
    made, unit = task(["row 0", "HUNGRY"], samples, keep_columns=[])
    rows = done(made, unit, Here(made), read_output)
    assert [row["generation"] for row in rows] == ["row 0"] * samples + [None] * samples


def test_a_unit_in_which_no_end_of_rows_raises_is_given_up(task: Make) -> None:
    made, unit = task(["RAISE"] * 200)
    here = Here(made)
    with pytest.raises(TooManyRowsFailed):
        here._bisect(unit)
    assert len(here.begun) <= 2 * MOST_SPLITS + 2


@pytest.mark.parametrize("samples", [1, 3])
def test_a_row_that_takes_all_memory_of_its_node_is_found(task: Make, read_output: ReadOutput, samples: int) -> None:
    made, unit = task(["row 0", "row 1", "HUNGRY", "row 3"], samples)
    rows = done(made, unit, Here(made), read_output)
    wanted = ["row 0", "row 1", None, "row 3"]
    assert [row["generation"] for row in rows] == [text for text in wanted for _ in range(samples)]
    assert {row["error"] for row in rows if row["generation"] is None} == {
        "its process died 2 times with this row alone (Task was killed due to the node running low on memory.)"
    }


def test_a_unit_that_kills_more_processes_than_its_rows_explain_is_given_up(task: Make) -> None:
    made, unit = task(["HUNGRY"] * 64)
    here = Here(made)
    failure = here.run(unit).failure
    assert failure is not None
    assert (failure.stage, failure.kind) == ("generate", "unit")
    assert failure.error.startswith(f"unit {unit.id} has killed {MOST_DEATHS + 1} processes, the last with Task was ")
    assert len(here.begun) == MOST_DEATHS + 1


def test_an_engine_that_does_not_start_is_no_rows_doing(task: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made, unit = task(["row 0", "row 1"])
    here = Here(made)
    fate = ActorDiedError(
        RayTaskError("_Cell", f"Traceback:\n{ModelError.__module__}.ModelError: vLLM does not start", OSError())
    )
    monkeypatch.setattr(here, "_begin", lambda part: (fate, None))
    with pytest.raises(ModelError, match=r"^vLLM does not start$"):
        here.run(unit)


def test_processes_of_isolation_say_nothing_secret(
    task: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, unit = task(["row 0"])
    assert logging.lastResort is not None

    def say(*of: Any) -> Any:
        logging.getLogger("pipeline.test").warning("reading s3://key:5ecret@bucket/in")
        raise ZeroDivisionError

    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(isolation, "UnitGenerator", say)
    monkeypatch.setattr(isolation, "from_bytes", say)
    part = Parcel(unit, b"", cost={})
    begins: list[Callable[[], object]] = [
        lambda: _Cell(made, 1, None),  # type: ignore[arg-type]
        lambda: _assemble(made, unit, [], part),
    ]
    for begin in begins:
        monkeypatch.setattr(logging.lastResort, "formatter", None)
        isolation.set_up_worker.cache_clear()
        with pytest.raises(ZeroDivisionError):
            begin()
        assert capsys.readouterr().err == "reading s3://bucket/in\n"
    isolation.set_up_worker.cache_clear()
