"""Lanes share a batch between threads, and nothing but the clock knows of it."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import BatchStats, Engine, PromptError, Sampling, Schedule
from engine.decoding.lanes import MOST, ROWS, Lanes, lanes_for
from engine.forward import cache
from tests.engine.decoding.test_stream import LENGTHS, endless, generations
from tests.engine.models.test_families import LAYERS
from tests.engine.prompts import random_prompts, sharing

Schedules = Callable[..., st.SearchStrategy[Schedule]]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def three_threads() -> None:
    torch.set_num_threads(3)


@pytest.fixture(scope="module")
def tiny(make_checkpoint: Callable[..., Path]) -> Engine:
    return Engine.load(str(make_checkpoint(eos=[3, 19, 35])), device="cpu")


def running_lanes() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("lane")]


@settings(max_examples=12)
@given(
    data=st.data(),
    arrivals=st.lists(st.tuples(st.sampled_from(LENGTHS), st.integers(0, 3)), min_size=1, max_size=60),
    batch_size=st.integers(2 * ROWS, 4 * ROWS),
    temperature=st.sampled_from([0.0, 1.2]),
    copies=st.integers(1, 3),
    shared=st.booleans(),
)
def test_a_sample_does_not_depend_on_its_lane(
    tiny: Engine,
    schedules: Schedules,
    data: st.DataObject,
    arrivals: list[tuple[int, int]],
    batch_size: int,
    temperature: float,
    copies: int,
    shared: bool,
) -> None:
    schedule = data.draw(schedules(LAYERS, tiny.shape.hidden, tiny.shape, tiny.decoder))
    sampling = Sampling(max_new_tokens=14, temperature=temperature, samples_per_prompt=copies, repetition_penalty=1.1)
    prefix, *rests = random_prompts([6, *(length for length, _ in arrivals)])
    prompts = [prefix + rest if index % 2 else rest for index, rest in enumerate(rests)]
    with sharing(tiny, prefix if shared else ()):
        stream = tiny.decoding(sampling, schedule, batch_size)
        assert isinstance(stream, Lanes)
        found = generations(stream, prompts, list(enumerate(passes for _, passes in arrivals)))
        assert stream.step() == []
        stream.close()
        stats = stream.take_stats()
        assert (stats.samples, stats.generated_tokens) == (len(found), sum(g.generated_tokens for g in found))
        assert stats.live_rows <= stats.seats
        assert len(found) == len(arrivals) * copies
        names = [f"row {index}" for index in range(len(prompts))]
        alone = tiny.generate(prompts, sampling, schedule, copies, names)
        wanted = {(g.index, g.sample): (g.tokens, g.flops_prompt, g.flops_decode) for g in alone}
        assert {(g.index, g.sample): (g.tokens, g.flops_prompt, g.flops_decode) for g in found} == wanted


def test_lanes_are_for_cores_and_rows_enough() -> None:
    assert [lanes_for(CPU, rows, 1) for rows in (1, 16, 31, 32, 48, 640)] == [1, 1, 1, 2, 3, 3]
    assert lanes_for(CPU, 64, 20) == 3
    assert lanes_for(CPU, 64, 40) == 1, "samples of one prompt share a lane, which computes it once"
    assert lanes_for(torch.device("cuda"), 640, 1) == 1
    torch.set_num_threads(64)
    assert lanes_for(CPU, 640, 1) == MOST


def test_few_rows_are_shared_evenly(tiny: Engine) -> None:
    lanes = tiny.decoding(Sampling(40, min_new_tokens=40), None, 48)
    assert isinstance(lanes, Lanes)
    for index, prompt in enumerate(random_prompts([9] * 18)):
        lanes.add(prompt, str(index), index)
    while lanes.unfinished:
        lanes.step()
    stats = lanes.take_stats()
    lanes.close()
    assert stats.steps == 3 * 40
    assert stats.live_rows == 18 * 40


@pytest.mark.parametrize("share", [0.5, 1.5, 2.5])
def test_lanes_together_hold_no_more_than_there_is_memory_for(
    tiny: Engine, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that takes more than a lane's share enters where others leave it room, or alone."""
    monkeypatch.setattr(cache, "SPARE_BYTES", 0)
    prompts = random_prompts([9, 60] * 12)
    wanted = {g.index: g.tokens for g in tiny.generate(prompts, Sampling(10), None, 1)}
    lanes = tiny.decoding(Sampling(10), None, 48)
    assert isinstance(lanes, Lanes)
    for index, prompt in enumerate(prompts):
        lanes.add(prompt, str(index), index)
    largest = max(stream._growth(copies, []) for stream in lanes._streams[:1] for copies in stream._queue.waiting)
    for stream in lanes._streams:
        stream._cache_bytes = int(share * largest)
    found = {}
    while lanes.unfinished:
        found |= {g.index: g.tokens for g in lanes.step()}
        held = lanes._streams[0]._queue.held
        assert sum(held.values()) <= max(largest, 3 * int(share * largest))
        assert max(held.values()) <= max(largest, share * largest)
    lanes.close()
    assert found == wanted


def test_a_stream_without_end_stops_when_nobody_listens(tiny: Engine) -> None:
    stats: list[BatchStats] = []
    call = tiny.generate(endless(LENGTHS), Sampling(12), None, 48, on_batch=stats.append)
    found = list(islice(call, 1500))
    call.close()  # type: ignore[attr-defined]
    assert not running_lanes()
    prompts = list(islice(endless(LENGTHS), 2000))
    for generation in found[::100]:
        [alone] = tiny.generate([prompts[generation.index]], Sampling(12), None, 1)
        assert generation.tokens == alone.tokens
    assert sum(stats, BatchStats()).occupancy > 0.9
    course = [size for each in stats for size in each.cache_course]
    assert max(course[len(course) // 2 :]) <= 1.5 * max(course[: len(course) // 2])


def test_a_lane_that_is_done_counts_no_more(tiny: Engine) -> None:
    """Neither its memory, nor the threads that it had, which threads to come would start with."""
    lanes = tiny.decoding(Sampling(40, min_new_tokens=40), None, 48)
    assert isinstance(lanes, Lanes)
    for index, prompt in enumerate(random_prompts([9, tiny.shape.context - 3])):
        lanes.add(prompt, str(index), index)
    while lanes.unfinished:
        lanes.step()
    lanes.close()
    course = lanes.take_stats().cache_course
    assert course[-1] < max(course)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 3


def test_what_breaks_a_lane_ends_the_call_and_the_next_one_works(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts([9] * 100)
    wanted = {g.index: g.tokens for g in tiny.generate(prompts, Sampling(6), None, 48)}
    embed: Any = tiny.decoder.embed

    def fragile(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if prompts[70][4] in tokens and int(positions.max()) >= 4:
            raise RuntimeError("bad token")
        return embed(tokens, positions)  # type: ignore[no-any-return]

    with monkeypatch.context() as patched:
        patched.setattr(tiny.decoder, "embed", fragile)
        with pytest.raises(RuntimeError, match="bad token"):
            list(tiny.generate(prompts, Sampling(6), None, 48))
    assert not running_lanes()
    assert {g.index: g.tokens for g in tiny.generate(prompts, Sampling(6), None, 48)} == wanted


def test_a_bad_prompt_ends_the_call_when_it_is_taken(tiny: Engine) -> None:
    with pytest.raises(PromptError, match="prompt 40 is empty"):
        list(tiny.generate([[5, 6]] * 40 + [[]], Sampling(3), None, 48))
    assert not running_lanes()
