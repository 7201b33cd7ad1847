"""Connect to Ray and decide how many replicas it carries and what each may use."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass

import ray

from pipeline.config import JobConfig
from pipeline.errors import JobError

log = logging.getLogger(__name__)

PATIENCE_S = 10  # with a cluster's address, until nobody is taken to listen there
EMBEDDED_STORE_BYTES = 1 << 30  # work units in flight are small; Ray's default would claim a third of the memory
# A Ray of one machine shares its cores with the replicas, whose threads wait for each other: what it reports to itself
# many times a second would cost them twice.
ONE_MACHINE = {
    # On a small machine Ray ends workers that idle for a second; the next read would import torch again.
    "idle_worker_killing_time_threshold_ms": 600_000,
    "enable_metrics_collection": False,
    "event_stats": False,
    "memory_monitor_refresh_ms": 1000,
    "metrics_report_interval_ms": 60_000,
    "raylet_report_resources_period_milliseconds": 1000,
    "task_events_report_interval_ms": 10_000,
}
# Of a read or commit task. Three decimals, unlike a replica's: with equal claims Ray would fuse reading into the
# replica, and nothing would overlap.
TASK_CPUS = 0.475


@dataclass(frozen=True, slots=True)
class ReplicaResources:
    """What the job's actors claim."""

    count: int  # most of them
    minimum: int  # to begin with; more are added while units queue and the cluster has room
    gpus: float  # each
    cpus: float  # each, as Ray's scheduler counts
    threads: int  # each, as torch runs


def connect(address: str | None, log_to_driver: bool = True) -> None:
    """Join a cluster, or start an embedded one that ends with this process; show what its processes log, or don't.

    Raises JobError if that fails.
    """
    if ray.is_initialized():
        return
    log.info("starting a Ray of its own" if address == "local" else "joining the Ray cluster")
    quiet = {"logging_level": logging.WARNING, "log_to_driver": log_to_driver}
    try:
        if address == "local":
            # It says how to turn tokens off, which nobody needs who has not heard of them.
            logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=EMBEDDED_STORE_BYTES,
                _system_config=ONE_MACHINE,
                **quiet,
            )
        else:
            _knock(address)
            ray.init(address=address, **quiet)
    except Exception as error:  # on a machine with too much to do Ray raises no narrower one
        if address == "local":
            raise JobError(f"Ray does not start on this machine ({error}): is it overloaded, or full?") from error
        raise JobError(f"Ray cluster {address!r} cannot be reached ({error}): is it up?") from error


def _knock(address: str | None) -> None:
    """Raises OSError if nobody listens at a host and port: Ray itself would try for minutes."""
    host, _, port = (address or "").rpartition(":")
    if port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), PATIENCE_S).close()


def replica_resources(config: JobConfig, before: ReplicaResources | None = None) -> ReplicaResources:
    """Resources of each replica on the connected cluster. Raises JobError if the cluster cannot carry them.

    With `before`, what replicas had earlier in the session, nothing is raised: nodes may have come or gone. They go on
    claiming as many GPUs, for without one they would have another engine; of fewer that are left, fewer begin.
    """
    cluster = ray.cluster_resources()
    all_gpus, all_cpus = cluster.get("GPU", 0.0), max(1.0, cluster.get("CPU", 1.0))
    gpus = before.gpus if before is not None else config.gpus_per_replica
    if gpus is None:
        gpus = 1.0 if all_gpus else 0.0
    count = config.replicas or (max(1, int(all_gpus / gpus)) if gpus else 1)
    count = max(count, config.min_replicas or 1)
    minimum = config.min_replicas or count
    if gpus * minimum > all_gpus:
        if before is None:
            raise JobError(
                f"{minimum} replicas of {gpus:g} GPUs need {gpus * minimum:g}, the cluster has {all_gpus:g}: "
                "lower replicas or gpus_per_replica, or set min_replicas to start with fewer"
            )
        minimum = max(1, int(all_gpus / gpus))
    threads = config.threads_per_replica or max(1, int(all_cpus / count))
    # Half its threads: replicas that hold every core would keep the reads that feed them from ever starting.
    cpus = round(min(threads, all_cpus / count) / 2, 2)
    return ReplicaResources(count, minimum, gpus, cpus, threads)
