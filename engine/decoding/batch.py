"""Generate one batch: prompts in one pass, then a step for all rows at a time under the schedule."""

from __future__ import annotations

import copy
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import Tensor
from torch.profiler import record_function

from engine.decoding.cache import GROWTH, KVCache
from engine.decoding.sampling import Sampler, Sampling
from engine.decoding.stopping import Stopping
from engine.forward.ledger import Ledger
from engine.forward.operations import Compiled, Operation, attention_layers, decode_plans, run_plan
from engine.forward.packing import packs
from engine.forward.prompt_pass import PROMPT_TOKENS, PromptPass
from engine.kernels.base import Kernels
from engine.models.decoder import Attend, Decoder, Rotations

# Rows that attend together: each reads the cache up to the longest of them. Rows are sorted by length, so a few read
# little in vain, while very small groups cost more calls than they save.
ATTENTION_ROWS = 8
COMPACT_BELOW = 0.75  # share of unfinished rows under which copying them together is cheaper than running the rest


@dataclass(slots=True)
class Sample:
    """One generation under way."""

    index: int  # of the prompt in the call
    copy: int  # which of the prompt's samples
    sample_id: str
    prompt: Sequence[int]
    limit: int  # most tokens it may generate
    shares_prompt: bool = False  # another sample of the batch has computed this prompt
    shared_prefix: int = 0  # tokens of the prompt that a prefix has computed for all
    tokens: list[int] = field(default_factory=list)
    ended: bool = False  # by end-of-sequence or a stop string

    @property
    def prompt_computed(self) -> int:
        """Prompt tokens that are computed for this sample."""
        return 0 if self.shares_prompt else len(self.prompt) - self.shared_prefix

    @property
    def finished(self) -> bool:
        return self.ended or len(self.tokens) >= self.limit


@dataclass(frozen=True, slots=True)
class BatchStats:
    """What a batch cost. FLOPs of the samples are those of the ledger; padding is what was computed for nobody."""

    samples: int
    prompt_tokens: int  # computed
    generated_tokens: int
    steps: int
    flops_padding: int
    cache_course: tuple[int, ...]  # bytes of the key/value cache after the prompts, then in each decode pass
    prefill_seconds: float
    decode_seconds: float

    @property
    def cache_bytes(self) -> int:
        """Most memory the key/value cache took."""
        return max(self.cache_course)


