"""One engine for several threads: calls that ask for the same share a stream of rows, which need not drain between."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Literal, NamedTuple

from engine import (
    BatchStats,
    Decoding,
    Engine,
    Generation,
    ModelError,
    Sampling,
    Schedule,
    ScheduleError,
    Scores,
    StreamLost,
)
from engine.decoding import feeding
from engine.vllm.engine import VllmEngine  # which needs no vLLM before there is one

WAITING = 5  # times as many rows as decode together are with the engine, so that it can put prompts in order of length

Streaming = Engine | VllmEngine  # rows can be given to it at any time


class _Terms(NamedTuple):
    """What calls have to agree in to share a stream."""

    sampling: Sampling
    schedule: Schedule | None
    batch_size: int


@dataclass(eq=False)
class _Call:
    """A call of `generate`. Only the engine's thread touches it, but for `told`."""

    prompts: Sequence[Sequence[int]]
    sample_ids: Sequence[str]
    told: SimpleQueue[Generation | BatchStats | Exception | None] = field(default_factory=SimpleQueue)  # None: all done
    taken: int = 0  # prompts, from the first on
    left: set[tuple[int, int]] = field(default_factory=set)  # of those, place and sample of what has no generation
    wanted: bool = True  # by its caller

    @property
    def waits(self) -> bool:
        """For prompts to be taken."""
        return self.wanted and self.taken < len(self.prompts)

    def take(self, samples: int) -> int:
        """The place of the next prompt, of which so many samples are generated from now on."""
        place, self.taken = self.taken, self.taken + 1
        self.left.update((place, sample) for sample in range(samples))
        return place

    def tell(self, done: Sequence[Generation], stats: BatchStats) -> None:
        for generation in done:
            self.told.put(generation)
        self.told.put(stats)


class _Shared:
    """A stream and the calls whose rows are in it or wait for it."""

    def __init__(self, decoding: Decoding, terms: _Terms) -> None:
        self.terms, self.decoding = terms, decoding
        self.calls: list[_Call] = []  # in the order of their coming, in which their prompts are taken
        self._whose: dict[tuple[int, int], tuple[_Call, int]] = {}  # by row in the stream and sample: call, place there
        self._rows = 0  # so far
        self._told_at = time.monotonic()

    def step(self) -> bool:
        """A pass; whether there is more to do. What it raises may be of any call."""
        for call in self.calls:
            while call.waits and self.decoding.unfinished < WAITING * self.terms.batch_size:
                self._add(call)
        done: dict[_Call, list[Generation]] = {}
        for generation in self.decoding.step() if self.decoding.unfinished else []:
            call, place = self._whose.pop((generation.index, generation.sample))
            call.left.remove((place, generation.sample))
            done.setdefault(call, []).append(replace(generation, index=place))
        to_tell = list(done)
        if time.monotonic() - self._told_at >= feeding.ALIVE_S:
            to_tell, self._told_at = self.calls, time.monotonic()
        stats = self.decoding.take_stats() if to_tell else BatchStats()
        for call in to_tell:
            call.tell(done.get(call, []), stats)
            stats = BatchStats()  # a pass is counted once
        for call in self.calls:
            if not call.waits and not call.left:
                call.told.put(None)
        self.calls = [call for call in self.calls if call.waits or call.left]
        return bool(self.calls)

    def _add(self, call: _Call) -> None:
        samples = self.terms.sampling.samples_per_prompt
        place = call.take(samples)
        self.decoding.add(call.prompts[place], call.sample_ids[place], self._rows)
        self._whose |= {(self._rows, sample): (call, place) for sample in range(samples)}
        self._rows += 1


