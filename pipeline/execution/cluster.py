"""Connect to Ray and decide how many replicas it carries and what each may use."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.config import JobConfig
from pipeline.errors import JobError

log = logging.getLogger(__name__)

MOST_REPLICAS = 100_000
LOOK_S = 60.0  # for all nodes to say whether they have a file
HEAD_BYTES = 4096
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
# Of a read or commit task whose process died; with Ray's default, endless, a bad row would loop.
TASK_RETRIES = 3


@dataclass(frozen=True, slots=True)
class ReplicaResources:
    """What the job's actors claim."""

    count: int  # most of them
    minimum: int  # to begin with; more are added while units queue and the cluster has room
    gpus: float  # each
    cpus: float  # each, as Ray's scheduler counts
    threads: int  # each, as torch runs


def connect(address: str | None, log_to_driver: bool = True, shared: Mapping[str, str] | None = None) -> None:
    """Join a cluster, or start an embedded one that ends with this process; show what its processes log, or don't.
    Without an address join the one that RAY_ADDRESS names or that was started on this machine, else start one.

    `shared` are local files, by what they are of, that all nodes are to have. Raises JobError if any of that fails.
    """
    if not ray.is_initialized():
        _join(address, log_to_driver)
    check_shared(shared or {})


def _join(address: str | None, log_to_driver: bool) -> None:
    joined = "a Ray cluster, or starting one" if address is None else f"the Ray cluster {address!r}"
    log.info("starting a Ray of its own" if address == "local" else f"joining {joined}")
    quiet = {"logging_level": logging.WARNING, "log_to_driver": log_to_driver}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    named = address or os.environ.get("RAY_ADDRESS")
    # Of those that its memory monitor kills, which it counts apart, also without end. Who starts tasks reads it.
    os.environ.setdefault("RAY_task_oom_retries", str(TASK_RETRIES))
    # What Ray starts here lives as long as this process, which may use its time to end: a signal to all of its group is
    # not for them. (Ray itself has them ignore Ctrl-C.)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        _init(address, quiet)
    except Exception as error:  # on a machine with too much to do Ray raises no narrower one
        if named == "local" or named is None:
            cannot = "no Ray cluster could be joined or started" if named is None else "Ray does not start"
            raise JobError(f"{cannot} on this machine ({error}): {_way_out(error)}") from error
        whence = "" if address else ", which RAY_ADDRESS names,"
        raise JobError(f"Ray cluster {named!r}{whence} cannot be reached ({error}): is it up?") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    if callable(on_sigterm) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own would end the process with an exit code of its own


def _way_out(error: Exception) -> str:
    """Where Ray does not start."""
    if isinstance(error, UnicodeError) or "AF_UNIX" in str(error):
        return "its sockets lie below TMPDIR, and it reads the command line: keep to short paths of plain letters"
    return "is it overloaded, or full? Start it again, or name a cluster"


def _init(address: str | None, options: dict[str, Any]) -> None:
    """Raises what Ray does."""
    if address == "local" or not (address or os.environ.get("RAY_ADDRESS")):
        # It says how to turn tokens off, which nobody needs who has not heard of them.
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
        try:
            ray.init(
                address=address,
                include_dashboard=False,
                object_store_memory=EMBEDDED_STORE_BYTES,
                _system_config=ONE_MACHINE,
                **options,
            )
            return
        except ValueError:  # these settings are not for the one that was started on this machine
            if address is not None:
                raise
    _knock(address or os.environ.get("RAY_ADDRESS", ""))
    ray.init(address=address, **options)


