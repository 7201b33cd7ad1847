"""A second node of the cluster dies under a job."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from fault_proxy import Fault
from nodes import Nodes
from servers import IMPORTS, S3Server
from trial import Trial

from pipeline.errors import JobError
from pipeline.execution import cluster
from pipeline.execution.cluster import check_shared

pytestmark = [pytest.mark.timeout(600), pytest.mark.alone]


@pytest.fixture(scope="module")
def nodes(s3: S3Server) -> Iterator[Nodes]:
    if ray.is_initialized():
        ray.shutdown()
    nodes = Nodes({**s3.environment, "PYTHONPATH": IMPORTS})
    yield nodes
    nodes.close()


def test_a_local_place_that_nodes_do_not_share_is_refused_before_a_replica_starts(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes are one machine here: of a file that changes under them, they have not what was looked for."""
    shared = tmp_path / "in.parquet"
    shared.write_bytes(b"content")
    check_shared({"input": str(shared)})
    monkeypatch.setattr(cluster, "head_of", lambda path: b"what only the driver has")
    with pytest.raises(JobError, match=rf"^input '{shared}' is a local file, and node [0-9.]+ of the cluster has not"):
        check_shared({"input": str(shared)})


@pytest.mark.slow
def test_a_node_that_dies_costs_at_most_its_units_in_flight(nodes: Nodes, trial: Trial) -> None:
    fault = Fault("PUT _commits", 2, "call before", call=nodes.kill_second)
    trial.proxy.arm(trial.name, [fault])
    trial.run(seconds_per_batch=0.5, replicas=2, threads_per_replica=1)  # Ray spreads them over the nodes
    assert fault.killed
    trial.check()
    assert trial.tokens_generated <= trial.tokens_of_one_pass + 3 * 4 * 12