@dataclass(frozen=True, slots=True)
class BatchContext:
    """What all batches of a call share."""

    decoder: Decoder
    kernels: Kernels
    prompts: PromptPass
    compiled: Compiled  # of all schedules that the call runs
    stopping: Stopping
    dtype: torch.dtype
    device: torch.device

    @property
    def sampling(self) -> Sampling:
        return self.stopping.sampling


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Neighbouring rows of a batch that attend together, for one step."""

    rows: slice
    longest: int  # tokens of the longest row, the new one included
    masks: dict[int | None, Tensor]  # window -> [rows * kv_heads, 1, longest]: 0 for what a row sees, else -inf


class Batch:
    """The rows of one batch, from their prompts to their last tokens."""

    def __init__(self, context: BatchContext, ledger: Ledger, samples: Sequence[Sample]) -> None:
        """`ledger` is of the schedule to decode under."""
        self._context, self._decoder, self._device = context, context.decoder, context.device
        self._ledger, self._plans = ledger, decode_plans(ledger.schedule)
        self.samples = samples
        self._rows = list(samples)  # row -> sample
        self._sampler = self._make_sampler()
        self._cache = self._make_cache()
        self._cache_course = [self._cache.bytes]
        self._executed = 0  # decode FLOPs really spent, padding included

    def run(self) -> BatchStats:
        """Generate every sample to its end."""
        return self._generate(*self._timed_prefill())

    def run_each(self, ledgers: Sequence[Ledger]) -> list[tuple[Sequence[Sample], BatchStats]]:
        """Generate every sample once per schedule, after one prompt pass: what separate batches would give.

        The batch's own schedule must keep every layer that one of the others decodes with. Each run's stats name the
        time of the prompt pass, which it would have taken alone.
        """
        logits, seconds = self._timed_prefill()
        forks = (self._fork(ledger) for ledger in ledgers)  # one at a time: each copies the cache
        return [(fork.samples, fork._generate(logits.clone(), seconds)) for fork in forks]

    def _fork(self, ledger: Ledger) -> Batch:
        """This batch as it is after its prompt pass, to be decoded under another schedule."""
        fork = copy.copy(self)
        fork._ledger, fork._plans = ledger, decode_plans(ledger.schedule)
        fork.samples = [replace(sample, tokens=[]) for sample in self.samples]
        fork._rows = list(fork.samples)
        fork._sampler = fork._make_sampler()
        fork._cache = self._cache.copy(attention_layers(fork._plans[0]))
        fork._cache_course = [fork._cache.bytes]
        return fork

    def _make_sampler(self) -> Sampler:
        prompts, ids = [s.prompt for s in self.samples], [s.sample_id for s in self.samples]
        stopping, vocab = self._context.stopping, self._decoder.shape.vocab
        return Sampler(stopping.sampling, stopping.eos_ids, vocab, prompts, ids, self._device)

    def _make_cache(self) -> KVCache:
        longest = max(len(sample.prompt) + min(sample.limit, GROWTH) for sample in self.samples)
        cached = attention_layers(self._plans[0])
        return KVCache(self._decoder.shape, cached, len(self.samples), longest, self._context.dtype, self._device)

    def _generate(self, logits: Tensor, prefill_seconds: float) -> BatchStats:
        """From the last prompt tokens' logits [B, vocab] to the end of every sample."""
        start = time.perf_counter()
        steps = self._decode_to_the_end(logits)
        useful = sum(self._ledger.decode(len(s.prompt), len(s.tokens)) for s in self.samples)
        return BatchStats(
            samples=len(self.samples),
            prompt_tokens=sum(sample.prompt_computed for sample in self.samples),
            generated_tokens=sum(len(s.tokens) for s in self.samples),
            steps=steps,
            flops_padding=self._executed - useful,
            cache_course=tuple(self._cache_course),
            prefill_seconds=prefill_seconds,
            decode_seconds=time.perf_counter() - start,
        )

    def _decode_to_the_end(self, logits: Tensor) -> int:
        """From the prompts' logits [B, vocab], which are overwritten, to the last token; how many passes it took."""
        self._extend(logits, step=0)
        step = 0
        while not all(sample.finished for sample in self._rows):
            self._compact()
            self._extend(self._decode(step), step + 1)
            step += 1
        return step

    def _timed_prefill(self) -> tuple[Tensor, float]:
        """Logits of the prompt pass, and the seconds it took."""
        start = time.perf_counter()
        with record_function("prompts"):
            logits = self._prefill()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # once a batch, so that its time is that of the prompts
        return logits, time.perf_counter() - start

    def _prefill(self) -> Tensor:
        """Logits [B, vocab] of every row's last prompt token. Samples of one prompt share its pass."""
        rows = range(len(self._rows))
        groups = [list(group) for _, group in groupby(rows, key=lambda row: self._rows[row].index)]
        for group in groups:
            shared = self._context.prompts.shared(self._rows[group[0]].prompt)
            for row in group:
                self._rows[row].shared_prefix = shared
                self._rows[row].shares_prompt = row != group[0]
        packed = packs(groups, lambda group: self._rows[group[0]].prompt_computed, PROMPT_TOKENS)
        logits = torch.cat([self._prefill_packed(pack) for pack in packed])
        self._cache.lengths.copy_(torch.tensor([len(sample.prompt) for sample in self._rows]))
        owner = torch.tensor([i for i, group in enumerate(groups) for _ in group], device=self._device)
        return logits[owner]

    def _prefill_packed(self, groups: Sequence[Sequence[int]]) -> Tensor:
        """One pass over the prompt of each group of rows; fills their caches. Logits [len(groups), vocab]."""

        def keep(layer: int, index: int, k: Tensor, v: Tensor) -> None:
            if layer in self._cache:
                for row in groups[index]:
                    self._cache.write_prompt(layer, row, k, v)

        prompts = [self._rows[group[0]].prompt for group in groups]
        return self._decoder.logits(self._context.prompts.run(prompts, keep, self._ledger.schedule.prompt_bridge))

    def _decode(self, step: int) -> Tensor:
        """One pass over every row's newest token under the schedule's active set: logits [B, vocab]."""
        plateau = self._ledger.schedule.plateau_at(step)
        plan = self._plans[plateau]
        cache, longest = self._cache, max(len(s.prompt) + len(s.tokens) for s in self._rows)
        layers = attention_layers(plan)
        cache.keep_layers(layers)
        cache.reserve(longest)
        self._cache_course.append(cache.bytes)
        # A finished row computes on for nobody: it stays where it is, lest it outgrow the cache or the context.
        running = torch.tensor([not sample.finished for sample in self._rows], device=self._device)
        shape = self._decoder.shape
        windows = {shape.attention_kind(layer).window for layer in layers}
        groups = [
            self._row_group(range(len(self._rows))[first : first + ATTENTION_ROWS], windows)
            for first in range(0, len(self._rows), ATTENTION_ROWS)
        ]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.append(layer, k, v)
            kind = shape.attention_kind(layer)
            return torch.cat(
                [
                    self._context.kernels.decode_attention(
                        q[group.rows], *cache.view(layer, group.rows, group.longest), group.masks[kind.window], kind
                    )
                    for group in groups
                ]
            )

        rotations = self._decoder.rotations(cache.lengths, cache.lengths + 1)
        newest = torch.tensor([sample.tokens[-1] for sample in self._rows], device=self._device)
        x = self._decoder.embed(newest, cache.lengths)
        with record_function("layers"):
            x = self._run_plan(plan, x, rotations, attend)
        cache.lengths += running
        cost = self._ledger.plateaus[plateau]
        for group in groups:
            self._executed += (group.rows.stop - group.rows.start) * cost.tokens(group.longest, group.longest)
        with record_function("head"):
            return self._context.compiled.head(self._ledger.schedule, self._decoder)(x)

    def _row_group(self, rows: range, windows: Collection[int | None]) -> RowGroup:
        longest = max(len(self._rows[row].prompt) + len(self._rows[row].tokens) for row in rows)
        slots = torch.arange(longest, device=self._device)
        newest = self._cache.lengths[rows.start : rows.stop, None]  # the slot of the new token
        masks = {}
        for window in windows:
            unseen = slots > newest if window is None else (slots > newest) | (slots <= newest - window)
            mask = torch.zeros(unseen.shape, dtype=self._context.dtype, device=self._device).masked_fill_(
                unseen, -torch.inf
            )
            masks[window] = mask.repeat_interleave(self._decoder.shape.kv_heads, 0).unsqueeze(1)
        return RowGroup(slice(rows.start, rows.stop), longest, masks)

    def _run_plan(self, plan: Sequence[Operation], x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """Hidden states [N, hidden] after the plan's operations."""
        return run_plan(self._decoder, plan, self._context.compiled, x, rotations, attend)

    def _extend(self, logits: Tensor, step: int) -> None:
        """Sample a token for every unfinished row."""
        with record_function("sampling"):
            tokens = self._sampler.choose(logits, step).tolist()
        for sample, token in zip(self._rows, tokens, strict=True):
            if not sample.finished:
                sample.tokens.append(token)
                sample.ended = self._context.stopping.ends(sample.tokens)

    def _compact(self) -> None:
        """Drop finished rows once enough of them are."""
        live = [row for row, sample in enumerate(self._rows) if not sample.finished]
        if len(live) > COMPACT_BELOW * len(self._rows):
            return
        rows = torch.tensor(live, device=self._device)
        self._rows = [self._rows[row] for row in live]
        self._cache.keep_rows(rows)
        self._sampler.keep_rows(rows)
