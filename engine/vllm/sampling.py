"""Our way of choosing tokens, inside vLLM: a sample's random stream is named by (seed, sample id, step).

vLLM hands a logits processor the logits of all rows before it samples; this one leaves each row the one token that
`engine.decoding.sampling` draws, so vLLM's greedy choice is ours. Rows that are simply greedy are left to vLLM.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from engine.decoding.sampling import Sampler, Sampling

SAMPLED = "skipdecode_sampling"  # of a request's `extra_args`


def describe(sampling: Sampling, eos_ids: list[int], sample_id: str) -> str | None:
    """What a request tells the processor; None where vLLM's own greedy choice is ours."""
    plain = sampling.is_greedy and sampling.repetition_penalty == 1.0 and not sampling.min_new_tokens
    return None if plain else json.dumps([asdict(sampling), eos_ids, sample_id])


class OurSampling(LogitsProcessor):
    """Keeps a sampler for each row that asks for one."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._vocab, self._device = vllm_config.model_config.get_vocab_size(), device
        self._rows: dict[int, tuple[Sampler, list[int]]] = {}  # place -> sampler, tokens generated so far

    def is_argmax_invariant(self) -> bool:
        """No: that is what it changes."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow vLLM's rows to their places."""
        if batch_update is None:
            return
        for place in batch_update.removed:
            self._rows.pop(place, None)
        for place, params, prompt, tokens in batch_update.added:
            self._rows.pop(place, None)
            if (described := (params.extra_args or {}).get(SAMPLED)) is not None:
                self._rows[place] = self._sampler(described, prompt or [], tokens), tokens
        for first, second, direction in batch_update.moved:
            held = self._rows.pop(first, None)
            other = self._rows.pop(second, None)
            if held is not None:
                self._rows[second] = held
            if other is not None and direction == MoveDirectionality.SWAP:
                self._rows[first] = other

    def apply(self, logits: Tensor) -> Tensor:
        """Logits [rows, vocab], overwritten."""
        for place, (sampler, tokens) in self._rows.items():
            if place >= len(logits):
                continue
            row = logits[place : place + 1]
            chosen = sampler.choose(row.clone(), len(tokens))
            row.fill_(-torch.inf)[0, chosen] = 0.0
        return logits

    def _sampler(self, described: str, prompt: list[int], tokens: list[int]) -> Sampler:
        """A row's sampler, that has seen what the row has generated before it was last preempted."""
        settings, eos_ids, sample_id = json.loads(described)
        sampling = Sampling(**{**settings, "stop": tuple(settings["stop"])})
        return Sampler(sampling, eos_ids, self._vocab, [[*prompt, *tokens]], [sample_id], self._device)
