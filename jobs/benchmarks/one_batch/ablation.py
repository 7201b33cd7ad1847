"""What each of the engine's optimisations brings: the engine against itself without one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from engine import Engine, Schedule
from engine.kernels.base import Kernels, OneDnnKernels
from jobs.benchmarks.one_batch.contenders import Prompts, time_engine
from jobs.benchmarks.one_batch.timing import TimedContender, Timing

ALL = "all of them"


class _UnpackedWeights(OneDnnKernels):
    linear = Kernels.linear


class _TorchNorm(OneDnnKernels):
    rms_norm = Kernels.rms_norm


class Ablation:
    """Engines that lack an optimisation, loaded once."""

    def __init__(self, model: str, threads: int) -> None:
        self._unpacked, self._torch_norm = (
            Engine.load(model, device="cpu", dtype="float32", threads=threads, kernels=kernels)
            for kernels in (_UnpackedWeights(), _TorchNorm())
        )

    def contenders(
        self, engine: Engine, prompts: Prompts, new_tokens: int, schedule: Schedule, instruction: Sequence[int]
    ) -> list[TimedContender]:
        """The engine with everything, named `ALL`, and without each one; `instruction` is what prompts begin with."""
        time = partial(time_engine, prompts=prompts, new_tokens=new_tokens, schedule=schedule)

        def sharing(which: Engine) -> Timing:
            which.share_prefix(instruction)
            timing = time(which)
            which.share_prefix(())
            return timing

        without: dict[str, Callable[[], Timing]] = {
            "weights packed for oneDNN": partial(sharing, self._unpacked),
            "RMS norm in four operations": partial(sharing, self._torch_norm),
            "instruction computed once": partial(time, engine),
        }
        return [
            TimedContender(ALL, partial(sharing, engine), flop_speedup=1.0),
            *(TimedContender(name, run) for name, run in without.items()),
        ]
