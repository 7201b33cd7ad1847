"""A session without Ray: units are done one after the other in this process, through the same stages' functions."""

from collections.abc import Iterator

import pytest
from engine_double import Echo, EchoBackend

from pipeline import run
from pipeline.commits.commit import Commit, commit_unit
from pipeline.commits.failed import FailedUnit, record_failure
from pipeline.config import JobConfig
from pipeline.errors import JobError, JobStopped
from pipeline.execution.interruption import Interruption
from pipeline.execution.session import Done
from pipeline.execution.stages import Task
from pipeline.inputs.work import Plan
from pipeline.reporting import report
from pipeline.rows.row_generator import RowGenerator
from pipeline.rows.rows import generate
from pipeline.rows.unit import WorkUnit
from pipeline.storage.lease import Lease


class InlineSession:
    """Stands in for `Session`; stops after so many units, if told to."""

    stop_after: int | None = None
    units_done = 0

    def __init__(
        self, task: Task, plan: Plan, before: list[Commit], interruption: Interruption, lease: Lease | None
    ) -> None:
        self._task, self._plan = task, plan

    def run(self, pending: list[WorkUnit]) -> Done:
        done = Done()
        for found in self._units(pending):
            if isinstance(found, FailedUnit):
                done.failed.append(found)
                continue
            done.commits.append(found)
            InlineSession.units_done += 1
            if len(done.commits) == InlineSession.stop_after:
                raise JobStopped("told to")
        return done

    def begin_unit(self, unit: WorkUnit) -> None:
        """Called when a unit has been read."""

    def _units(self, pending: list[WorkUnit]) -> Iterator[Commit | FailedUnit]:
        task = self._task
        engine = task.backend.engine(task.config, None)
        assert isinstance(engine, Echo)
        generator = RowGenerator(engine, task.config.sampling(), task.schedule, 32)
        for span in self._plan.spans(pending):
            left = list(span)
            try:
                for unit, prepared in task.prepared(span):
                    self.begin_unit(unit)
                    output = generate(prepared, [str(row) for row in range(unit.rows)], generator)
                    yield commit_unit(task.config.output_storage(), unit, output, task.run, {"seconds": 3600.0})
                    left.remove(unit)
            except JobError as error:
                storage = task.config.output_storage()
                yield from (record_failure(storage, unit, 1, f"read: {error}") for unit in left)


def without_ray(patch: pytest.MonkeyPatch) -> type[InlineSession]:
    """Let `run_job` generate so; each unit takes an hour of a replica's time, as far as the books go.

    Reports have no charts, which take longer to draw than the rest of a job here.
    """
    patch.setattr(report, "to_svg", lambda figure: "")
    patch.setattr(run, "Session", InlineSession)
    patch.setattr(run, "connect", lambda *_: None)
    patch.setattr(InlineSession, "stop_after", None)
    patch.setattr(InlineSession, "units_done", 0)
    patch.setattr(InlineSession, "begin_unit", InlineSession.begin_unit)  # which tests replace
    return InlineSession


def run_until(config: JobConfig, backend: EchoBackend, units: int) -> None:
    """A job without Ray that is stopped once it has done so many units."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InlineSession, "stop_after", units)
        with pytest.raises(JobStopped, match="told to"):
            run.run_job(config, backend)


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> type[InlineSession]:
    """Without Ray, for one test."""
    return without_ray(monkeypatch)
