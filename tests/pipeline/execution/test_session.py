"""What a session does with units that come back undone, beside a cluster that is stood in for; a job in which nothing
moves is noticed, one that is merely slow is not."""

import gzip
import json
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import ray
from fixture_types import Job
from ray.exceptions import ActorDiedError, RayTaskError

from engine import ModelError, ScheduleError
from pipeline.commits.commit import COMMITS, SNAPSHOT_FILE, Commit, Totals
from pipeline.config import JobConfig
from pipeline.errors import JobError, JobStopped
from pipeline.execution import session
from pipeline.execution.cluster import ReplicaResources
from pipeline.execution.interruption import Interruption
from pipeline.execution.session import Session, Watchdog, _ended, who_waits
from pipeline.execution.wire import Failure, Parcel, Stage
from pipeline.monitoring.board import Counts, Running, _BoardActor
from pipeline.rows.unit import WorkUnit

UNITS = [WorkUnit("00000-000000000", "a.parquet", 0, 256), WorkUnit("00000-000000256", "a.parquet", 256, 256)]


def test_rows_of_units_that_are_lost_or_given_up_are_not_counted_as_done(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way = begun_after([], job(), monkeypatch)
    board: Any = under_way._board
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "node", "Alive": True}])
    for unit in UNITS:
        board.take(unit.id, "process 1", "node")
        board.batch_done(unit.id, 200, 800)

    under_way._account_for([UNITS[0].id])
    assert (board.read([]).rows, under_way._attempts[UNITS[0].id].deaths) == (200, 1)
    under_way._give_up(UNITS[1])
    assert board.read([]).rows == 0


@pytest.mark.parametrize("incremental", [False, True])
def test_what_earlier_sessions_spent_counts_towards_a_ceiling_and_what_earlier_nights_did_does_not(
    job: Job, monkeypatch: pytest.MonkeyPatch, incremental: bool
) -> None:
    begun = begun_after([commit(UNITS[0], flops_decode=6)], job(incremental=incremental, max_flops=10.0), monkeypatch)
    begun._receive(Parcel(UNITS[1], commit=commit(UNITS[1], flops_decode=5)))
    assert begun._spent == (not incremental)


@pytest.mark.parametrize("incremental", [False, True])
def test_audited_rows_stop_a_session_at_work_by_the_runs_figures_and_of_a_nights_by_its_own(
    job: Job, monkeypatch: pytest.MonkeyPatch, incremental: bool
) -> None:
    """Eight rows say enough: here five of each commit, none of whose words are those of full depth."""
    config = job(incremental=incremental, audit_fraction=0.1, min_audit_rouge=0.6)
    begun = begun_after([commit(UNITS[0], audited=5)], config, monkeypatch)
    begun._check_audit()
    begun._end_if_stopping()
    begun._receive(Parcel(UNITS[1], commit=commit(UNITS[1], audited=5)))
    if incremental:
        begun._end_if_stopping()
        begun._receive(Parcel(UNITS[0], commit=commit(UNITS[0], audited=5)))
    with pytest.raises(JobStopped, match=r"too far from full depth: ROUGE-L .* 0\.00.*, less than .* 0\.6"):
        begun._end_if_stopping()


def commit(unit: WorkUnit, **totals: int) -> Commit:
    file = f"data/{unit.id}-a.parquet"
    return Commit(unit.id, "a", file, "", 1, "a", unit.start, totals=Totals(rows=256, **totals))


