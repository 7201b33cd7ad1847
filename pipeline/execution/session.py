"""One session of a run: passes over the units that are not committed, until each is committed or given up.

It ends early where nothing moves, and says who waits for what.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from contextlib import closing
from dataclasses import dataclass, field

import ray
from ray.exceptions import RayError, UserCodeException

from engine import ModelError
from pipeline.commits.commit import SNAPSHOT_EVERY, Commit, total, write_snapshot
from pipeline.commits.failed import FailedUnit, record_failure
from pipeline.errors import JobError, JobStopped, counted, last_line
from pipeline.execution.attempts import Attempts, Next
from pipeline.execution.cluster import ReplicaResources, replica_resources
from pipeline.execution.interruption import Interruption
from pipeline.execution.isolation import Isolation
from pipeline.execution.stages import Task, refusal
from pipeline.execution.stream import stream
from pipeline.execution.wire import Failure, Parcel
from pipeline.inputs.work import Plan
from pipeline.monitoring.board import Board, Counts
from pipeline.monitoring.metrics import RunMeter
from pipeline.monitoring.progress import ProgressReporter
from pipeline.reporting.audit import failed_audit
from pipeline.reporting.bill import check_ceiling, reached_ceiling
from pipeline.rows.unit import WorkUnit
from pipeline.storage.lease import Lease

log = logging.getLogger(__name__)

POLL_S = 1.0
BOARD_INTERVAL_S = 5.0
HOPELESS_STARTS = 3  # times the number of replicas may die in a row while they load the model


@dataclass(slots=True)
class Done:
    """What a session has come to."""

    commits: list[Commit] = field(default_factory=list)
    failed: list[FailedUnit] = field(default_factory=list)
    seconds: float = 0.0  # since the first replica was ready
    stats: list[str] = field(default_factory=list)  # Ray Data's, of each pass


class Session:
    """Runs the pending units of a plan on the connected cluster."""

    def __init__(
        self, task: Task, plan: Plan, before: list[Commit], interruption: Interruption, lease: Lease | None
    ) -> None:
        """`plan` is what progress, audits and ceilings are about; `before` are the commits of earlier sessions."""
        self._task, self._plan, self._before = task, plan, before
        self._interruption, self._lease = interruption, lease
        # What an incremental run has committed earlier is no part of its plan, which holds but what is new.
        self._totals = total([] if task.config.incremental else before)
        self._storage = task.config.output_storage()
        self._resources = replica_resources(task.config)
        self._board = Board()
        self._progress = ProgressReporter(self._board, plan.rows, self._totals)
        self._meter = RunMeter(task.run, plan.rows, self._totals.rows)
        self._attempts: defaultdict[str, Attempts] = defaultdict(Attempts)  # by unit
        self._watchdog = Watchdog(task.config.stall_minutes * 60)
        self._done = Done()
        self._pending: dict[str, WorkUnit] = {}
        self._stop_reason: Exception | None = None
        self._refusal: Exception | None = None  # of a replica that could not start
        self._stop_deadline: float | None = None  # of what is in flight, once it stops
        self._spent = False  # a cost ceiling is reached
        self._counted_at = 0.0
        self._copied = len(before)  # commits that a snapshot holds, or that who read them has made one of
        self._received = 0  # parcels: a failure is a sign of life too

    def run(self, pending: list[WorkUnit]) -> Done:
        """Pass after pass. Raises JobStopped, JobError; what was committed until then stays."""
        resources = self._resources
        each = f"{counted(resources.threads, 'thread')} and {resources.gpus:g} GPUs each"
        log.info("%s of %s", counted(resources.count, "replica"), each)
        self._pending = {unit.id: unit for unit in pending}
        with closing(self._board), self._progress:
            self._check_audit()
            self._end_if_stopping()
            while self._pending:
                self._pass()
                self._triage()
            self._done.seconds = self._board.read([]).seconds
        return self._done

    def _pass(self) -> None:
        """All pending units once."""
        begun = list(self._pending.values())
        self._resources = replica_resources(self._task.config, self._resources)  # nodes may have come or gone
        spans = list(self._plan.spans(begun, lambda unit: self._attempts[unit].longest_span))
        units = stream(spans, self._task, self._resources, self._board)
        seen = set()
        try:
            while not units.ended:
                parcel = units.next(POLL_S)
                if parcel is not None:
                    seen.add(parcel.unit.id)
                    self._receive(parcel)
                self._check()
        except (RayError, UserCodeException) as error:
            raise self._why_stopping or _ended(error) from error
        finally:
            units.close()
        self._done.stats.append(units.stats())
        self._end_if_stopping()
        self._account_for([unit.id for unit in begun if unit.id not in seen])

    def _receive(self, parcel: Parcel) -> None:
        self._received += 1
        unit, commit = parcel.unit, parcel.commit
        if commit is not None:
            self._done.commits.append(commit)
            done, copied = len(self._before) + len(self._done.commits), self._copied
            if done - copied >= max(SNAPSHOT_EVERY, copied // 2):  # each copies all: the more there are, the rarer
                write_snapshot(self._storage, [*self._before, *self._done.commits])
                self._copied = done
            self._totals += commit.totals
            self._progress.committed(commit, self._totals)
            self._meter.committed(commit, self._totals)
            self._check_audit()
            self._pending.pop(unit.id, None)
            # Units in flight finish, however long they take: they are paid for.
            if self._pending and not self._spent and (spent := reached_ceiling(self._task.config, self._totals)):
                log.warning("%s are spent: units in flight finish, no other begins", spent)
                self._spent = True
                self._board.stop()
        elif parcel.failure is not None:
            self._failed(unit, parcel.failure)

    def _failed(self, unit: WorkUnit, failure: Failure) -> None:
        if failure.kind == "storage":
            self._stop(JobStopped(failure.error))
        elif failure.kind == "model":  # on the machine that reads, which others may be like
            self._stop(ModelError(failure.error))
        elif failure.stage == "commit" and failure.kind == "refused":
            self._stop(JobError(failure.error))  # no unit can be committed any more
        else:
            self._attempts[unit.id].failed(failure)
            self._meter.failed()
            log.warning("unit %s failed (%s: %s)", unit.id, failure.stage, failure.error, extra={"unit": unit.id})

    def _account_for(self, missing: list[str]) -> None:
        """Units that a pass began with and that came back neither committed nor failed."""
        if not missing:
            return
        running = self._board.read(missing).running
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        for unit in missing:
            # A node that went down says nothing about the unit that was on it.
            if unit in running and running[unit].node in alive:
                self._attempts[unit].died(running[unit].replica)
            else:
                self._attempts[unit].lost()
            self._board.unit_done(unit)
        some = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        log.warning("%d units were lost with their processes and are tried again: %s", len(missing), some)

    def _triage(self) -> None:
        """Isolate the units that a pass has made suspects, and record those that are given up."""
        with closing(Isolation(self._task, self._resources, self._board, self._check_isolation)) as isolation:
            for unit in list(self._pending.values()):
                fate = self._attempts[unit.id].next(self._task.config.unit_attempts)
                if fate is Next.ISOLATE:
                    which = {"unit": unit.id}
                    log.warning(
                        "unit %s keeps losing its process: looking for the row that kills it", unit.id, extra=which
                    )
                    self._receive(isolation.run(unit))
                    self._check_isolation()
                if fate is not Next.AGAIN and unit.id in self._pending:
                    self._give_up(unit)

    def _give_up(self, unit: WorkUnit) -> None:
        attempts = self._attempts[unit.id]
        self._done.failed.append(record_failure(self._storage, unit, attempts.count, attempts.error))
        del self._pending[unit.id]
        self._board.read([unit.id])  # its rows count no more

    def _check_audit(self) -> None:
        if said := failed_audit(self._task.config, self._totals, self._plan.rows):
            self._stop(JobStopped(said))

    @property
    def _why_stopping(self) -> Exception | None:
        """None where all was done before a user's stop, or a replica that could not start, took effect."""
        if not self._pending:
            return None if self._stop_reason is self._refusal else self._stop_reason
        if self._stop_reason is not None or self._interruption.signal is None:
            return self._stop_reason
        rows = f"{self._totals.rows:,} of {self._plan.rows:,} rows are committed"
        return JobStopped(f"{self._interruption.signal}: {rows}, start the job again to resume")

    def _end_if_stopping(self) -> None:
        """Once nothing is in flight."""
        if (reason := self._why_stopping) is not None:
            raise reason
        if self._spent and self._pending:
            check_ceiling(self._task.config, self._totals, self._plan.rows)

    def _check_isolation(self) -> None:
        self._check()
        self._end_if_stopping()

    def _check(self) -> None:
        """Look for reasons to stop; raises the reason once its time is over."""
        if self._interruption.signal:
            self._stop()
        if self._lease is not None and self._lease.lost:
            self._stop(JobStopped(self._lease.lost))
        now = time.monotonic()
        if self._stop_deadline is not None or self._spent:
            self._board.stop()
        if self._stop_deadline is not None and now >= self._stop_deadline:
            self._end_if_stopping()
        if now - self._counted_at < BOARD_INTERVAL_S:
            return
        self._counted_at, counts = now, self._board.read([])
        self._meter.repeat()
        if counts.refusal is not None:
            if not counts.replicas:  # there is nothing in flight
                raise counts.refusal
            self._refusal = self._refusal or counts.refusal
            self._stop(self._refusal)
        if counts.unready > HOPELESS_STARTS * self._resources.count + 1:
            raise JobError(
                f"replicas died {counts.unready} times in a row while they loaded model "
                f"{self._task.config.model!r}: it may need more memory than a replica has; Ray's worker logs say more"
            )
        if self._watchdog.stalled((counts.events, self._received, len(self._pending))):
            waiting = who_waits(counts, len(self._pending), self._resources)
            raise JobStopped(
                f"nothing has moved for {self._task.config.stall_minutes:g} minutes ({waiting}): "
                "mend that, or raise stall_minutes, and start the job again to resume"
            )

    def _stop(self, reason: Exception | None = None) -> None:
        """Let units in flight finish within the grace, and no other begin; without a reason, for a user wants it."""
        self._stop_reason = self._stop_reason or reason
        if self._stop_deadline is None:
            self._board.stop()
            # While replicas load their model nothing is in flight, and nothing will be.
            grace_s = self._task.config.stop_grace_s if self._board.read([]).replicas else 0.0
            why = reason or self._interruption.signal
            log.warning("stopping: %s (units in flight have %g s to end)", why, grace_s)
            self._stop_deadline = time.monotonic() + grace_s


