"""A second node of the cluster dies under a job."""

from collections.abc import Iterator

import pytest
import ray
from fault_proxy import Fault
from nodes import Nodes
from servers import IMPORTS, S3Server
from trial import Trial

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def nodes(s3: S3Server) -> Iterator[Nodes]:
    if ray.is_initialized():
        ray.shutdown()
    nodes = Nodes({**s3.environment, "PYTHONPATH": IMPORTS})
    yield nodes
    nodes.close()


@pytest.mark.slow
def test_a_node_that_dies_costs_at_most_its_units_in_flight(nodes: Nodes, trial: Trial) -> None:
    fault = Fault("PUT _commits", 2, "call before", call=nodes.kill_second)
    trial.proxy.arm(trial.name, [fault])
    trial.run(seconds_per_batch=0.5, replicas=2, threads_per_replica=1)  # Ray spreads them over the nodes
    assert fault.killed
    trial.check()
    assert trial.tokens_generated <= trial.tokens_of_one_pass + 3 * 4 * 12
