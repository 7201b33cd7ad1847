"""In vLLM every family gives our own engine's tokens: at full depth, and under schedules with all that they bring."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine import BatchStats, Engine, Generation, Sampling, Schedule
from engine.errors import PromptError, ScheduleError
from engine.forward.ledger import Ledger
from tests.engine.conftest import random_prompt_bridge
from tests.engine.prompts import random_prompts

pytest.importorskip("vllm.config", exc_type=ImportError)

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from engine.vllm.models import Skipping
from tests.engine.vllm.both_engines import LAYERS, LENGTHS, VARIANTS, WIDTH, Pair, generations, pair, schedule, whole

EXAMPLES = int(os.environ.get("SKIPDECODE_VLLM_EXAMPLES", "2"))  # of schedules; vLLM starts anew for each
SAMPLING = Sampling(max_new_tokens=14)

pytestmark = pytest.mark.usefixtures("ahead")


@pytest.fixture(scope="module")
def llama(make_checkpoint: Callable[..., Path]) -> Iterator[Pair]:
    """Ends a text with any of four tokens, so that rows leave at different steps."""
    both = pair(make_checkpoint(**VARIANTS["llama"], eos=[3, 35, 51, 83]))
    yield both
    both[1].close()


@pytest.fixture(scope="module", params=VARIANTS)
def family(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path]) -> Iterator[Pair]:
    both = pair(make_checkpoint(**VARIANTS[request.param]))
    yield both
    both[1].close()


def test_a_family_gives_our_own_engines_tokens(family: Pair) -> None:
    own, vllm = family
    prompts, under = random_prompts(LENGTHS), whole(own)
    assert generations(vllm, prompts, SAMPLING, under) == generations(own, prompts, SAMPLING, under)
    # Beside the schedule, in the same engine.
    assert generations(vllm, prompts, SAMPLING) == generations(own, prompts, SAMPLING)


def test_any_schedule_and_batch_with_rows_that_enter_at_any_step(
    family: Pair, schedules: Callable[..., st.SearchStrategy[Schedule]]
) -> None:
    own, vllm = family

    @settings(max_examples=EXAMPLES)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        under = data.draw(schedules(LAYERS, WIDTH, own.shape, own.decoder))
        seats = data.draw(st.integers(1, 64))  # more than a pass takes tokens, too
        prompts = random_prompts(data.draw(st.lists(st.integers(1, 64), min_size=1, max_size=80)))
        shared = data.draw(st.integers(0, 70))
        prefix = random_prompts([shared], seed=9)[0] if shared else []
        prompts = [[*prefix, *prompt] if data.draw(st.booleans()) else prompt for prompt in prompts]
        assert vllm.share_prefix(prefix) == own.share_prefix(prefix)
        entering = data.draw(st.lists(st.integers(1, 40), min_size=1))  # rows between passes, the last again and again
        rows, left, found = vllm.decoding(SAMPLING, under, seats), list(enumerate(prompts)), list[Generation]()
        while left or rows.unfinished:
            count = entering.pop(0) if len(entering) > 1 else entering[0]
            for index, prompt in left[:count]:
                rows.add(prompt, str(index), index)
            left = left[count:]
            found += rows.step()
        assert sorted(found, key=lambda each: each.index) == generations(own, prompts, SAMPLING, under)

    run()
    for engine in family:
        engine.share_prefix([])


def test_prompts_run_at_full_depth_where_there_is_no_prompt_bridge(llama: Pair) -> None:
    own, vllm = llama
    prompts = random_prompts(LENGTHS, seed=1)
    assert generations(vllm, prompts, SAMPLING, schedule()) == generations(own, prompts, SAMPLING, schedule())


def test_prompts_are_adapted_and_skip_what_decoding_runs_beside_rows_at_full_depth(llama: Pair) -> None:
    """Both kinds of rows share passes."""
    own, vllm = llama
    under, prompts = whole(own), random_prompts(LENGTHS, seed=6)
    assert under.adapter is not None
    adapter, bridge = replace(under.adapter, changes_prompts=True), random_prompt_bridge(own.shape, 3, kept=range(1, 3))
    under = replace(under, adapter=adapter, prompt_bridge=bridge)
    wanted = generations(own, prompts, SAMPLING, under)
    assert generations(vllm, prompts, SAMPLING, under) == wanted
    assert [each.tokens for each in wanted] != [each.tokens for each in generations(own, prompts, SAMPLING, whole(own))]
    scheduled, full = vllm.decoding(SAMPLING, under, 4), vllm.decoding(SAMPLING, None, 4)
    found: dict[bool, list[Generation]] = {True: [], False: []}
    for index, prompt in enumerate(prompts):
        for rows in (scheduled, full):
            rows.add(prompt, str(index), index)
    while scheduled.unfinished or full.unfinished:
        found[True] += scheduled.step()
        found[False] += full.step()
    for is_scheduled, expected in ((True, wanted), (False, generations(own, prompts, SAMPLING))):
        assert sorted(found[is_scheduled], key=lambda each: each.index) == expected


def too_far(own: Engine, under: Schedule, rows: Sequence[Generation]) -> int:
    """FLOPs of the passes that were prepared before these rows were known to have ended."""
    ledger = Ledger(own.shape, under)
    early = [(each.prompt_tokens, each.generated_tokens) for each in rows if each.finish_reason != "length"]
    return sum(ledger.decode(prompt, tokens + 1) - ledger.decode(prompt, tokens) for prompt, tokens in early)


def test_passes_are_prepared_ahead(llama: Pair) -> None:
    """What that computes too much is told beside the ledger: a token of each row that ends before its limit."""
    own, vllm = llama
    vllm.close()  # it has kept prompts
    decoding, prompts = vllm.decoding(SAMPLING, schedule(), 4), random_prompts(LENGTHS)
    assert vllm._running is not None
    assert isinstance(vllm._running.scheduler, AsyncScheduler)
    schedule_pass, taken = vllm._running.scheduler.schedule, list[int]()

    def noted(*how: Any) -> Any:
        found = schedule_pass(*how)
        taken.append(found.total_num_scheduled_tokens)
        return found

    vllm._running.scheduler.schedule = noted
    for index, prompt in enumerate(prompts):
        decoding.add(prompt, str(index), index)
    found: list[Generation] = []
    while decoding.unfinished:
        found += decoding.step()
    early = [each for each in found if each.finish_reason != "length"]
    assert 0 < len(early) < len(found)
    assert sum(taken) == sum(each.prompt_tokens + each.generated_tokens - 1 for each in found) + len(early)
    assert decoding.take_stats().flops_padding == too_far(own, schedule(), found)


@pytest.mark.parametrize("adapts_prompts", [False, True])
def test_what_prompts_share_is_as_at_full_depth_and_told_where_it_is_computed_again(
    llama: Pair, adapts_prompts: bool
) -> None:
    """In blocks of 32 tokens the first 32 of 50 are found, by rows of the same pass too."""
    own, vllm = llama
    (prefix,), others = random_prompts((50,), seed=7), random_prompts(LENGTHS, seed=8)
    prompts = [[*prefix, *other] if at != 4 else other for at, other in enumerate(others)]
    under = whole(own)
    assert under.adapter is not None
    under = replace(under, adapter=replace(under.adapter, changes_prompts=adapts_prompts))
    apart = generations(own, prompts, SAMPLING, under)
    flops = own.share_prefix(prefix)
    try:
        assert vllm.share_prefix(prefix) == flops
        wanted = generations(own, prompts, SAMPLING, under)
        stats = list[BatchStats]()
        found = list(vllm.generate(prompts, SAMPLING, under, 4, on_batch=stats.append))
        assert sorted(found, key=lambda each: each.index) == wanted
        assert [each.tokens for each in wanted] != [each.tokens for each in apart]
        rows = len(prompts) - 1
        ledger = Ledger(own.shape, Schedule.full_depth(LAYERS))
        again = ledger.prefix(50) - ledger.prefix(32)
        # The first row has computed it for all.
        assert sum(each.flops_padding for each in stats) == (rows - 1) * again + too_far(own, under, found)
        stats.clear()
        pairs = list(
            vllm.generate(prompts[:1], replace(SAMPLING, samples_per_prompt=2), under, 4, on_batch=stats.append)
        )
        assert len(pairs) == 2
        found_of_prompt = (len(prompts[0]) - 1) // 32 * 32  # as whole blocks, by both
        whole_prompt = Ledger(own.shape, under).prompt(len(prompts[0]), max(50, found_of_prompt))
        not_found = 2 * max(0, ledger.prefix(50) - ledger.prefix(found_of_prompt))
        assert sum(each.flops_padding for each in stats) == whole_prompt + not_found + too_far(own, under, pairs)
        assert generations(vllm, prompts, SAMPLING) == generations(own, prompts, SAMPLING)
    finally:
        for engine in llama:
            engine.share_prefix([])
    assert generations(vllm, prompts, SAMPLING, under) == apart


@pytest.mark.parametrize("prefix", [[5, 96, 6], [5, -1], [3] * 4096, []])
def test_what_no_prompt_can_begin_with_is_shared_by_neither_engine(llama: Pair, prefix: list[int]) -> None:
    for engine in llama:
        assert engine.share_prefix([5, 6]) > 0
        assert engine.share_prefix(prefix) == 0


def test_passes_of_decode_tokens_alone_write_nothing_for_prompts(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a kernel that is given no tokens fails."""
    own, vllm = llama
    under = replace(schedule(), prompt_bridge=random_prompt_bridge(own.shape, 3, kept=range(1, 3)))
    written, write = list[int](), Skipping._write

    def noted(model: Skipping, layer: int, states: Tensor, *where: Any) -> None:
        written.append(len(states))
        write(model, layer, states, *where)

    monkeypatch.setattr(Skipping, "_write", noted)
    assert max(each.generated_tokens for each in generations(vllm, random_prompts(LENGTHS), SAMPLING, under)) > 1
    assert written
    assert min(written) > 0


