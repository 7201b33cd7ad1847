"""Other engines on a GPU, on the same random shapes. Greedy, exactly `new_tokens` for each row.

Where an engine does not say when its prompts are done, a run for one token tells: the rest of the time is decoding.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from jobs.engine_benchmark.contenders import Prompts
from jobs.engine_benchmark.timing import Timing


def random_reference(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """transformers' own model of that shape."""
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def time_continuous_batching(reference: PreTrainedModel, prompts: Prompts, new_tokens: int) -> Timing:
    """transformers' `generate_batch`: paged attention, captured graphs."""
    inputs = [list(prompt) for prompt in prompts]

    def generate(count: int) -> None:
        settings = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
        outputs = reference.generate_batch(inputs, settings)  # in a thread of its own, without inference mode
        _check({len(output.generated_tokens) for output in outputs.values()}, count)

    return _time(generate, len(prompts), new_tokens)


class VLLM:
    """vLLM with weights of its own drawing."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, scratch: Path) -> None:
        import vllm

        config.save_pretrained(scratch)
        self._vllm: Any = vllm
        self._model: Any = vllm.LLM(
            model=str(scratch), load_format="dummy", skip_tokenizer_init=True, dtype=str(dtype).removeprefix("torch.")
        )

    def time(self, prompts: Prompts, new_tokens: int) -> Timing:
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]

        def generate(count: int) -> None:
            settings = self._vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            outputs = self._model.generate(inputs, settings, use_tqdm=False)
            _check({len(output.outputs[0].token_ids) for output in outputs}, count)

        return _time(generate, len(prompts), new_tokens)


def _time(generate: Callable[[int], None], rows: int, new_tokens: int) -> Timing:
    seconds = []
    for count in (1, new_tokens):
        start = time.perf_counter()
        generate(count)
        seconds.append(time.perf_counter() - start)
    return Timing(seconds[0], seconds[1] - seconds[0], rows, new_tokens)


def _check(found: set[int], count: int) -> None:
    if found != {count}:
        raise AssertionError(f"{count} tokens a row were asked for, found {sorted(found)}")
