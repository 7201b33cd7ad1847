"""What replicas claim: decided by the cluster as a session finds it, and kept when the cluster shrinks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import ray

from pipeline.config import JobConfig
from pipeline.errors import JobError
from pipeline.execution.cluster import ReplicaResources, replica_resources

Job = Callable[..., JobConfig]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Lets the connected cluster have so many CPUs and GPUs."""

    def have(cpus: float, gpus: float) -> None:
        held = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        monkeypatch.setattr(ray, "cluster_resources", lambda: held)

    return have


def test_a_replica_goes_on_wanting_its_gpu_when_the_only_node_with_one_has_died(
    job: Job, nodes: Callable[[float, float], None]
) -> None:
    nodes(8, 1)
    config = job(replicas=None)
    before = replica_resources(config)
    assert (before.count, before.minimum, before.gpus) == (1, 1, 1.0)
    nodes(4, 0)
    after = replica_resources(config, before)
    assert (after.count, after.minimum, after.gpus) == (1, 1, 1.0)


@pytest.mark.parametrize(("left", "begin"), [(3, 3), (1, 1), (0, 1)])
def test_fewer_replicas_begin_on_the_gpus_that_are_left(
    job: Job, nodes: Callable[[float, float], None], left: int, begin: int
) -> None:
    nodes(16, 4)
    config = job(replicas=4)
    before = replica_resources(config)
    nodes(8, left)
    after = replica_resources(config, before)
    assert (after.count, after.minimum, after.gpus) == (4, begin, 1.0)


def test_a_gpu_that_comes_later_gives_no_replica_another_engine(
    job: Job, nodes: Callable[[float, float], None]
) -> None:
    nodes(2, 0)
    before = replica_resources(job())
    nodes(4, 1)
    assert replica_resources(job(), before) == ReplicaResources(1, 1, 0.0, 2.0, 4)


def test_a_session_that_finds_too_few_gpus_does_not_begin(job: Job, nodes: Callable[[float, float], None]) -> None:
    nodes(8, 1)
    with pytest.raises(JobError, match=r"2 replicas of 1 GPUs need 2, the cluster has 1: lower replicas"):
        replica_resources(job(replicas=2))
