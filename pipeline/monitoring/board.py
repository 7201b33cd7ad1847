"""Where a job's processes say what they are doing, and hear that they should stop: an actor beside the driver."""

import os
import time
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


@dataclass(frozen=True, slots=True)
class Running:
    """A unit that a replica has begun and not finished."""

    replica: str
    node: str  # Ray's id of it
    seconds: float  # so far


@dataclass(frozen=True, slots=True)
class Counts:
    """What replicas have done in units that are not committed yet."""

    replicas: int = 0  # ready so far
    unready: int = 0  # starts since the last one that ended ready
    seconds: float = 0.0  # since the first was ready
    rows: int = 0
    tokens: int = 0
    events: int = 0  # anything reported ever: a job whose count stands still is stuck
    running: dict[str, Running] = field(default_factory=dict)  # by unit
    refusal: Exception | None = None  # of the first replica that cannot start


class _BoardActor:
    def __init__(self) -> None:
        self._replicas = self._unready = self._events = 0
        self._first_ready = 0.0
        self._stopping = False
        self._batches: dict[str, tuple[int, int]] = {}
        self._running: dict[str, tuple[str, str, float]] = {}
        self._refusal: Exception | None = None

    def starting(self) -> None:
        self._unready += 1
        self._events += 1

    def ready(self) -> None:
        self._first_ready = self._first_ready or time.monotonic()
        self._replicas += 1
        self._unready = 0
        self._events += 1

    def refuse(self, error: Exception) -> bool:
        self._refusal = self._refusal or error
        self._events += 1
        return True

    def take(self, unit: str, replica: str, node: str) -> bool:
        if not self._stopping:
            self._running[unit] = (replica, node, time.monotonic())
            self._batches.pop(unit, None)  # of an attempt that was lost: all of its rows are done again
            self._events += 1
        return not self._stopping

    def batch_done(self, unit: str, rows: int, tokens: int) -> None:
        done = self._batches.get(unit, (0, 0))
        self._batches[unit] = (done[0] + rows, done[1] + tokens)
        self._events += 1

    def unit_done(self, unit: str) -> None:
        self._running.pop(unit, None)
        self._events += 1

    def stop(self) -> None:
        self._stopping = True

    def stopping(self) -> bool:
        return self._stopping

    def read(self, forget: list[str]) -> Counts:
        for unit in forget:
            self._batches.pop(unit, None)
        now = time.monotonic()
        return Counts(
            replicas=self._replicas,
            unready=self._unready,
            seconds=now - self._first_ready if self._replicas else 0.0,
            rows=sum(rows for rows, _ in self._batches.values()),
            tokens=sum(tokens for _, tokens in self._batches.values()),
            events=self._events,
            running={
                unit: Running(replica, node, now - since) for unit, (replica, node, since) in self._running.items()
            },
            refusal=self._refusal,
        )


@cache
def _place() -> tuple[str, str]:
    """This process and Ray's id of its node."""
    return f"process {os.getpid()} on {ray.util.get_node_ip_address()}", ray.get_runtime_context().get_node_id()


class Board:
    """Handle to it. A job goes on without its board, should that die."""

    def __init__(self) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        options = {"num_cpus": 0, "scheduling_strategy": here, "max_restarts": -1}
        self._actor: Any = ray.remote(**options)(_BoardActor).remote()
        self._last, self._to_forget = Counts(), set[str]()

    def starting(self) -> None:
        """A replica begins to load its model."""
        self._ask(self._actor.starting.remote(), None)

    def ready(self) -> None:
        """A replica has loaded its model."""
        self._actor.ready.remote()

    def refuse(self, error: Exception) -> bool:
        """A replica cannot start; whether that is known now."""
        return bool(self._ask(self._actor.refuse.remote(error), False))

    def take(self, unit: str) -> bool:
        """This process begins a unit; False if it should not, because the job is stopping."""
        return bool(self._ask(self._actor.take.remote(unit, *_place()), True))

    def batch_done(self, unit: str, rows: int, tokens: int) -> None:
        """Never waits, so it costs generation nothing."""
        self._actor.batch_done.remote(unit, rows, tokens)

    def unit_done(self, unit: str) -> None:
        """Its output, or its failure, is on its way."""
        self._actor.unit_done.remote(unit)

    def stop(self) -> None:
        """Let no unit begin any more."""
        self._actor.stop.remote()

    def stopping(self) -> bool:
        """Whether no unit should begin any more."""
        return bool(self._ask(self._actor.stopping.remote(), False))

    def read(self, forget: list[str]) -> Counts:
        """Counts of what is in flight; of the units in `forget`, what they have done so far counts no more.

        Where they cannot be had now, the last ones, with nothing in flight.
        """
        self._to_forget.update(forget)
        asked = [*self._to_forget]
        counts: Counts | None = self._ask(self._actor.read.remote(asked), None)
        if counts is None:
            return replace(self._last, rows=0, tokens=0, running={})
        self._to_forget.difference_update(asked)
        self._last = counts
        return counts

    def close(self) -> None:
        """Ends the actor, which would outlast its job for as long as anyone holds a handle to it."""
        ray.kill(self._actor)

    def _ask(self, answer: Any, otherwise: Any) -> Any:
        try:
            return ray.get(answer, timeout=30)
        except (ray.exceptions.RayError, TimeoutError):
            return otherwise
