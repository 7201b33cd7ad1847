"""A stream of rows: prompts are added at any time, each pass takes all rows a token on, and who ends makes room."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from threading import Lock

import torch
from torch import Tensor

from engine.decoding.generation import Generation, Sample, generation_of, samples_of
from engine.decoding.sampling import NO_TOKEN, Sampler, Sampling
from engine.decoding.stats import BatchStats
from engine.decoding.stopping import Stopping
from engine.errors import NOT_NUMBERS
from engine.forward.cache import KVCache, slots_for
from engine.forward.ledger import Ledger
from engine.forward.one_pass import EnteringPrompt, NewestToken, OnePass, Plans
from engine.forward.operations import Compiled
from engine.forward.prompt_pass import PROMPT_TOKENS, PromptPass

# Prompts that are put in order of length together, in batches: rows of like length attend with little padding, and a
# prompt waits for so many others at the most.
ORDERED_TOGETHER = 4
# One seat in so many has to be free before prompts enter beside rows that run: several prompts make larger matrix
# products than one, which is worth more than seats that are filled a few passes earlier.
ENTER_TOGETHER = 4

Copies = list[Sample]  # of one prompt, that enter together: the prompt is computed once


@dataclass(frozen=True, slots=True)
class Context:
    """What the streams of a call share."""

    prompts: PromptPass  # with the model
    compiled: Compiled  # of all schedules that the call runs
    stopping: Stopping
    dtype: torch.dtype

    @property
    def sampling(self) -> Sampling:
        return self.stopping.sampling


@dataclass
class Queue:
    """Prompts that wait. They enter by length within windows, in falling and rising order in turns."""

    window: int  # samples
    lanes: int = 1  # streams that take from it
    waiting: deque[Copies] = field(default_factory=deque)
    ordered: deque[Copies] = field(default_factory=deque)
    falling: bool = True
    samples: int = 0  # of the prompts that wait
    unfinished: int = 0  # and those that run, in all streams
    held: dict[int, int] = field(default_factory=dict)  # bytes of the cache, by stream
    lock: Lock = field(default_factory=Lock)

    def __len__(self) -> int:
        return len(self.waiting) + len(self.ordered)

    @property
    def share(self) -> int:
        """Rows of a stream when there are not enough for all seats."""
        return -(-self.unfinished // self.lanes)

    @property
    def first(self) -> Copies:
        """The next to enter."""
        if not self.ordered:
            taken: list[Copies] = []
            while self.waiting and sum(map(len, taken)) < self.window:
                taken.append(self.waiting.popleft())
            self.ordered.extend(sorted(taken, key=lambda copies: len(copies[0].prompt), reverse=self.falling))
            self.falling = not self.falling
        return self.ordered[0]

    def add(self, copies: Copies) -> None:
        """Let a prompt wait."""
        with self.lock:
            self.waiting.append(copies)
            self.samples += len(copies)
            self.unfinished += len(copies)

    def take(self) -> Copies:
        """The first one enters."""
        taken = self.ordered.popleft()
        self.samples -= len(taken)
        return taken

    def after_pass(self, stream: int, held: int, ended: int) -> None:
        """What its cache holds now, and how many have ended."""
        with self.lock:
            self.held[stream] = held
            self.unfinished -= ended


class Stream:
    """Rows under one sampling and one schedule."""

    _kind_of_pass = OnePass

    def __init__(
        self,
        context: Context,
        ledger: Ledger,
        batch_size: int,
        cache_bytes: int | None = None,
        queue: Queue | None = None,
    ) -> None:
        """An empty one.

        Args:
            context, ledger: the model, the sampling, the schedule.
            batch_size: most rows at a time.
            cache_bytes: most memory that the cache may hold, rows being as long in it as they can get; a row that
                does not fit runs alone, where other streams leave it what is theirs.
            queue: that other streams of as much memory take from too, in threads of their own; default one of its own.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {batch_size}")
        self._context, self._ledger, self._seats, self._cache_bytes = context, ledger, batch_size, cache_bytes
        self._decoder, device, stopping = context.prompts.decoder, context.prompts.device, context.stopping
        self._plans = Plans(ledger.schedule)
        self._cache = KVCache(self._decoder.shape, self._plans.spans, context.dtype, device)
        self._sampler = Sampler(stopping.sampling, stopping.eos_ids, self._decoder.shape.vocab, batch_size, device)
        self._free = list(reversed(range(batch_size)))
        self._queue = Queue(ORDERED_TOGETHER * batch_size) if queue is None else queue
        self.rows: list[Sample] = []  # that run, between passes by plateau
        self._prefix = context.prompts.prefix  # as it was when the rows of this pass entered
        self.held_bytes = 0  # of the cache, in the last pass
        self.stats = BatchStats()  # since they were last taken

    @property
    def unfinished(self) -> int:
        """Rows queued or running."""
        return len(self.rows) + self._queue.samples

    def take_stats(self) -> BatchStats:
        """What passes have cost since this was last asked."""
        stats, self.stats = self.stats, BatchStats()
        return stats

    def close(self) -> None:
        """Nothing to end: passes run in the caller's thread."""

    def add(self, prompt: Sequence[int], sample_id: str, index: int) -> None:
        """As `Decoding.add`."""
        shape = self._decoder.shape
        samples = samples_of(prompt, sample_id, index, self._context.sampling, shape.context, shape.vocab)
        together = self._seats
        if self._cache_bytes is not None:
            row_bytes = shape.layers * self._cache.row_bytes(samples[0].longest)
            together = min(together, max(1, self._cache_bytes // row_bytes))
        for first in range(0, len(samples), together):
            self._queue.add(samples[first : first + together])

    def step(self) -> list[Generation]:
        """One pass; the generations that ended in it."""
        start = time.perf_counter()
        with torch.inference_mode():
            entering = self._admit()
            if not entering and not self.rows:
                return []
            running = self.rows
            logits, flops, padding = self._pass(entering, running)
            done = self._choose([*self._enter(entering), *running], self._of_copies(entering, logits))
            self._count(start, entering, len(running), flops, padding)
            return done

    def fork(self, ledger: Ledger) -> "Stream":
        """These rows as they entered, to be decoded under another schedule with the same prompt plan.

        This stream's own schedule must keep every layer that the other one decodes with.
        """
        fork = Stream(self._context, ledger, self._seats)
        fork._free = list(self._free)
        fork.rows = [replace(sample, tokens=[], ended=False) for sample in self.rows]
        fork._cache.enter({sample.seat: sample.longest for sample in fork.rows})
        for sample in fork.rows:
            fork._cache.copy_row(self._cache, sample.seat, sample.seat, len(sample.prompt))
            fork._sampler.enter(sample.seat, sample.prompt, sample.sample_id)
        fork.stats = replace(self.stats)
        return fork

    def prefill(self) -> Tensor:
        """All queued prompts, which have to find room together, without a token of theirs: logits [rows, vocab]."""
        logits = []
        with torch.inference_mode():
            while self._queue:
                start = time.perf_counter()
                entering = self._admit()
                assert entering, "the prompts do not fit together"
                found, flops, padding = self._pass(entering, [])
                self.rows += self._enter(entering)
                logits.append(self._of_copies(entering, found))
                self._count(start, entering, 0, flops, padding)
        return torch.cat(logits)

    def begin(self, logits: Tensor) -> list[Generation]:
        """The first tokens of a fork's rows, from the logits of `prefill`; the generations that end with them."""
        with torch.inference_mode():
            return self._choose(self.rows, logits.clone())

    def _admit(self) -> list[Copies]:
        """Prompts that enter: as many as seats, the cache and a pass have room for."""
        self._prefix = self._context.prompts.prefix
        with self._queue.lock:
            entering = self._take()
        for sample in chain(*entering):
            sample.seat = self._free.pop()
            self._sampler.enter(sample.seat, sample.prompt, sample.sample_id)
        return entering

    def _take(self) -> list[Copies]:
        """Those prompts, from the queue."""
        entering: list[Copies] = []
        tokens, free = 0, len(self._free)
        if not self._queue or (self.rows and free < min(self._seats // ENTER_TOGETHER, self._queue.samples)):
            return []
        share = max(self._queue.share, 0 if self.rows else len(self._queue.first))
        free = min(free, share - len(self.rows))
        while self._queue and len(copies := self._queue.first) <= free:
            first = copies[0]
            shared = self._prefix.shared(first.prompt)
            tokens += len(first.prompt) - shared
            if entering and tokens > PROMPT_TOKENS // self._queue.lanes:
                break
            growth = self._growth(copies, entering)
            if not self._fits(growth):
                break
            for sample in copies:
                sample.shared_prefix, sample.shares_prompt = shared, sample is not first
            self._queue.held[id(self)] = self._held + growth
            free -= len(copies)
            entering.append(self._queue.take())
        return entering

    @property
    def has_work(self) -> bool:
        """Rows, or room for one that waits."""
        with self._queue.lock:
            return bool(self.rows) or (len(self._queue) > 0 and self._fits(self._growth(self._queue.first, [])))

    @property
    def _held(self) -> int:
        """Of the cache, by the rows that run here or enter."""
        return self._queue.held.get(id(self), 0)

    def _fits(self, growth: int) -> bool:
        """Whether the cache has room for so many bytes more: here, and beside what other streams hold."""
        everywhere = sum(self._queue.held.values())
        if self._cache_bytes is None or not growth or not everywhere:
            return True
        here = not self._held or self._held + growth <= self._cache_bytes
        return here and everywhere + growth <= self._cache_bytes * self._queue.lanes

    def _growth(self, copies: Copies, entering: Sequence[Copies]) -> int:
        """Bytes that the cache takes for them once these have entered, as long as they can get."""
        longest = copies[0].longest
        before = sum(len(each) for each in entering if slots_for(each[0].longest) == slots_for(longest))
        return self._cache.growth(longest, len(copies), before)

    def _pass(self, entering: Sequence[Copies], running: Sequence[Sample]) -> tuple[Tensor, int, int]:
        """Logits [prompts + running, vocab] of a pass, FLOPs of its decode tokens, and those computed for nobody."""
        schedule, context = self._ledger.schedule, self._context
        newest, flops = [], 0
        for sample in running:
            plateau = schedule.plateau_at(sample.step)
            newest.append(NewestToken(sample.tokens[-1], sample.length - 1, plateau, sample.seat))
            flops += self._ledger.plateaus[plateau].tokens(sample.length, sample.length)
            self._retire(sample, plateau)
        # Now that nobody leaves before the pass: rows that enter stand after the others.
        self._cache.enter({row.seat: row.longest for row, *_ in entering})
        prompts = [EnteringPrompt(row.prompt, row.shared_prefix, row.seat) for row, *_ in entering]
        one = self._kind_of_pass(
            context.prompts, context.compiled, self._plans, self._cache, prompts, newest, self._prefix
        )
        x = self._run(one)
        self.held_bytes = self._cache.bytes
        exact, ours = self._decoder.logits, context.compiled.head(schedule, self._decoder)
        if schedule.head_preview is None or not running:
            return exact(x), flops, one.padding
        parts = ([exact(x[: one.last])] if entering else []) + [ours(x[one.last :])]
        return torch.cat(parts), flops, one.padding

    def _run(self, one: OnePass) -> Tensor:
        """Hidden states of a pass."""
        return one.run()

    def _retire(self, sample: Sample, plateau: int) -> None:
        """Give back a row's keys and values in layers where it attends no more."""
        for span, last in enumerate(self._plans.retirements):
            if plateau >= last:
                self._cache.give_back(sample.seat, span)

    def _enter(self, entering: Sequence[Copies]) -> list[Sample]:
        """Rows whose prompts have run: copies get the same keys and values."""
        for first, *others in entering:
            self._retire(first, 0)
            self._cache.enter({sample.seat: sample.longest for sample in others})
            for sample in others:
                self._retire(sample, 0)
                self._cache.copy_row(self._cache, first.seat, sample.seat, len(first.prompt))
        return list(chain(*entering))

    @staticmethod
    def _of_copies(entering: Sequence[Copies], logits: Tensor) -> Tensor:
        """Logits [rows, vocab], from those of each prompt that enters and each row that runs."""
        if all(len(copies) == 1 for copies in entering):
            return logits
        counts = [len(copies) for copies in entering] + [1] * (len(logits) - len(entering))
        return logits.repeat_interleave(torch.tensor(counts, device=logits.device), 0, output_size=sum(counts))

    def _choose(self, rows: Sequence[Sample], logits: Tensor) -> list[Generation]:
        """Take rows on by a token, from logits [rows, vocab], which are overwritten; those that ended by it."""
        steps = [len(sample.tokens) for sample in rows]
        tokens = self._sampler.choose(logits, [sample.seat for sample in rows], steps).tolist()
        if NO_TOKEN in tokens:
            raise FloatingPointError(NOT_NUMBERS)
        self.rows, done = [], []
        for sample, token in zip(rows, tokens, strict=True):
            sample.tokens.append(token)
            sample.ended = self._context.stopping.ends(sample.tokens)
            self.stats.generated_tokens += 1
            if sample.finished:
                self._cache.leave(sample.seat)
                self._free.append(sample.seat)
                self.stats.samples += 1
                done.append(self._generation(sample))
            else:
                self.rows.append(sample)
        self._queue.after_pass(id(self), self._cache.bytes, len(done))
        self.rows.sort(key=lambda sample: self._ledger.schedule.plateau_at(sample.step))
        return done

    def _generation(self, sample: Sample) -> Generation:
        return generation_of(sample, self._context.stopping, self._ledger)

    def _count(self, start: float, entering: Sequence[Copies], running: int, flops: int, padding: int) -> None:
        """Add a pass to the stats."""
        prompt_flops = sum(self._ledger.prompt(len(row.prompt), row.shared_prefix) for row, *_ in entering)
        seconds = time.perf_counter() - start
        share = prompt_flops / (prompt_flops + flops)
        self.stats += BatchStats(
            prompt_tokens=sum(len(row.prompt) - row.shared_prefix for row, *_ in entering),
            steps=1,
            live_rows=sum(map(len, entering)) + running,
            seats=self._seats,
            flops_padding=padding,
            cache_course=(self.held_bytes,),
            prefill_seconds=share * seconds,
            decode_seconds=(1 - share) * seconds,
        )
