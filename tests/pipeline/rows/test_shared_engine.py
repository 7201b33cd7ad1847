"""Calls from several threads: each has its own rows, whoever shares the passes, and whatever breaks them."""

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from threading import Event
from time import sleep
from typing import Any

import pytest
from engine_double import Echo
from hypothesis import given
from hypothesis import strategies as st

from engine import BatchStats, Decoding, Engine, Generation, Plateau, Sampling, Schedule, StreamLost, Unit
from engine.decoding import feeding
from pipeline.rows.row_generator import Generator, RowGenerator
from pipeline.rows.shared_engine import SharedEngine

SAMPLING = Sampling(max_new_tokens=100)


@dataclass(frozen=True)
class Watched(Echo):
    """Notes the batches that it is given; raises for prompts of some lengths."""

    bad: frozenset[int] = frozenset()
    batches: list[list[int]] = field(default_factory=list)

    def before(self, prompts: Sequence[str | Sequence[int]]) -> None:
        self.batches.append([len(prompt) for prompt in prompts])
        if broken := self.bad & set(self.batches[-1]):
            raise ValueError(f"length {min(broken)}")


def ask(
    shared: SharedEngine,
    lengths: Sequence[int],
    sampling: Sampling = SAMPLING,
    on_batch: Callable[[BatchStats], None] | None = None,
) -> list[int | str]:
    """For each prompt its length as its generation tells it, or its error."""
    generator = RowGenerator(shared, sampling, None, 4)
    found = generator.generate([[65] * length for length in lengths], [str(n) for n in range(len(lengths))], on_batch)
    return [row if isinstance(row, str) else len(row.tokens) for row in found]


def at_once(echo: Watched, *asked: Callable[[SharedEngine], list[int | str]]) -> list[list[int | str]]:
    """Answers to what several threads ask of one engine before it begins with any of it."""
    shared, gate, held = SharedEngine(lambda: echo), Event(), Event()
    shared._thread.submit(lambda: (held.set(), gate.wait()))
    held.wait()  # else the queue might hold the gate itself
    with ThreadPoolExecutor(len(asked)) as threads:
        answers = [threads.submit(each, shared) for each in asked]
        while shared._thread._work_queue.qsize() < len(asked):
            sleep(0.001)
        gate.set()
        return [each.result() for each in answers]


@given(
    calls=st.lists(st.lists(st.integers(1, 40), max_size=12, unique=True), min_size=1, max_size=4),
    bad=st.frozensets(st.integers(2, 40), max_size=2),
)
def test_every_call_has_its_own_rows_and_their_errors(calls: list[list[int]], bad: frozenset[int]) -> None:
    calls = [[1, *(length for length in call if length > 1)] for call in calls]  # a good row in each
    echo = Watched(bad=bad)
    found = at_once(echo, *(partial(ask, lengths=call) for call in calls))
    assert found == [[f"ValueError: length {n}" if n in bad else n for n in call] for call in calls]


def test_rows_of_the_next_call_fill_the_seats_that_one_leaves() -> None:
    echo = Watched()
    at_once(echo, lambda shared: ask(shared, [3] * 6), lambda shared: ask(shared, [5] * 6))
    assert [sorted(set(batch)) for batch in echo.batches] in ([[3], [3, 5], [5]], [[5], [3, 5], [3]])


def test_other_terms_are_served_between_passes() -> None:
    echo, short = Watched(), Sampling(max_new_tokens=2)
    found = at_once(echo, lambda shared: ask(shared, [9] * 20), lambda shared: ask(shared, [9] * 6, short))
    assert found == [[9] * 20, [2] * 6]


def test_each_call_hears_of_its_own_rows_and_a_pass_is_counted_once() -> None:
    heard: tuple[list[BatchStats], list[BatchStats]] = [], []
    echo = Watched()
    at_once(
        echo,
        lambda shared: ask(shared, [3] * 6, on_batch=heard[0].append),
        lambda shared: ask(shared, [5] * 6, on_batch=heard[1].append),
    )
    assert [sum(stats.samples for stats in each) for each in heard] == [6, 6]
    assert [sum(stats.generated_tokens for stats in each) for each in heard] == [18, 30]
    both = [*heard[0], *heard[1]]
    assert sum(stats.prompt_tokens for stats in both) == 6 * 3 + 6 * 5
    assert sum(stats.flops_padding > 0 for stats in both) == len(echo.batches) == 3


