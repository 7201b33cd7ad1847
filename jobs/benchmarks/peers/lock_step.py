"""This project's engine with batches in lock-step, as SkipDecode's are: nobody enters before all rows have ended."""

from __future__ import annotations

from dataclasses import replace

from jobs.benchmarks.peers.own_engine import OwnEngine
from jobs.benchmarks.peers.protocol import Prompts, Run, longest_first, serve


class LockStep(OwnEngine):
    def answer(self, prompts: Prompts) -> Run:
        order, rows = longest_first(prompts), self._job.rows
        batches = [order[first : first + rows] for first in range(0, len(order), rows)]
        run = self._run([[prompts[index] for index in batch] for batch in batches])
        answers = dict(zip(order, run.answers, strict=True))
        return replace(run, answers=[answers[index] for index in range(len(prompts))])


if __name__ == "__main__":
    serve(LockStep)
