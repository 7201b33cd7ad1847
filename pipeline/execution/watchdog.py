"""Notices a job in which nothing moves, and says who waits for what."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

import ray

from pipeline.execution.cluster import ReplicaResources
from pipeline.monitoring.board import Counts


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
    free, total = ray.available_resources(), ray.cluster_resources()
    under_way = sorted(counts.running.items())[:8]
    parts = [f"unit {unit} has been in {begun.replica} for {begun.seconds:.0f} s" for unit, begun in under_way]
    if not counts.replicas:
        parts.append(
            f"no replica has started: {resources.count} want {resources.cpus:g} CPUs and {resources.gpus:g} GPUs each"
        )
    elif not counts.running:
        parts.append(f"none of {counts.replicas} started replicas has a unit")
    kinds = ("CPU", "GPU") if total.get("GPU") else ("CPU",)
    room = ", ".join(f"{free.get(kind, 0.0):g} of {total.get(kind, 0.0):g} {kind}s" for kind in kinds)
    nodes = sum(1 for node in ray.nodes() if node["Alive"])
    return f"{'; '.join(parts)}; {waiting_units} units wait; {room} of {nodes} nodes are free"
