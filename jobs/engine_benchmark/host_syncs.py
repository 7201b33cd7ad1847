"""How often the host waits for the device in a decode step, counted in a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

# Calls that wait for all work of a stream or device, and copies to the host that make it wait.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "Memcpy DtoH (Device -> Pageable)")
# What reading tokens late should be made of: a wait for an event of the pass before, copies to pinned memory.
LATE_READS = ("cudaEventSynchronize", "Memcpy DtoH (Device -> Pinned)")


def events_per_step(generate: Callable[[int], object], fewer: int, more: int) -> dict[str, float]:
    """Events of each kind in a decode step: what a longer run has more than a shorter one, over its steps.

    Args:
        generate: runs a batch for so many tokens.
    """
    short, long = (_count(generate, tokens) for tokens in (fewer, more))
    return {name: (long[name] - short[name]) / (more - fewer) for name in (*WAITS, *LATE_READS, "cudaGraphLaunch")}


def _count(generate: Callable[[int], object], tokens: int) -> Counter[str]:
    generate(tokens)  # captures the graphs
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        generate(tokens)
    counts: Counter[str] = Counter()
    for event in profiler.key_averages():
        counts[event.key] += event.count
    return counts