def _knock(address: str) -> None:
    """Raises OSError if nobody listens at a host and port: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), PATIENCE_S).close()


def check_shared(files: Mapping[str, str]) -> None:
    """Raises JobError if a node that runs tasks has not these local files, by what they are of, as this process has
    them. Nodes that do not say so in time are named in the log.
    """
    here = ray.get_runtime_context().get_node_id()
    nodes = {
        node["NodeID"]: node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU") and node["NodeID"] != here
    }
    if not files or not nodes:
        return
    expected = {path: head_of(path) for path in files.values()}
    looks = {}
    for node, address in nodes.items():
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        look = ray.remote(_lacking).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        looks[look.remote(expected)] = address
    done, late = ray.wait(list(looks), num_returns=len(looks), timeout=LOOK_S)
    silent = [looks[look] for look in late]
    for look in late:
        ray.cancel(look)
    for look in done:
        try:
            lacking = ray.get(look)
        except ray.exceptions.RayError:
            silent.append(looks[look])
            continue
        for what, path in files.items():
            if path in lacking:
                raise JobError(
                    f"{what} {path!r} is a local file, and node {looks[look]} of the cluster has not the same there: "
                    "name a place that all nodes share, or a URL such as s3://"
                )
    if silent:
        log.warning("whether %s share the local files is not known: they did not answer", ", ".join(sorted(silent)))


def head_of(path: str) -> bytes | None:
    """What a file begins with, or None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return None


def _lacking(expected: Mapping[str, bytes | None]) -> list[str]:
    """Files that this node does not have like that."""
    return [path for path, head in expected.items() if head_of(path) != head]


@dataclass(frozen=True, slots=True)
class Machine:
    """A node of the cluster that processes may run on."""

    cores: float
    room: int  # processes that its GPUs are enough for

    def holds(self, cores: float) -> int:
        """Processes of so many cores each."""
        return min(self.room, int(self.cores / cores + 1e-9))


def machines(gpus: float, most: int) -> list[Machine]:
    """Those of the connected cluster that have room for a process of so many GPUs; none for more than `most`."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    rooms = [_sharing(node.get("GPU", 0.0), gpus) if gpus else most for node in nodes]
    found = [Machine(node.get("CPU", 0.0), min(room, most)) for node, room in zip(nodes, rooms, strict=True)]
    return [machine for machine in found if machine.room and machine.cores]


def _sharing(there: float, each: float) -> int:
    """Processes that GPUs are enough for: a share of one is of one card."""
    return int(there) * int(1 / each + 1e-9) if each < 1 else int(there / each + 1e-9)


def cores_each(found: Sequence[Machine], count: int) -> float:
    """The most cores that each of so many processes can have, as none of them runs on two machines."""
    count = min(count, sum(machine.room for machine in found))
    shares = {machine.cores / sharing for machine in found for sharing in range(1, machine.room + 1)}
    enough = (share for share in shares if sum(machine.holds(share) for machine in found) >= count)
    return max(enough, default=1.0)


def replica_resources(config: JobConfig, before: ReplicaResources | None = None) -> ReplicaResources:
    """Resources of each replica on the connected cluster. Raises JobError if the cluster cannot carry them.

    With `before`, what replicas had earlier in the session, nothing is raised: nodes may have come or gone. They go on
    claiming as many GPUs, for without one they would have another engine; of fewer that are left, fewer begin.
    """
    gpus = before.gpus if before is not None else config.gpus_per_replica
    if gpus is None:
        gpus = 1.0 if config.device != "cpu" and ray.cluster_resources().get("GPU") else 0.0
    wanted = max(config.replicas or 1, config.min_replicas or 1)
    found = machines(gpus, MOST_REPLICAS if gpus else wanted)
    room = sum(machine.room for machine in found)
    count = wanted if config.replicas or not gpus else max(wanted, room)
    minimum = config.min_replicas or count
    if gpus and minimum > room:
        if before is None:
            less = "lower replicas or gpus_per_replica, or set min_replicas to start with fewer"
            raise JobError(
                f"{minimum} replicas of {gpus:g} GPUs are wanted, and the cluster's machines have room for {room}: "
                f"{less if room else 'lower gpus_per_replica'}"
            )
        minimum = max(1, room)
    cores = cores_each(found, count if gpus else minimum)  # machines that come bring cores of their own
    threads = config.threads_per_replica or max(1, int(cores))
    # Half its threads: replicas that hold every core would keep the reads that feed them from ever starting.
    cpus = round(min(threads, cores) / 2, 2)
    return ReplicaResources(count, minimum, gpus, cpus, threads)
