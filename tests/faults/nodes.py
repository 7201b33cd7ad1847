"""A Ray cluster of two nodes on this machine, one of which dies."""

import logging
import shutil
import tempfile
import threading

import pytest
import ray
from ray.cluster_utils import Cluster
from servers import BUSY_MACHINE

FAST_DEATHS = {"health_check_period_ms": 500, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 3}
# Workers wait for the next session: to import torch takes longer than most of what they do.
PATIENT_WORKERS = {"idle_worker_killing_time_threshold_ms": 600_000, "num_workers_soft_limit": 8}


class Nodes:
    """Two Ray nodes on this machine, this process their driver; the second may be killed and comes back."""

    def __init__(self, environment: dict[str, str]) -> None:
        """Workers on both nodes have the environment, and so has this process until they are closed."""
        # A folder of its own: in Ray's, other programs on this machine would find the cluster, and join it.
        self._folder = tempfile.mkdtemp(prefix="ray")
        self._patch = pytest.MonkeyPatch()
        for name, value in {**environment, **BUSY_MACHINE, "RAY_TMPDIR": self._folder}.items():
            self._patch.setenv(name, value)
        arguments = {"num_cpus": 2, "object_store_memory": 200 << 20, "include_dashboard": False}
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={**arguments, "_system_config": FAST_DEATHS | PATIENT_WORKERS},
            shutdown_at_exit=False,
        )
        self._second = self._add()
        ray.init(address=self._cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        self.address = self._cluster.address

    def kill_second(self) -> bool:
        """kill -9 for its raylet; its workers end with it. Another takes its place a little later.

        Returns False where it is dead already.
        """
        node, self._second = self._second, None
        if node is None:
            return False
        self._cluster.remove_node(node, allow_graceful=False)
        threading.Timer(1.0, self._replace).start()
        return True

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()
        self._patch.undo()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _replace(self) -> None:
        self._second = self._add()

    def _add(self) -> object:
        return self._cluster.add_node(num_cpus=2, object_store_memory=200 << 20, wait=False)