class SharedEngine:
    """An engine that several threads may call at once.

    All that the engine does happens in one thread, of this object's own: a pass of the shared stream, or another call.
    Rows of a call of `generate` enter the stream while those of the calls before it still run. Where sampling, schedule
    or batch size differ, the call is done whole between two passes. If the stream breaks, its calls are done so too,
    for the rows that they lack: one that breaks again raises what broke it.
    """

    def __init__(self, load: Callable[[], Streaming]) -> None:
        """Raises what `load` does."""
        self._thread = ThreadPoolExecutor(1, "engine")
        self._engine = self._thread.submit(load).result()
        self._shared: _Shared | None = None

    def begin(self, sampling: Sampling, schedule: Schedule | None, batch_size: int | Literal["auto"]) -> None:
        """Have the engine start for such calls: what it cannot do is raised now, and not for the first call's rows."""

        def opened() -> None:
            rows = self._engine.fitting_batch_size(1, sampling, schedule) if batch_size == "auto" else batch_size
            self._engine.decoding(sampling, schedule, rows).close()

        self._thread.submit(opened).result()

    def share_prefix(self, tokens: Sequence[int]) -> int:
        return self._thread.submit(self._engine.share_prefix, tokens).result()

    def fitting_batch_size(self, prompt_tokens: int, sampling: Sampling, schedule: Schedule | None) -> int:
        return self._thread.submit(self._fitting, prompt_tokens, sampling, schedule).result()

    def score(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        schedules: Sequence[Schedule] = (),
        others: Sequence[Sequence[Sequence[int]]] = (),
    ) -> Scores:
        return self._thread.submit(self._engine.score, prompts, answers, schedules, others).result()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        schedule: Schedule | None,
        batch_size: int,
        sample_ids: Sequence[str],
        on_batch: Callable[[BatchStats], None] | None = None,
    ) -> Iterator[Generation]:
        """As `Engine.generate`; `on_batch` is called in the caller's thread, at times where no row ends too. One of the
        calls that share a pass is told all that it cost, and the samples that ended in it, the others' too.
        """
        call = _Call(prompts, sample_ids)
        self._thread.submit(self._begin, call, _Terms(sampling, schedule, batch_size))
        try:
            while (told := call.told.get()) is not None:
                if isinstance(told, Exception):
                    raise told
                if isinstance(told, Generation):
                    yield told
                elif on_batch is not None:
                    on_batch(told)
        finally:
            call.wanted = False

    def _begin(self, call: _Call, terms: _Terms) -> None:
        if self._shared is not None and self._shared.terms != terms:
            self._alone(call, terms)
            return
        if self._shared is None:
            try:
                self._shared = _Shared(self._engine.decoding(*terms), terms)
            except Exception as error:
                call.told.put(error)
                return
            self._thread.submit(self._pass)
        self._shared.calls.append(call)

    def _pass(self) -> None:
        """A pass of the shared stream, and the next one after what else has been asked for in the meantime."""
        shared = self._shared
        assert shared is not None
        try:
            if shared.step():
                self._thread.submit(self._pass)
                return
            error = None
        except Exception as broken:
            # Its traceback holds the failed pass's tensors, the memory that the next try needs.
            error = broken.with_traceback(None)
        self._shared = None
        with suppress(Exception):
            shared.decoding.close()
        calls, terms = shared.calls, shared.terms
        del shared  # and its rows' cache, which is memory that the next try needs too
        for call in calls:  # none, unless the stream broke
            alike = isinstance(error, ModelError | ScheduleError)  # whatever the rows are
            if alike or (len(calls) == 1 and not isinstance(error, StreamLost)):
                call.told.put(error)
            else:
                self._alone(call, terms)

    def _alone(self, call: _Call, terms: _Terms) -> None:
        """The rows that a call lacks, in a stream of their own: with all samples of their prompts, told are those that
        it lacks.
        """
        while call.waits:
            call.take(terms.sampling.samples_per_prompt)
        places = sorted({place for place, _ in call.left}) if call.wanted else []
        prompts, ids = [call.prompts[place] for place in places], [call.sample_ids[place] for place in places]
        try:
            for generation in self._engine.generate(prompts, *terms, ids, call.told.put):
                place = places[generation.index]
                if (place, generation.sample) in call.left:
                    call.told.put(replace(generation, index=place))
            call.told.put(None)
        except Exception as error:
            call.told.put(error)

    def _fitting(self, prompt_tokens: int, sampling: Sampling, schedule: Schedule | None) -> int:
        """As the stream that it can join has it: that one takes no more rows than fit the memory it began with."""
        if self._shared is not None and self._shared.terms[:2] == (sampling, schedule):
            return self._shared.terms.batch_size
        return self._engine.fitting_batch_size(prompt_tokens, sampling, schedule)
