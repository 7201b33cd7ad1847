"""This project's engine, at full depth or under a schedule, as it is or with what a variant does otherwise."""

import sys
from functools import partial

import torch

from engine import BatchStats, Engine, Sampling, Schedule, __version__
from engine.kernels import Kernels, OneDnnKernels, kernels_for
from jobs.benchmarks.peers.protocol import Job, Peer, Prompts, Run, longest_first, serve

LOCK_STEP = "lock-step"  # nobody enters before all rows have ended, as in SkipDecode's batches
UNSHARED = "unshared"  # what all prompts begin with is computed in each of them
PLAIN = {"unpacked": "linear", "torch-norm": "rms_norm"}  # the kernel that is torch's own instead


class OwnEngine(Peer):
    version = __version__

    def __init__(self, variant: str, job: Job) -> None:
        self._job, self._variant = job, variant
        kernels = kernels_for(torch.device(job.device), getattr(torch, job.dtype))
        if variant in PLAIN:
            if type(kernels) is not OneDnnKernels:
                raise ValueError(
                    f"{variant} leaves out what is done for float32 on CPUs alone: run the engine as it is"
                )
            setattr(kernels, PLAIN[variant], partial(getattr(Kernels, PLAIN[variant]), kernels))
        self._engine = Engine.load(job.model, job.device, job.dtype, job.threads, kernels)
        self._schedule = Schedule.read(job.schedule) if job.schedule else None

    def answer(self, prompts: Prompts) -> Run:
        """What is told is read off the engine's statistics."""
        job, in_turn, together = self._job, list(range(len(prompts))), len(prompts)
        if self._variant == LOCK_STEP:
            in_turn, together = longest_first(prompts), job.rows
        answers: dict[int, list[int]] = {}
        passes: list[BatchStats] = []
        # Anew in every run: it belongs to the job.
        self._engine.share_prefix([] if self._variant == UNSHARED else job.shared_prefix)
        for first in range(0, len(prompts), together):
            batch = in_turn[first : first + together]
            generations = self._engine.generate(
                [prompts[index] for index in batch], Sampling(job.new_tokens, job.least_tokens), self._schedule,
                job.rows, on_batch=passes.append,
            )  # fmt: skip
            answers |= {batch[each.index]: list(each.tokens) for each in generations}
        whole = sum(passes, BatchStats())
        return Run(
            [answers[index] for index in range(len(prompts))], whole.prefill_seconds, whole.decode_seconds,
            whole.occupancy, list(whole.cache_course),
        )  # fmt: skip


if __name__ == "__main__":
    serve(partial(OwnEngine, "".join(sys.argv[1:])))