def test_a_prompt_may_begin_with_another_and_its_answer(llama: Pair) -> None:
    """Blocks of the cache hold 32 tokens: the answers' are full, and empty where layers were skipped."""
    own, vllm = llama
    sampling, prompts = Sampling(max_new_tokens=40, min_new_tokens=40), random_prompts((40, 50, 33))
    for _ in range(2):
        answers = generations(vllm, prompts, sampling, schedule())
        assert answers == generations(own, prompts, sampling, schedule())
        prompts = [[*prompts[each.index], *each.tokens[:-1], 7] for each in answers]
        sampling = replace(sampling, max_new_tokens=20, min_new_tokens=20)


def test_rows_choose_their_tokens_as_in_our_own_engine(llama: Pair) -> None:
    own, vllm = llama
    drawn = Sampling(
        max_new_tokens=12, min_new_tokens=4, temperature=0.9, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.2,
        samples_per_prompt=2, seed=5,
    )  # fmt: skip
    prompts, ids = random_prompts(LENGTHS, seed=2), [f"row {index}" for index in range(len(LENGTHS))]
    found = sorted(vllm.generate(prompts, drawn, schedule(), 4, ids), key=lambda each: (each.index, each.sample))
    wanted = sorted(own.generate(prompts, drawn, schedule(), 4, ids), key=lambda each: (each.index, each.sample))
    assert [each.tokens for each in found] == [each.tokens for each in wanted]


