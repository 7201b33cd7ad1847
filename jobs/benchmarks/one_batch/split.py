"""Where the engine's time goes, from one profiled run: layers, head, sampling, and the host between them."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile, record_function

from engine import BatchStats

PARTS = ("layers", "head", "sampling")  # the ranges that the engine marks


def time_split(run: Callable[[], BatchStats]) -> tuple[dict[str, float], BatchStats]:
    """Shares of a run's time, adding up to 1, and its stats. "host" is what lies outside the marked ranges."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("run"):
        stats = run()
    events = profiler.key_averages()
    microseconds = {key: sum(event.cpu_time_total for event in events if event.key == key) for key in ("run", *PARTS)}
    shares = {part: microseconds[part] / microseconds["run"] for part in PARTS}
    return shares | {"host": 1 - sum(shares.values())}, stats
