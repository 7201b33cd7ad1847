"""What replicas claim: decided by the cluster as a session finds it, and kept when the cluster shrinks."""

from collections.abc import Callable

import pytest
import ray
from fixture_types import Job

from pipeline.errors import JobError
from pipeline.execution.cluster import ReplicaResources, replica_resources

Nodes = Callable[..., None]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """Lets the connected cluster have nodes of so many CPUs and GPUs each."""

    def have(*held: tuple[float, float]) -> None:
        resources = [{"CPU": cpus, **({"GPU": gpus} if gpus else {})} for cpus, gpus in held]
        sums = {kind: sum(node.get(kind, 0.0) for node in resources) for kind in ("CPU", "GPU")}
        dead = {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}}
        monkeypatch.setattr(ray, "cluster_resources", lambda: sums)
        monkeypatch.setattr(ray, "nodes", lambda: [dead, *({"Alive": True, "Resources": each} for each in resources)])

    return have


def test_a_replica_goes_on_wanting_its_gpu_when_the_only_node_with_one_has_died(job: Job, nodes: Nodes) -> None:
    nodes((8, 1))
    config = job(replicas=None)
    before = replica_resources(config)
    assert (before.count, before.minimum, before.gpus) == (1, 1, 1.0)
    nodes((4, 0))
    after = replica_resources(config, before)
    assert (after.count, after.minimum, after.gpus) == (1, 1, 1.0)


@pytest.mark.parametrize(("left", "begin"), [(3, 3), (1, 1), (0, 1)])
def test_fewer_replicas_begin_on_the_gpus_that_are_left(job: Job, nodes: Nodes, left: int, begin: int) -> None:
    nodes((16, 4))
    config = job(replicas=4)
    before = replica_resources(config)
    nodes((8, left))
    after = replica_resources(config, before)
    assert (after.count, after.minimum, after.gpus) == (4, begin, 1.0)


def test_what_runs_on_cpus_claims_no_gpu(job: Job, nodes: Nodes) -> None:
    nodes((4, 1), (32, 0))
    resources = replica_resources(job(device="cpu"))
    assert (resources.gpus, resources.cpus) == (0.0, 16.0)
    assert replica_resources(job()).gpus == 1.0


def test_a_gpu_that_comes_later_gives_no_replica_another_engine(job: Job, nodes: Nodes) -> None:
    nodes((2, 0))
    before = replica_resources(job())
    nodes((4, 1))
    assert replica_resources(job(), before) == ReplicaResources(1, 1, 0.0, 2.0, 4)


def test_a_session_that_finds_too_few_gpus_does_not_begin(job: Job, nodes: Nodes) -> None:
    nodes((8, 1))
    with pytest.raises(JobError, match=r"2 replicas of 1 GPUs are wanted, .* room for 1: lower replicas"):
        replica_resources(job(replicas=2))


@pytest.mark.parametrize(
    ("held", "options", "count", "cpus", "threads"),
    [
        ([(4, 0)] * 3, {}, 1, 2.0, 4),  # one node's, not all of them
        ([(4, 0)] * 3, {"replicas": 3}, 3, 2.0, 4),
        ([(4, 0)] * 3, {"replicas": 4}, 4, 1.0, 2),
        ([(2, 0), (16, 0), (16, 0)], {"replicas": 2}, 2, 8.0, 16),  # a small head node is left to others
        ([(2, 0), (16, 0), (16, 0)], {"replicas": 3}, 3, 4.0, 8),
        ([(32, 0)] * 10 + [(8, 1)] * 4, {}, 4, 4.0, 8),  # where the GPUs are
        ([(16, 4), (16, 4)], {"gpus_per_replica": 0.5}, 16, 1.0, 2),
        ([(8, 2)], {"gpus_per_replica": 0.4}, 4, 1.0, 2),  # a share of a card is of one
        ([(8, 0)], {"replicas": 8, "min_replicas": 1}, 8, 4.0, 8),  # others wait for machines to come
        ([(16, 3), (16, 3)], {"gpus_per_replica": 2}, 2, 8.0, 16),  # a GPU of each is left over
        ([(1, 0)], {"replicas": 3}, 3, 0.17, 1),
    ],
)
def test_no_replica_wants_more_than_a_machine_has(
    job: Job,
    nodes: Nodes,
    held: list[tuple[int, int]],
    options: dict[str, float],
    count: int,
    cpus: float,
    threads: int,
) -> None:
    nodes(*held)
    found = replica_resources(job(**{"replicas": None, **options}))
    assert (found.count, found.cpus, found.threads) == (count, cpus, threads)


def test_gpus_of_two_machines_are_no_room_for_one_replica(job: Job, nodes: Nodes) -> None:
    nodes((8, 1), (8, 1))
    with pytest.raises(JobError, match="1 replicas of 2 GPUs are wanted, and the cluster's machines have room for 0"):
        replica_resources(job(replicas=None, gpus_per_replica=2))
