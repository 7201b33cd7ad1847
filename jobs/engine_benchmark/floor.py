"""The least time that decoding can take here: memory read at the measured rate, or arithmetic at the measured rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from engine import Ledger, ModelShape, Schedule

BUFFER_BYTES = 512 << 20  # far beyond any cache
MATRIX = 2048
REPEATS = 7


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Measured with the benchmark's own number of threads."""

    bytes_per_second: float  # reading memory
    flops_per_second: float  # float32 matrix product of large squares


def measure_rates() -> MachineRates:
    buffer, matrix = torch.ones(BUFFER_BYTES // 4), torch.randn(MATRIX, MATRIX)
    reading = _seconds(lambda: buffer.sum())
    multiplying = _seconds(lambda: matrix @ matrix)
    return MachineRates(BUFFER_BYTES / reading, 2 * MATRIX**3 / multiplying)


def decode_floor(
    rates: MachineRates, shape: ModelShape, schedule: Schedule, lengths: list[tuple[int, int]], element_bytes: int = 4
) -> float:
    """Seconds. Each pass reads the active weights once and every row's cache in the active layers, and computes both.

    The two overlap at best: a pass takes the longer of them.

    Args:
        lengths: (prompt tokens, generated tokens) of each row of the batch.
    """
    ledger = Ledger(shape, schedule)
    seconds = 0.0
    for step in range(max(generated for _, generated in lengths) - 1):
        cost = ledger.plateaus[schedule.plateau_at(step)]
        contexts = [prompt + step + 1 for prompt, generated in lengths if step < generated - 1]
        layers = sum(unit.kind == "a" for unit in schedule.active(step))
        cache = 2 * shape.kv_heads * shape.head_dim * layers * sum(contexts)
        read = (cost.weights // 2 + cache) * element_bytes
        computed = sum(cost.tokens(context, context) for context in contexts)
        seconds += max(read / rates.bytes_per_second, computed / rates.flops_per_second)
    return seconds


def _seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)
