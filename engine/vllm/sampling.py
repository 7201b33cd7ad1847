"""Our way of choosing tokens, inside vLLM: a sample's random stream is named by (seed, sample id, step).

vLLM hands a logits processor the logits of all rows before it samples; this one leaves each row the one token that
`engine.decoding.sampling` draws, so vLLM's greedy choice is ours. Rows that are simply greedy are left to vLLM.
"""

import json
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from engine.decoding.sampling import Sampler, Sampling

SAMPLED = "skipdecode_sampling"  # of a request's `extra_args`


def describe(sampling: Sampling, eos_ids: list[int], sample_id: str) -> str | None:
    """What a request tells the processor; None where vLLM's own greedy choice is ours."""
    plain = sampling.is_greedy and sampling.repetition_penalty == 1.0 and not sampling.min_new_tokens
    return None if plain else json.dumps([asdict(sampling), eos_ids, sample_id])


class _Row(NamedTuple):
    """What a row's tokens are chosen by."""

    sampling: Sampling
    eos_ids: list[int]
    sample_id: str
    prompt: list[int]
    tokens: list[int]  # generated so far: vLLM's own list, which grows


class OurSampling(LogitsProcessor):
    """Knows the rows that are not simply greedy."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._vocab, self._device = vllm_config.model_config.get_vocab_size(), device
        self._rows: dict[int, _Row] = {}  # by place in the batch

    def is_argmax_invariant(self) -> bool:
        """No: the likeliest token is what it changes."""
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
                settings, eos_ids, sample_id = json.loads(described)
                sampling = Sampling(**{**settings, "stop": tuple(settings["stop"])})
                self._rows[place] = _Row(sampling, eos_ids, sample_id, prompt or [], tokens)
        for first, second, direction in batch_update.moved:
            moved, other = self._rows.pop(first, None), self._rows.pop(second, None)
            if moved is not None:
                self._rows[second] = moved
            if other is not None and direction == MoveDirectionality.SWAP:
                self._rows[first] = other

    def apply(self, logits: Tensor) -> Tensor:
        """Logits [rows, vocab], overwritten.

        Rows whose prompts or replayed tokens are not yet through have logits here too, which come to nothing: so
        nothing is kept from one pass to the next.
        """
        alike: dict[tuple[Sampling, tuple[int, ...]], list[int]] = {}
        for place, row in self._rows.items():
            alike.setdefault((row.sampling, tuple(row.eos_ids)), []).append(place)
        for (sampling, eos_ids), places in alike.items():
            sampler = Sampler(sampling, eos_ids, self._vocab, len(places), self._device)
            rows = [self._rows[place] for place in places]
            for seat, row in enumerate(rows):
                sampler.enter(seat, [*row.prompt, *row.tokens], row.sample_id)
            where = torch.tensor(places, device=self._device)
            chosen = sampler.choose(logits[where], range(len(rows)), [len(row.tokens) for row in rows])
            # Prompts that are not yet through may have anything here. Of other rows vLLM tells, which counts what is no
            # number in these logits, where they are in single precision, or in those that they were made of.
            none = chosen < 0
            wanted = torch.full_like(logits[where], -torch.inf).scatter_(1, chosen.clamp_min(0)[:, None], 0.0)
            logits[where] = wanted.masked_fill_(none[:, None], torch.nan)
        return logits