def test_a_call_hears_of_passes_in_which_no_row_ends(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job in which nothing is heard of for too long is taken for stuck."""
    heard: list[BatchStats] = []
    sampling = Sampling(max_new_tokens=20, min_new_tokens=20)
    shared = SharedEngine(lambda: Engine.load(str(make_checkpoint()), device="cpu"))
    monkeypatch.setattr(feeding, "ALIVE_S", 0.0)
    ask(shared, [5, 7], sampling, heard.append)
    assert len(heard) >= 20
    assert [stats.samples for stats in heard if stats.samples] in ([2], [1, 1])
    assert sum(stats.steps for stats in heard) >= 19
    assert sum(stats.generated_tokens for stats in heard) == 40


def test_a_caller_that_goes_away_leaves_the_others_theirs() -> None:
    shared = SharedEngine(lambda: Watched())
    left = shared.generate([[65] * 3] * 50, SAMPLING, None, 4, [str(n) for n in range(50)])
    next(left)
    left.close()  # type: ignore[attr-defined]
    assert ask(shared, [4] * 9) == [4] * 9


def test_what_broke_is_gone_before_its_calls_are_done_again() -> None:
    """The rows of a stream have memory, which the next try needs."""
    streams: list[weakref.ref[Decoding]] = []
    alive: list[bool] = []

    @dataclass(frozen=True)
    class Recording(Watched):
        def decoding(
            self, sampling: Sampling | None = None, schedule: Schedule | None = None, batch_size: int = 32
        ) -> Decoding:
            stream = super().decoding(sampling, schedule, batch_size)
            streams.append(weakref.ref(stream))
            return stream

        def before(self, prompts: Sequence[str | Sequence[int]]) -> None:
            alive.append(bool(streams) and streams[-1]() is not None)
            super().before(prompts)

    answers = at_once(Recording(bad=frozenset([7])), partial(ask, lengths=[3, 4]), partial(ask, lengths=[7, 5]))
    assert answers[0] == [3, 4]
    assert alive[:3] == [True, False, False]


def test_rows_of_a_stream_that_was_lost_are_done_in_another_and_none_of_them_is_to_blame() -> None:
    lost: list[int] = []

    @dataclass(frozen=True)
    class Losing(Watched):
        def before(self, prompts: Sequence[str | Sequence[int]]) -> None:
            if not lost:
                lost.append(len(prompts))
                raise StreamLost("by another stream's pass")

    assert ask(SharedEngine(lambda: Losing()), [5]) == [5]
    assert lost


def breaking(engine: Engine, error: Exception, at: int | None) -> Engine:
    """The same engine, of whose passes one raises."""
    passes = 0

    class Breaking(Engine):
        def decoding(self, *terms: Any) -> Any:
            stream = super().decoding(*terms)
            step = stream.step

            def brittle() -> list[Generation]:
                nonlocal passes
                if (passes := passes + 1) == at:
                    raise error
                return step()

            stream.step = brittle  # type: ignore[method-assign]
            return stream

    engine.__class__ = Breaking
    return engine


@pytest.mark.parametrize("error", [StreamLost("by another stream's pass"), ValueError("odd"), MemoryError()])
def test_each_sample_is_heard_of_once_however_often_it_is_done(
    make_checkpoint: Callable[..., Path], error: Exception
) -> None:
    engine = breaking(Engine.load(str(make_checkpoint(num_hidden_layers=4))), error, 32)
    sampling = Sampling(max_new_tokens=12, temperature=1.0, samples_per_prompt=3)
    heard: list[BatchStats] = []
    prompts = [[1 + n, 7, 3 + n] for n in range(5)]
    generator = RowGenerator(SharedEngine(lambda: engine), sampling, None, 4)
    found = generator.generate(prompts, list(map(str, range(5))), heard.append)
    assert sum(stats.samples for stats in heard) == len(found) == 15
    written = [row.generated_tokens for row in found if isinstance(row, Generation)]
    assert sum(stats.generated_tokens for stats in heard) == sum(written)


@pytest.mark.parametrize("lost_at", [None, 1, 5])
def test_samples_of_a_prompt_share_it_and_none_is_told_twice(
    make_checkpoint: Callable[..., Path], lost_at: int | None
) -> None:
    """Also where the stream breaks when some samples of a prompt have ended and others have not."""
    engine = Engine.load(str(make_checkpoint(num_hidden_layers=4)))
    sampling = Sampling(max_new_tokens=12, temperature=1.0, samples_per_prompt=3)
    prompts = [[1 + n, 7, 3 + n] for n in range(9)]
    wanted = list(engine.generate(prompts, sampling, None, 4))
    breaking(engine, StreamLost("by another stream's pass"), lost_at)
    shared = SharedEngine(lambda: engine)
    calls = [range(5), range(5, 9)]
    with ThreadPoolExecutor(2) as threads:
        asked = [[[prompts[n] for n in call], sampling, None, 4, list(map(str, call))] for call in calls]
        found = list(threads.map(lambda terms: list(shared.generate(*terms)), asked))
    told = [(call[g.index], g.sample, g.tokens) for call, row in zip(calls, found, strict=True) for g in row]
    assert sorted(told) == sorted((g.index, g.sample, g.tokens) for g in wanted)
    assert sum(bool(g.flops_prompt) for row in found for g in row) == len(prompts)


def test_what_loading_raises_is_raised() -> None:
    def load() -> Echo:
        raise OSError("no such model")

    with pytest.raises(OSError, match="no such model"):
        SharedEngine(load)


def test_calls_that_share_passes_have_the_tokens_that_they_have_alone(make_checkpoint: Callable[..., Path]) -> None:
    """Under a schedule, with an audit's call at full depth between the passes."""
    engine = Engine.load(str(make_checkpoint(num_hidden_layers=4)))
    schedule = Schedule(4, (Unit("a", 2), Unit("m", 2)), (Plateau(0, 0), Plateau(3, 2)))
    sampling = Sampling(max_new_tokens=12)
    draw = Random(0)
    prompts = [[draw.randrange(1, 96) for _ in range(draw.randrange(2, 9))] for _ in range(15)]
    calls = [(prompts[:7], schedule), (prompts[7:12], schedule), (prompts[3:6], None)]
    ids = {tuple(prompt): str(number) for number, prompt in enumerate(prompts)}

    def answers(engine: Generator, prompts: list[list[int]], schedule: Schedule | None) -> dict[int, tuple[int, ...]]:
        names = [ids[tuple(prompt)] for prompt in prompts]
        return {row.index: row.tokens for row in engine.generate(prompts, sampling, schedule, 4, names)}

    shared = SharedEngine(lambda: engine)
    with ThreadPoolExecutor(len(calls)) as threads:
        found = list(threads.map(lambda call: answers(shared, *call), calls))
    assert found == [answers(engine, *call) for call in calls]
