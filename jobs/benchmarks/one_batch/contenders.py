"""Who generates: the engine, transformers' `generate`, CTranslate2. Greedy, exactly `new_tokens` for each row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteriaList

from engine import BatchStats, Engine, Sampling, Schedule
from jobs.benchmarks.one_batch.timing import Timing
from jobs.benchmarks.peers.transformers import FirstToken

Prompts = Sequence[Sequence[int]]


def run_engine(engine: Engine, prompts: Prompts, new_tokens: int, schedule: Schedule) -> BatchStats:
    sampling = Sampling(max_new_tokens=new_tokens, min_new_tokens=new_tokens)
    batches: list[BatchStats] = []
    list(engine.generate(prompts, sampling, schedule, len(prompts), on_batch=batches.append))
    return sum(batches, BatchStats())


def time_engine(engine: Engine, prompts: Prompts, new_tokens: int, schedule: Schedule) -> Timing:
    batch = run_engine(engine, prompts, new_tokens, schedule)
    return Timing(batch.prefill_seconds, batch.decode_seconds, len(prompts), new_tokens)


def time_transformers(reference: PreTrainedModel, prompts: Prompts, new_tokens: int) -> Timing:
    """Left-padded, as its users do."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    first = FirstToken()
    start = time.perf_counter()
    with torch.inference_mode():
        reference.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            stopping_criteria=StoppingCriteriaList([first]),
        )
    end = time.perf_counter()
    assert first.at is not None
    return Timing(first.at - start, end - first.at, len(prompts), new_tokens)


class CTranslate2:
    """CTranslate2 in float32, on a checkpoint converted to its own format.

    It takes prompts up to the shortest one's length in one pass and the rest token by token while decoding. So that its
    decoding isn't charged with prompts, every prompt is repeated or cut to the mean length: as many tokens to attend to
    as everybody else has.
    """

    def __init__(self, checkpoint: Path, threads: int, scratch: Path) -> None:
        import ctranslate2

        converted = scratch / "ctranslate2"
        ctranslate2.converters.TransformersConverter(str(checkpoint)).convert(str(converted))
        self._generator: Any = ctranslate2.Generator(
            str(converted), device="cpu", intra_threads=threads, compute_type="float32"
        )

    def time(self, prompts: Prompts, new_tokens: int, vocabulary: Sequence[str]) -> Timing:
        """`vocabulary`: token id -> its text in the tokenizer's vocabulary."""
        length = round(sum(map(len, prompts)) / len(prompts))
        even = [[vocabulary[prompt[i % len(prompt)]] for i in range(length)] for prompt in prompts]
        first: list[float] = []

        def on_token(_: object) -> bool:
            if not first:
                first.append(time.perf_counter())
            return False

        start = time.perf_counter()
        results = self._generator.generate_batch(
            even,
            max_length=new_tokens,
            min_length=new_tokens,
            include_prompt_in_result=False,
            callback=on_token,
        )
        end = time.perf_counter()
        generated = {len(result.sequences_ids[0]) for result in results}
        if generated != {new_tokens}:
            raise AssertionError(f"CTranslate2 was to generate {new_tokens} tokens a row, it gave {sorted(generated)}")
        return Timing(first[0] - start, end - first[0], len(prompts), new_tokens)
