"""This project's engine, at full depth or under a schedule."""

from __future__ import annotations

from collections.abc import Sequence

from engine import BatchStats, Engine, Sampling, Schedule, __version__
from jobs.benchmarks.peers.protocol import Job, Peer, Prompts, Run, serve


class OwnEngine(Peer):
    version = __version__

    def __init__(self, job: Job) -> None:
        self._job = job
        self._engine = Engine.load(job.model, job.device, job.dtype, job.threads)
        self._schedule = Schedule.read(job.schedule) if job.schedule else None

    def answer(self, prompts: Prompts) -> Run:
        return self._run([prompts])

    def _run(self, batches: Sequence[Prompts]) -> Run:
        """Batch after batch, each until its last row has ended; what is told is read off the engine's statistics."""
        answers: list[list[int]] = []
        passes: list[BatchStats] = []
        self._engine.share_prefix(self._job.shared_prefix)  # anew in every run: it belongs to the job
        for prompts in batches:
            generations = self._engine.generate(
                prompts, Sampling(self._job.new_tokens), self._schedule, self._job.rows, on_batch=passes.append
            )
            answers += [list(each.tokens) for each in sorted(generations, key=lambda each: each.index)]
        whole = sum(passes, BatchStats())
        return Run(answers, whole.prefill_seconds, whole.decode_seconds, whole.occupancy)


if __name__ == "__main__":
    serve(OwnEngine)