class Watchdog:
    """Barks when what it is shown has not changed for too long."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._seen: Hashable = None
        self._since = clock()

    def stalled(self, progress: Hashable) -> bool:
        """Whether the progress shown has been the same for the whole limit."""
        if progress != self._seen:
            self._seen, self._since = progress, self._clock()
        return self._clock() - self._since >= self._limit_s


def who_waits(counts: Counts, waiting_units: int, resources: ReplicaResources) -> str:
    """One sentence part: what replicas do, how many units wait, what the cluster has left."""
    free, whole = ray.available_resources(), ray.cluster_resources()
    under_way = sorted(counts.running.items())[:8]
    parts = [f"unit {unit} has been in {begun.replica} for {begun.seconds:.0f} s" for unit, begun in under_way]
    if not counts.replicas:
        parts.append(
            f"no replica has started: {resources.count} want {resources.cpus:g} CPUs and {resources.gpus:g} GPUs each"
        )
    elif not counts.running:
        parts.append(f"none of {counts.replicas} started replicas has a unit")
    kinds = ("CPU", "GPU") if whole.get("GPU") else ("CPU",)
    room = ", ".join(f"{free.get(kind, 0.0):g} of {whole.get(kind, 0.0):g} {kind}s" for kind in kinds)
    nodes = sum(1 for node in ray.nodes() if node["Alive"])
    return f"{'; '.join(parts)}; {waiting_units} units wait; {room} of {nodes} nodes are free"


def _ended(error: Exception) -> Exception:
    """What the user is told when Ray ends a pass: a replica that can't load its model, or a cluster that is gone."""
    if (told := refusal(error)) is not None:
        return told
    return JobStopped(f"Ray ended the job ({last_line(error)}): start it again to resume; Ray's logs say more")
