"""The least time that decoding can take here: memory read at the measured rate, or arithmetic at the measured rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from engine import Ledger, ModelShape, Schedule
from engine.kernels.base import kernels_for

BUFFER_BYTES = 512 << 20  # far beyond any CPU's cache
MATRIX = {"cpu": 2048, "cuda": 8192}  # large enough to keep every unit busy
REPEATS = 7
CPU = torch.device("cpu")
ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Measured with the benchmark's own number of threads."""

    bytes_per_second: float  # reading memory
    flops_per_second: float  # matrix product of large squares


def measure_rates() -> MachineRates:
    """What the CPU does at best, in float32."""
    buffer = torch.ones(BUFFER_BYTES // 4)
    return MachineRates(BUFFER_BYTES / _seconds(lambda: buffer.sum(), CPU), multiply_rate(CPU, torch.float32))


def multiply_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a product of large square matrices, one of them packed as the engine's weights are.

    On some CPUs plain products run at half of that: the library behind them has no code for these.
    """
    width = MATRIX[device.type]
    matrix = torch.randn(width, width, device=device).to(dtype)
    product = kernels_for(device, dtype).linear(matrix)
    return 2 * width**3 / _seconds(lambda: product(matrix), device)


def decode_floor(rates: MachineRates, shape: ModelShape, schedule: Schedule, lengths: list[tuple[int, int]]) -> float:
    """Seconds in float32. Each pass reads the active weights once and every row's cache in the active layers, and
    computes both.

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
        read = (cost.weights // 2 + cache) * ELEMENT_BYTES
        computed = sum(cost.tokens(context, context) for context in contexts)
        seconds += max(read / rates.bytes_per_second, computed / rates.flops_per_second)
    return seconds


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(REPEATS + 1):  # the first warms up
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[1:])
