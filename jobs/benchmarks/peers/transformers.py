"""transformers' `generate`: batches of prompts of like lengths, left-padded, as its users do."""

import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from jobs.benchmarks.peers.protocol import Job, Peer, Prompts, Run, longest_first, serve


class FirstToken(StoppingCriteria):
    """Stops nothing; notes when `generate` has its first tokens."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        if self.at is None:
            if input_ids.is_cuda:
                torch.cuda.synchronize()
            self.at = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Transformers(Peer):
    version = transformers.__version__

    def __init__(self, job: Job) -> None:
        self._job = job
        torch.set_num_threads(job.threads)
        model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=getattr(torch, job.dtype))
        self._model = model.eval().to(job.device)

    def answer(self, prompts: Prompts) -> Run:
        answers: list[list[int]] = [[] for _ in prompts]
        order, prompt_seconds, decode_seconds = longest_first(prompts), 0.0, 0.0
        for start in range(0, len(order), self._job.rows):
            indices = order[start : start + self._job.rows]
            begun = time.perf_counter()
            first, tokens = self._generate([prompts[index] for index in indices])
            ended = time.perf_counter()
            prompt_seconds += first - begun
            decode_seconds += ended - first
            for index, row in zip(indices, tokens, strict=True):
                answers[index] = row
        return Run(answers, prompt_seconds, decode_seconds)

    def _generate(self, batch: Prompts) -> tuple[float, list[list[int]]]:
        """When the first tokens came, and all tokens; rows that ended are padded with the token that ended them."""
        longest, padding = max(map(len, batch)), (self._job.eos or [0])[0]
        ids = [[padding] * (longest - len(prompt)) + list(prompt) for prompt in batch]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch]
        first = FirstToken()
        with torch.inference_mode():
            found = self._model.generate(
                torch.tensor(ids, device=self._job.device),
                attention_mask=torch.tensor(mask, device=self._job.device),
                do_sample=False,
                max_new_tokens=self._job.new_tokens,
                min_new_tokens=self._job.least_tokens,
                eos_token_id=self._job.eos or None,
                pad_token_id=padding,
                stopping_criteria=StoppingCriteriaList([first]),
            )
        assert first.at is not None
        return first.at, found[:, longest:].tolist()


if __name__ == "__main__":
    serve(Transformers)
