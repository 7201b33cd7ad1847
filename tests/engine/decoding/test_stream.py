"""Rows come and go at any step, and what each of them says is its own affair."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import BatchStats, Decoding, Engine, Generation, PromptError, Sampling, Schedule
from engine.decoding.stream import ORDERED_TOGETHER
from engine.forward import cache
from engine.schedules import recipes
from tests.engine.models.test_families import LAYERS, VARIANTS
from tests.engine.prompts import random_prompts, sharing

Schedules = Callable[..., st.SearchStrategy[Schedule]]
LENGTHS = [1, 2, 3, 5, 9, 14, 20, 33, 41, 60]
ROWS = 10_000  # of a stream without end


@pytest.fixture(scope="module")
def load(make_checkpoint: Callable[..., Path]) -> Callable[[str], Engine]:
    loaded: dict[str, Engine] = {}

    def load_variant(name: str) -> Engine:
        if name not in loaded:
            ends: dict[str, Any] = {"eos": [3, 19, 35], **VARIANTS[name]}
            loaded[name] = Engine.load(str(make_checkpoint(**ends)), device="cpu")
        return loaded[name]

    return load_variant


@pytest.fixture(scope="module")
def tiny(load: Callable[[str], Engine]) -> Engine:
    return load("llama" if "llama" in VARIANTS else next(iter(VARIANTS)))


def generations(stream: Decoding, prompts: list[list[int]], arrivals: list[tuple[int, int]]) -> list[Generation]:
    """Of rows that enter one after another, (prompt, passes until the next one)."""
    found = []
    for index, passes in arrivals:
        stream.add(prompts[index], f"row {index}", index)
        for _ in range(passes):
            found += stream.step()
    while stream.unfinished:
        found += stream.step()
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=6)
@given(
    data=st.data(),
    arrivals=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=10, unique_by=lambda a: a[0]
    ),
    batch_size=st.integers(1, 8),
    temperature=st.sampled_from([0.0, 1.2]),
    copies=st.integers(1, 3),
    shared=st.booleans(),
)
def test_a_sample_does_not_depend_on_when_it_enters_nor_beside_whom(
    load: Callable[[str], Engine],
    schedules: Schedules,
    variant: str,
    data: st.DataObject,
    arrivals: list[tuple[int, int]],
    batch_size: int,
    temperature: float,
    copies: int,
    shared: bool,
) -> None:
    """Prompts are added in any order, after any number of passes; each equals a call of its own."""
    engine = load(variant)
    schedule = data.draw(schedules(LAYERS, engine.shape.hidden, engine.shape, engine.decoder))
    sampling = Sampling(max_new_tokens=14, temperature=temperature, samples_per_prompt=copies, repetition_penalty=1.1)
    prefix, *rests = random_prompts([6, *LENGTHS])
    prompts = [prefix + rest if index % 2 else rest for index, rest in enumerate(rests)]
    with sharing(engine, prefix if shared else ()):
        stream = engine.decoding(sampling, schedule, batch_size)
        found = generations(stream, prompts, arrivals)
        assert len(found) == len(arrivals) * copies
        for index, _ in arrivals:
            ours = sorted((g for g in found if g.index == index), key=lambda g: g.sample)
            alone = sorted(
                engine.generate([prompts[index]], sampling, schedule, 1, [f"row {index}"]), key=lambda g: g.sample
            )
            assert [g.tokens for g in ours] == [g.tokens for g in alone]
            assert [g.flops_decode for g in ours] == [g.flops_decode for g in alone]


def endless(lengths: list[int]) -> Iterator[list[int]]:
    seed = 0
    while True:
        yield from random_prompts(lengths, seed)
        seed += 1


def test_a_stream_without_end_runs_in_flat_memory_with_its_seats_taken(tiny: Engine) -> None:
    schedule = recipes.skipdecode(tiny.shape.layers, 1, tiny.shape.layers, 2, horizon=6)
    stats: list[BatchStats] = []
    taken = 0

    def counted() -> Iterator[list[int]]:
        nonlocal taken
        for prompt in endless(LENGTHS):
            taken += 1
            yield prompt

    found = list(islice(tiny.generate(counted(), Sampling(12), schedule, 32, on_batch=stats.append), ROWS))
    assert taken <= ROWS + 32 * (ORDERED_TOGETHER + 1), "prompts are taken when room for them comes near"
    course = [size for each in stats for size in each.cache_course]
    assert max(course[len(course) // 2 :]) <= 1.5 * max(course[: len(course) // 2])
    whole = sum(stats, BatchStats())
    assert whole.occupancy > 0.9, "a quarter of a lane's seats is free before rows enter"
    prompts = list(islice(endless(LENGTHS), taken))
    for generation in found[:: ROWS // 200]:
        [alone] = tiny.generate([prompts[generation.index]], Sampling(12), schedule, 1)
        assert generation.tokens == alone.tokens


def test_no_prompt_waits_for_more_than_a_few_batches(tiny: Engine) -> None:
    """Long ones go first, but not for ever."""
    lengths = [2] + [40] * 100
    order = [g.index for g in tiny.generate(random_prompts(lengths), Sampling(4, min_new_tokens=4), None, 4)]
    assert order.index(0) < 4 * (ORDERED_TOGETHER + 1)


def test_a_bad_prompt_is_refused_alone(tiny: Engine) -> None:
    stream = tiny.decoding(Sampling(5), batch_size=2)
    stream.add([5, 6], "a", 0)
    with pytest.raises(PromptError, match="prompt 1 is empty"):
        stream.add([], "b", 1)
    with pytest.raises(PromptError, match="the context is"):
        stream.add([7] * tiny.shape.context, "c", 2)
    assert stream.unfinished == 1
    found = stream.step()
    while stream.unfinished:
        found += stream.step()
    assert [g.index for g in found] == [0]
    assert stream.step() == []


@pytest.mark.parametrize("samples", [1, 4])
def test_rows_that_do_not_fit_the_memory_wait_for_those_that_run(
    tiny: Engine, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "SPARE_BYTES", 0)
    prompts = random_prompts([9] * 12)
    sampling = Sampling(10, temperature=1.0, samples_per_prompt=samples)
    wanted = {(g.index, g.sample): g.tokens for g in tiny.generate(prompts, sampling)}
    stream: Any = tiny.decoding(sampling, batch_size=12)
    stream._cache_bytes = 3 * row_bytes(tiny.decoding(sampling, batch_size=1), prompts[0])
    for index, prompt in enumerate(prompts):
        stream.add(prompt, str(index), index)
    found = {}
    while stream.unfinished:
        found |= {(g.index, g.sample): g.tokens for g in stream.step()}
        assert stream.stats.live_rows <= 3 * stream.stats.steps
    assert found == wanted


def row_bytes(stream: Any, prompt: list[int]) -> Any:
    stream.add(prompt, "0", 0)
    return stream._growth(stream._queue.waiting[0][:1], [])


@pytest.mark.parametrize("budget", [16, 100, 300])
def test_a_cache_holds_what_it_may_though_blocks_are_larger_than_their_rows(tiny: Engine, budget: int) -> None:
    """Rows of many sizes, at a budget of so many of the smallest: at times a block is one for a row that runs alone."""
    prompts = random_prompts([9, 60, 200, 100, 400] * 12)
    wanted = {g.index: g.tokens for g in tiny.generate(prompts, Sampling(10), None, 1)}
    stream: Any = tiny.decoding(Sampling(10), batch_size=40)
    row = stream._decoder.shape.layers * stream._decoder.shape.cache_elements(cache.LEAST_SLOTS) * 4
    stream._cache_bytes = budget * row
    for index, prompt in enumerate(prompts):
        stream.add(prompt, str(index), index)
    found = {}
    while stream.unfinished:
        found |= {g.index: g.tokens for g in stream.step()}
        blocks = [block for blocks in stream._cache._blocks for block in blocks.values()]
        assert stream.held_bytes <= budget * row or len({block.layer(0).shape[-2] for block in blocks}) <= 1
    assert found == wanted