def begun_after(before: list[Commit], config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A session with both units to do, after one or a night that has left commits."""
    monkeypatch.setattr(session, "Board", _BoardActor)
    monkeypatch.setattr(session, "replica_resources", lambda config: None)
    task: Any = SimpleNamespace(config=config, run="run")
    plan: Any = SimpleNamespace(rows=512)
    begun = Session(task, plan, before, Interruption(), None)
    begun._pending = {unit.id: unit for unit in UNITS}
    return begun


@pytest.mark.parametrize(("earlier", "sizes"), [(0, [2, 4, 6, 9, 13, 19]), (4, [6, 9, 13, 19])])
def test_a_session_puts_all_commits_into_snapshots_earlier_ones_too_and_the_rarer_the_more_there_are(
    job: Job, monkeypatch: pytest.MonkeyPatch, earlier: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(session, "SNAPSHOT_EVERY", 2)
    config = job()
    storage = config.output_storage()
    units = [WorkUnit(f"00000-{start:09d}", "a.parquet", start, 256) for start in range(0, 20 * 256, 256)]
    commits = [commit(unit) for unit in units]
    for done in commits:
        storage.write(f"{COMMITS}/{done.unit}.json", done.to_json())
    begun = begun_after(commits[:earlier], config, monkeypatch)
    written = {}
    for unit, done in list(zip(units, commits, strict=True))[earlier:]:
        begun._receive(Parcel(unit, commit=done))
        if (content := storage.read(SNAPSHOT_FILE)) is not None:
            held = [json.loads(line)["commit"]["unit"] for line in gzip.decompress(content).splitlines()]
            written[len(held)] = held
    assert written == {size: [unit.id for unit in units[:size]] for size in sizes}


@pytest.mark.parametrize(
    ("stage", "kind", "ends"),
    [
        ("read", "storage", JobStopped),
        ("generate", "storage", JobStopped),
        ("commit", "storage", JobStopped),
        ("commit", "refused", JobError),
        ("commit", "unit", None),
        ("read", "model", ModelError),
        ("read", "refused", None),
        ("generate", "unit", None),
    ],
)
def test_storage_that_is_gone_ends_a_session_resumably_a_refused_commit_ends_it_and_all_else_is_its_units_own(
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
    stage: Stage,
    kind: Literal["unit", "storage", "refused", "model"],
    ends: type[Exception] | None,
) -> None:
    begun = begun_after([], job(), monkeypatch)
    begun._receive(Parcel(UNITS[0], failure=Failure(stage, kind, "it says why")))
    assert begun._attempts[UNITS[0].id].failures == (ends is None)
    assert begun._pending.keys() == {unit.id for unit in UNITS}
    with nullcontext() if ends is None else pytest.raises(ends, match=r"^it says why$"):
        begun._end_if_stopping()


@pytest.mark.parametrize("committed", [0, 1, 2])
def test_a_user_who_stops_a_session_is_told_how_far_it_is_unless_it_is_done(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, committed: int
) -> None:
    begun = begun_after([], job(stop_grace_s=7), monkeypatch)
    begun._counted_at = float("inf")  # the cluster, which is not there, is not looked at
    begun._board.ready()
    begun._interruption.signal = "SIGINT"
    begun._check()
    assert caplog.messages == ["stopping: SIGINT (units in flight have 7 s to end)"]
    for unit in UNITS[:committed]:
        begun._receive(Parcel(unit, commit=commit(unit)))
    said = rf"^SIGINT: {256 * committed} of 512 rows are committed, start the job again to resume$"
    with nullcontext() if committed == 2 else pytest.raises(JobStopped, match=said):
        begun._end_if_stopping()
    begun._stop(JobStopped("the audit fails"))
    begun._check()
    with pytest.raises(JobStopped, match=r"^the audit fails$"):
        begun._end_if_stopping()


def test_nothing_is_waited_for_while_replicas_load_their_model(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = begun_after([], job(stop_grace_s=600), monkeypatch)
    begun._board.starting()
    begun._interruption.signal = "SIGTERM"
    with pytest.raises(JobStopped, match=r"^SIGTERM: 0 of 512 rows are committed, start the job again to resume$"):
        begun._check()


@pytest.mark.parametrize("refusal", [ModelError("too little memory"), JobStopped("storage is gone")])
def test_a_replica_that_cannot_start_ends_a_session_as_it_starts_and_lets_the_units_of_others_end(
    job: Job, monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    said = rf"^{refusal}$"
    begun = begun_after([], job(stop_grace_s=600), monkeypatch)
    begun._board.starting()
    begun._board.refuse(refusal)
    with pytest.raises(type(refusal), match=said):
        begun._check()

    begun = begun_after([], job(stop_grace_s=600), monkeypatch)
    begun._resources = ReplicaResources(2, 1, 1.0, 0.0, 1)
    begun._board.ready()
    begun._board.refuse(refusal)
    begun._check()  # the grace is not over
    assert begun._board.stopping()
    with pytest.raises(type(refusal), match=said):
        begun._end_if_stopping()
    for unit in UNITS:
        begun._receive(Parcel(unit, commit=commit(unit)))
    begun._end_if_stopping()  # done all the same


def test_a_session_in_which_nothing_moves_ends_resumably(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(session, "Board", _BoardActor)
    monkeypatch.setattr(session, "replica_resources", lambda config: ReplicaResources(1, 1, 0.0, 0.5, 1))
    monkeypatch.setattr(session, "who_waits", lambda *of: "1 unit waits")
    monkeypatch.setattr(session, "Watchdog", partial(Watchdog, clock=lambda: now[0]))
    task: Any = SimpleNamespace(config=job(stall_minutes=1.0), run="run")
    plan: Any = SimpleNamespace(rows=1)
    repeated: list[float] = []
    monkeypatch.setattr(session.RunMeter, "repeat", lambda _: repeated.append(now[0]))
    stuck = Session(task, plan, [], Interruption(), None)
    for seconds in (0, 1, 58):
        now[0] += seconds
        stuck._check()
    now[0] += 10
    with pytest.raises(JobStopped, match=r"nothing has moved for 1 minutes .* start the job again to resume"):
        stuck._check()
    assert repeated == [1000, 1000, 1059, 1069]  # as it begins, and with each look at the board


def test_what_ends_a_replica_as_it_starts_is_told_as_what_it_is() -> None:
    def raised_in_a_replica(error: Exception) -> ActorDiedError:
        kind = type(error)
        return ActorDiedError(RayTaskError("Replica", f"Traceback:\n{kind.__module__}.{kind.__name__}: {error}", error))

    for kind in (ModelError, ScheduleError):
        refused = _ended(raised_in_a_replica(kind("device 'cuda' is not there")))
        assert isinstance(refused, kind)
        assert str(refused) == "device 'cuda' is not there"
    gone = _ended(raised_in_a_replica(OSError("no route")))
    assert isinstance(gone, JobStopped)
    assert "no route" in str(gone)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_it_barks_after_the_limit_and_every_movement_sets_it_back() -> None:
    clock = Clock()
    watchdog = Watchdog(10.0, clock)
    shown = []
    for now, progress in [(0, 1), (9, 1), (9.5, 2), (19, 2), (19.5, 2)]:
        clock.now = now
        shown.append(watchdog.stalled(progress))
    assert shown == [False, False, False, False, True]


@pytest.mark.usefixtures("cluster")
def test_its_message_names_who_waits_for_what() -> None:
    counts = Counts(replicas=1, running={"00000-000000007": Running("process 12 on 10.0.0.1", "n", 61.0)})
    said = who_waits(counts, 4, ReplicaResources(1, 1, 0.0, 0.5, 1))
    assert "unit 00000-000000007 has been in process 12 on 10.0.0.1 for 61 s; 4 units wait" in said
    assert f"of {ray.cluster_resources()['CPU']:g} CPUs" in said
    assert "no replica has started: 2 want 1 CPUs and 1 GPUs each" in who_waits(
        Counts(), 4, ReplicaResources(2, 2, 1.0, 1.0, 1)
    )
