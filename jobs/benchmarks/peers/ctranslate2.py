"""CTranslate2, on the checkpoint converted to its own format."""

import os
from typing import Any

import ctranslate2
from transformers import AutoTokenizer

from jobs.benchmarks.peers.protocol import Job, Peer, Prompts, Run, serve


class CTranslate2Peer(Peer):
    version = ctranslate2.__version__

    def __init__(self, job: Job) -> None:
        self._job = job
        converted = os.path.join(job.scratch, "ctranslate2")
        ctranslate2.converters.TransformersConverter(job.model).convert(converted)
        self._generator: Any = ctranslate2.Generator(
            converted, device=job.device, compute_type=job.dtype, intra_threads=job.threads
        )
        tokenizer = AutoTokenizer.from_pretrained(job.model)
        self._names: list[str] = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))

    def answer(self, prompts: Prompts) -> Run:
        shared = len(self._job.shared_prefix)
        results = self._generator.generate_batch(
            [[self._names[token] for token in prompt[shared:]] for prompt in prompts],
            static_prompt=[self._names[token] for token in self._job.shared_prefix] or None,
            max_batch_size=self._job.rows,  # it sorts by length itself
            max_length=self._job.new_tokens,
            min_length=self._job.least_tokens,
            end_token=self._job.eos,
            include_prompt_in_result=False,
        )
        return Run([result.sequences_ids[0] for result in results])


if __name__ == "__main__":
    serve(CTranslate2Peer)
