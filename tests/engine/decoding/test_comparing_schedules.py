"""Comparing schedules cheaply gives what running each of them alone gives."""

from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine import BatchStats, Engine, Generation, PromptError, Sampling, Schedule, ScheduleError, kernels, memory
from engine.schedules import decays, orders, recipes
from tests.engine.conftest import THREE_FAMILIES
from tests.engine.prompts import random_prompts
from tests.engine.tapped import tapped

Schedules = Callable[..., st.SearchStrategy[Schedule]]
LAYERS = 5
NO_SCHEDULE = recipes.skipdecode(LAYERS, warmup=1, max_active=5, min_active=5, horizon=1)


@pytest.fixture(scope="module", params=THREE_FAMILIES)
def tiny(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path]) -> Iterator[Engine]:
    directory = make_checkpoint(num_hidden_layers=LAYERS, eos=[3, 19, 35], **THREE_FAMILIES[request.param])
    with pytest.MonkeyPatch.context() as patch:
        # In 8-bit integers a last bit of a state may move the rough logits of head previews by a hundredth.
        patch.setattr(kernels, "_integers_are_exact", lambda: False)
        yield Engine.load(str(directory), device="cpu")


@settings(max_examples=8)
@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=7),
    batch_size=st.integers(1, 7),
    temperature=st.sampled_from([0.0, 1.5]),
    copies=st.integers(1, 2),
)
def test_one_prompt_pass_for_all_schedules_gives_what_a_call_for_each_gives(
    tiny: Engine,
    schedules: Schedules,
    data: st.DataObject,
    lengths: list[int],
    batch_size: int,
    temperature: float,
    copies: int,
) -> None:
    several = [
        None,
        *data.draw(st.lists(schedules(LAYERS, 32, adaptable=tiny.decoder, previews=True), min_size=1, max_size=3)),
    ]
    sampling = Sampling(
        max_new_tokens=14, temperature=temperature, repetition_penalty=1.2, samples_per_prompt=copies, seed=5
    )
    prompts = random_prompts(lengths, seed=sum(lengths))
    stats: list[tuple[int, BatchStats]] = []
    together = list(
        tiny.generate_each(prompts, sampling, several, batch_size, on_batch=lambda *batch: stats.append(batch))
    )
    place = attrgetter("index", "sample")
    batch_size = max(batch_size, copies)  # fewer, and samples of a prompt would not share its pass
    for index, schedule in enumerate(several):
        alone = sorted(tiny.generate(prompts, sampling, schedule, batch_size), key=place)
        assert sorted((generation for which, generation in together if which == index), key=place) == alone
        mine = sum((batch for which, batch in stats if which == index), BatchStats())
        assert mine.samples == len(alone)
        assert mine.generated_tokens == sum(generation.generated_tokens for generation in alone)
        assert mine.prompt_tokens == sum(lengths)


def test_rows_that_do_not_fit_twice_run_in_smaller_batches(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is in the cache that the prompts have filled and in a schedule's copy of it."""
    prompts, sampling, schedules = random_prompts([9, 4, 7, 3, 5], seed=3), Sampling(max_new_tokens=6), [None, None]
    seats: list[int] = []

    def run(fitting: int) -> list[tuple[int, Generation]]:
        sizes = (tiny.shape, fitting, 9, 6, 4)
        needed = memory.cache_peak(*sizes) + memory.batch_bytes(sizes[0], Schedule.full_depth(LAYERS), *sizes[1:])
        monkeypatch.setattr("engine.engine.free_bytes", lambda _: int(needed / memory.SHARE) + 1)
        seats.clear()
        told = tiny.generate_each(
            prompts, sampling, schedules, 5, on_batch=lambda _, stats: seats.append(stats.samples)
        )
        return sorted(told, key=lambda pair: (pair[0], pair[1].index))

    whole = run(fitting=100)
    assert seats == [5, 5]
    assert run(fitting=2) == whole
    assert seats == [2, 2, 2, 2, 1, 1]


def logits_of(
    engine: Engine, prompts: list[list[int]], answers: list[list[int]], schedule: Schedule
) -> list[list[Tensor]]:
    """[prompt][step]: in cached decoding under a schedule that is made to write the given answers."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with tapped({"0": answer}) as logits:
            list(engine.generate([prompt], Sampling(max_new_tokens=len(answer)), schedule))
        found.append(logits["0"])
    return found


@settings(max_examples=12)
@given(data=st.data(), lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5), seed=st.integers(0, 100))
def test_a_score_compares_the_logits_of_cached_decoding(
    tiny: Engine, schedules: Schedules, data: st.DataObject, lengths: list[int], seed: int
) -> None:
    schedule = data.draw(schedules(LAYERS, 32, adaptable=tiny.decoder, previews=True))
    prompts = random_prompts(lengths, seed)
    answers = [list(g.tokens) for prompt in prompts for g in tiny.generate([prompt], Sampling(max_new_tokens=14))]
    full, scheduled = (logits_of(tiny, prompts, answers, each) for each in (NO_SCHEDULE, schedule))
    (scores,) = tiny.score(prompts, answers, [schedule]).schedules
    for answer, expected, ours, score in zip(answers, full, scheduled, scores, strict=True):
        assert len(score.kl) == len(score.agrees) == len(answer) - 1
        for step, (kl, agrees) in enumerate(zip(score.kl, score.agrees, strict=True)):
            p, q = expected[step + 1].log_softmax(-1), ours[step + 1].log_softmax(-1)
            assert kl == pytest.approx(float((p.exp() * (p - q)).sum()), abs=1e-4, rel=1e-4)
            assert agrees == bool(p.argmax() == q.argmax())


def test_full_depth_scores_itself_perfectly_and_worse_schedules_worse(packaged: Engine, chats: list[list[int]]) -> None:
    prompts = sorted(chats, key=len)[::25]
    found = sorted(packaged.generate(prompts, Sampling(max_new_tokens=12)), key=lambda generation: generation.index)
    answers = [generation.tokens for generation in found]
    four, twelve = (
        Schedule.build(30, orders.lowest_first(30, 4), decays.constant(floor), horizon=0) for floor in (4, 12)
    )
    scores = packaged.score(prompts, answers, [Schedule.full_depth(30), four, twelve]).schedules
    kl = [sum(sum(score.kl) for score in row) / sum(len(score.kl) for score in row) for row in scores]
    agreement = [sum(sum(score.agrees) for score in row) / sum(len(score.kl) for score in row) for row in scores]
    assert kl[0] < 1e-4 < 0.05 < kl[1] < 0.6 < 2 < kl[2]
    assert agreement[0] == 1.0 > agreement[1] > 0.6 > 0.4 > agreement[2]


def test_an_answer_without_decode_steps_has_no_score(tiny: Engine) -> None:
    [[one, several, none]] = tiny.score([[5], [6, 7], [8]], [[9], [9, 9, 9], []], [NO_SCHEDULE]).schedules
    assert (one.kl, one.agrees, none.kl) == ((), (), ())
    assert len(several.kl) == 2


def test_what_cannot_be_compared_is_said_before_anything_runs(tiny: Engine) -> None:
    with pytest.raises(ScheduleError, match="is for a model of 7 layers"):
        tiny.generate_each([[1]], None, [None, Schedule.full_depth(7)])
    with pytest.raises(ScheduleError, match="is for a model of 7 layers"):
        tiny.score([[1]], [[1, 2]], [Schedule.full_depth(7)])
    with pytest.raises(PromptError, match="empty"):
        tiny.score([[]], [[1, 2]], [NO_SCHEDULE])
