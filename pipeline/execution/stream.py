"""One pass of units through the three stages on Ray Data. What comes back is read with a timeout."""

import logging
import queue
import threading
import uuid
import warnings
from collections.abc import Sequence
from contextlib import suppress

import ray
from ray.data import ActorPoolStrategy, DataContext, Dataset
from ray.exceptions import RayError
from ray.util.annotations import RayDeprecationWarning

from engine.memory import GPU_ROWS
from pipeline.config import JobConfig
from pipeline.execution.cluster import TASK_CPUS, TASK_RETRIES, ReplicaResources
from pipeline.execution.stages import Replica, Task, commit, read, span_row
from pipeline.execution.wire import Parcel
from pipeline.monitoring.board import Board
from pipeline.rows.unit import WorkUnit, rows_of_whole_unit

MOST_BESIDE = 8  # units that fill the batch while another ends: each is a thread, and is lost if the replica is


class UnitStream:
    """Parcels of a pass, as units are committed or fail. Units lost with a process just don't come."""

    def __init__(self, dataset: Dataset, replicas: list[str]) -> None:
        self._dataset = dataset
        self._replicas = replicas
        self._parcels: queue.SimpleQueue[Parcel | Exception | None] = queue.SimpleQueue()
        self.ended = False
        # A thread, because a wait inside Ray Data can't be interrupted; a daemon, because an abandoned pass may hang.
        threading.Thread(target=self._consume, name="stream", daemon=True).start()

    def next(self, timeout_s: float) -> Parcel | None:
        """The next parcel; None if none came in time or the pass has ended. Raises what ended the pass early."""
        try:
            item = self._parcels.get(timeout=timeout_s)
        except queue.Empty:
            return None
        self.ended = not isinstance(item, Parcel)
        if isinstance(item, Exception):
            raise item
        return item

    def stats(self) -> str:
        """Ray Data's own account of the pass, stage by stage; what it knows so far if the pass goes on."""
        return str(self._dataset.stats())

    def close(self) -> None:
        """End the pass and its replicas. Ray forgets those that it was restarting, and their cores with them."""
        # An abandoned pass would go on in Ray's thread, and end the process with a status of its own as Ray shuts down.
        # It is found by its name: the dataset holds it only once there is a result.
        for thread in threading.enumerate():
            if thread.name == f"StreamingExecutor-{self._dataset.get_dataset_id()}":
                thread.shutdown(force=True)  # type: ignore[attr-defined]
        for name in self._replicas:
            with suppress(ValueError, RayError):
                ray.kill(ray.get_actor(name))

    def _consume(self) -> None:
        try:
            # With one batch ahead, Ray's default, a parcel would be told of only once the next one is there.
            for table in self._dataset.iter_batches(prefetch_batches=0, batch_size=None, batch_format="pyarrow"):
                for row in table.to_pylist():
                    self._parcels.put(Parcel.from_row(row))
        except Exception as error:
            self._parcels.put(error)
        else:
            self._parcels.put(None)


def stream(spans: Sequence[list[WorkUnit]], task: Task, resources: ReplicaResources, board: Board) -> UnitStream:
    """Start a pass of the three stages over spans of units (see `Plan.spans`)."""
    _set_context()
    rows = [span_row(units) for units in spans]
    replicas: list[str] = []  # names of the actors that Ray starts for it
    # All that are sent to a replica are under way there, so that the next one's rows fill the seats of the last.
    together = units_together(task.config)
    pool = ActorPoolStrategy(
        min_size=resources.minimum,
        max_size=resources.count,
        max_tasks_in_flight_per_actor=together,
        max_concurrent_calls_per_actor=together,
        enable_true_multi_threading=True,
    )
    by_unit = {"batch_size": 1, "batch_format": "pyarrow"}
    in_tasks = {"num_cpus": TASK_CPUS, "max_retries": TASK_RETRIES}
    output = {"storage": task.config.output_storage(), "run": task.run, "log_format": task.config.log_format}

    def named() -> dict[str, str]:
        replicas.append(f"replica-{uuid.uuid4().hex}")
        return {"name": replicas[-1]}

    with warnings.catch_warnings():
        # Ray means to drop the arguments for retries and names, and has no others yet.
        warnings.simplefilter("ignore", RayDeprecationWarning)
        dataset = (
            ray.data.from_items(rows, override_num_blocks=len(rows))
            .map_batches(read, fn_kwargs={"task": task, "board": board}, **by_unit, **in_tasks)
            .map_batches(
                Replica,
                compute=pool,
                fn_constructor_kwargs={"task": task, "resources": resources, "board": board},
                num_cpus=resources.cpus,
                num_gpus=resources.gpus or None,
                # A unit whose replica dies goes to another pass, not back to the replica that Ray starts in its place:
                # there it could wait for ever for a node like the one that is gone, or kill again.
                max_restarts=-1,
                max_task_retries=0,
                ray_remote_args_fn=named,
                **by_unit,
            )
            .map_batches(commit, fn_kwargs=output, **by_unit, **in_tasks)
        )
        return UnitStream(dataset, replicas)


def units_together(config: JobConfig) -> int:
    """Units that a replica has under way: while one of them ends, the others fill its batch."""
    seats = GPU_ROWS if config.batch_size == "auto" else config.batch_size  # of "auto" only the replica can tell
    samples = config.sampling().samples_per_prompt
    generations = samples * rows_of_whole_unit(config.rows_per_unit, samples)  # of a unit
    return 1 + min(MOST_BESIDE, -(-seats // generations))


def _set_context() -> None:
    context = DataContext.get_current()
    context.enable_progress_bars = False  # the job has its own
    # A unit is one row. Blocks of one row let neighbouring units go to different replicas.
    context.target_max_block_size = 1
    # Replicas join while those that are there, and are on their way, are mostly full. By default only if more was sent
    # to them than they begin, and no more is ever sent.
    context.autoscaling_config.actor_pool_util_upscaling_threshold = 0.75
    # Lost blocks are dropped here and missed in the commit log, so that one dead process doesn't end the pass.
    context.max_errored_blocks = -1
    context.memory_usage_poll_interval_s = None  # a thread for every task, for a figure that nobody reads
    context.issue_detectors_config.detectors = []  # they advise options that a job's user does not have
    context.execution_no_progress_timeout_s = -1  # it counts units, which may take hours; ours counts batches
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)  # says that its bars are off
    # That there are too few CPUs is said by the job's own watchdog, which knows whether they are awaited.
    logging.getLogger("ray.data._internal.execution.resource_manager").setLevel(logging.ERROR)
    logging.getLogger("ray.data._internal.execution.streaming_executor_state").setLevel(logging.CRITICAL)
    logging.getLogger("ray.data._internal.execution.operators.actor_pool_map_operator").setLevel(logging.CRITICAL)
