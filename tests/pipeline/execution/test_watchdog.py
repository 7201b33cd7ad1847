"""A job in which nothing moves is noticed, one that is merely slow is not."""

from __future__ import annotations

import pytest
import ray

from pipeline.execution.cluster import ReplicaResources
from pipeline.execution.watchdog import Watchdog, who_waits
from pipeline.monitoring.board import Counts, Running


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_it_barks_after_the_limit_and_every_movement_sets_it_back() -> None:
    clock = Clock()
    watchdog = Watchdog(10.0, clock)
    shown = []
    for now, progress in [(0, 1), (9, 1), (9.5, 2), (19, 2), (19.5, 2)]:
        clock.now = now
        shown.append(watchdog.stalled(progress))
    assert shown == [False, False, False, False, True]


@pytest.mark.usefixtures("cluster")
def test_its_message_names_who_waits_for_what() -> None:
    counts = Counts(replicas=1, running={"00000-000000007": Running("process 12 on 10.0.0.1", "n", 61.0)})
    said = who_waits(counts, 4, ReplicaResources(1, 1, 0.0, 0.5, 1))
    assert "unit 00000-000000007 has been in process 12 on 10.0.0.1 for 61 s; 4 units wait" in said
    assert f"of {ray.cluster_resources()['CPU']:g} CPUs" in said
    assert "no replica has started: 2 want 1 CPUs and 1 GPUs each" in who_waits(
        Counts(), 4, ReplicaResources(2, 2, 1.0, 1.0, 1)
    )
