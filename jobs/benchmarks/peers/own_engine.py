"""This project's engine, at full depth or under a schedule."""

from __future__ import annotations

from engine import BatchStats, Engine, Sampling, Schedule, __version__
from jobs.benchmarks.peers.protocol import Job, Peer, Prompts, Run, serve


class OwnEngine(Peer):
    version = __version__

    def __init__(self, job: Job) -> None:
        self._job = job
        self._engine = Engine.load(job.model, job.device, job.dtype, job.threads)
        self._schedule = Schedule.read(job.schedule) if job.schedule else None

    def answer(self, prompts: Prompts) -> Run:
        batches: list[BatchStats] = []
        self._engine.share_prefix(self._job.shared_prefix)  # anew in every run: it belongs to the job
        generations = self._engine.generate(
            prompts, Sampling(self._job.new_tokens), self._schedule, self._job.rows, on_batch=batches.append
        )
        answers: list[list[int]] = [[] for _ in prompts]
        for generation in generations:
            answers[generation.index] = list(generation.tokens)
        return self._told(answers, batches)

    def _told(self, answers: list[list[int]], batches: list[BatchStats]) -> Run:
        """All that is read off the engine's own statistics."""
        whole = sum(batches, BatchStats())
        return Run(answers, whole.prefill_seconds, whole.decode_seconds, whole.occupancy)


if __name__ == "__main__":
    serve(OwnEngine)