def test_stop_strings_end_a_text_as_in_our_own_engine(llama: Pair) -> None:
    own, vllm = llama
    prompts = random_prompts(LENGTHS, seed=3)
    texts = [each.text for each in generations(own, prompts, SAMPLING, schedule())]
    stops = tuple(text[3:5] for text in texts[:3] if len(text) > 5 and text.isascii())
    assert stops
    sampling = replace(SAMPLING, stop=stops)
    assert generations(vllm, prompts, sampling, schedule()) == generations(own, prompts, sampling, schedule())


def test_a_preempted_row_goes_on_as_if_nothing_had_been(make_checkpoint: Callable[..., Path]) -> None:
    """What is computed again is told beside the ledger."""
    own, vllm = pair(make_checkpoint(**VARIANTS["llama"]), num_gpu_blocks_override=8)
    sampling = Sampling(max_new_tokens=60, min_new_tokens=60)
    prompts = random_prompts((40, 50, 33, 20, 45, 61))
    stats = BatchStats()

    def add(more: BatchStats) -> None:
        nonlocal stats
        stats += more

    try:
        found = sorted(vllm.generate(prompts, sampling, schedule(), 4, on_batch=add), key=lambda each: each.index)
        assert found == generations(own, prompts, sampling, schedule())
        block = 32 * own.shape.layers * 4 * own.shape.cache_elements(1)  # tokens, layers, bytes
        assert 4 * block < stats.cache_bytes <= 8 * block
    finally:
        vllm.close()
    assert stats.preemptions > 0
    assert 0.3 < stats.live_rows / stats.seats < 0.95, "rows that wait for room are in no seat"
    # At least a prompt's worth each time.
    assert stats.flops_padding >= stats.preemptions * found[3].flops_prompt / 2


def test_what_cannot_be_done_is_said_before_anything_runs(llama: Pair) -> None:
    _, vllm = llama
    with pytest.raises(PromptError, match="prompt 1 is empty"):
        list(vllm.generate([[5], []], SAMPLING))
    with pytest.raises(ScheduleError, match="is for a model of 4 layers"):
        list(vllm.generate([[5]], SAMPLING, Schedule.full_depth(4)))
