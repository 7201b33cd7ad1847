"""A sample's tokens are a function of its prompt, the sampling, the schedule and its id, never of its batch."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import Engine, Sampling, Schedule
from engine.schedules import recipes
from tests.engine.prompts import random_prompts

SAMPLINGS = {
    "greedy": Sampling(max_new_tokens=24),
    "greedy, penalised": Sampling(max_new_tokens=24, repetition_penalty=1.3),
    "sampled": Sampling(max_new_tokens=24, temperature=0.9),
    "top-p": Sampling(max_new_tokens=24, temperature=1.2, top_p=0.8, seed=5),
    "top-k and min-p": Sampling(max_new_tokens=24, temperature=1.5, top_k=20, min_p=0.02, min_new_tokens=3),
    "everything, three samples": Sampling(
        max_new_tokens=24,
        temperature=1.1,
        top_k=40,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.2,
        samples_per_prompt=3,
        seed=11,
    ),
}
Results = dict[tuple[str, int], tuple[int, ...]]  # (sample id, which of the prompt's samples) -> tokens


def generate(
    engine: Engine, prompts: dict[str, list[int]], sampling: Sampling, schedule: Schedule | None, batch_size: int
) -> Results:
    ids = list(prompts)
    generations = engine.generate([prompts[id] for id in ids], sampling, schedule, batch_size, sample_ids=ids)
    return {(ids[g.index], g.sample): g.tokens for g in generations}


def generate_alone(
    engine: Engine, prompts: dict[str, list[int]], sampling: Sampling, schedule: Schedule | None
) -> Results:
    alone: Results = {}
    for id, prompt in prompts.items():
        alone |= generate(engine, {id: prompt}, sampling, schedule, batch_size=1)
    return alone


@pytest.fixture(scope="module")
def tiny(make_checkpoint: Callable[..., Path]) -> Engine:
    return Engine.load(str(make_checkpoint(eos=[3, 19, 35, 51])), device="cpu")


@pytest.mark.parametrize("name", SAMPLINGS)
@settings(max_examples=15)
@given(
    order=st.permutations(range(10)),
    count=st.integers(1, 10),
    batch_size=st.integers(1, 32),
    skip=st.booleans(),
)
def test_a_sample_does_not_depend_on_its_batch(
    tiny: Engine,
    alone_by_name: Callable[[str, bool], Results],
    name: str,
    order: list[int],
    count: int,
    batch_size: int,
    skip: bool,
) -> None:
    prompts = {id: PROMPTS[id] for id in [f"row {i}" for i in order[:count]]}
    together = generate(tiny, prompts, SAMPLINGS[name], SKIPPING if skip else None, batch_size)
    expected = alone_by_name(name, skip)
    assert together == {key: expected[key] for key in together}
    assert len(together) == count * SAMPLINGS[name].samples_per_prompt


PROMPTS = {f"row {i}": prompt for i, prompt in enumerate(random_prompts([1, 3, 3, 8, 15, 15, 22, 40, 77, 77]))}
SKIPPING = recipes.skipdecode(layers=5, warmup=1, max_active=4, min_active=2, horizon=8)


@pytest.fixture(scope="module")
def alone_by_name(tiny: Engine) -> Callable[[str, bool], Results]:
    """Each prompt generated in a call of its own, once per sampling and schedule."""
    known: dict[tuple[str, bool], Results] = {}

    def alone(name: str, skip: bool) -> Results:
        if (name, skip) not in known:
            known[name, skip] = generate_alone(tiny, PROMPTS, SAMPLINGS[name], SKIPPING if skip else None)
        return known[name, skip]

    return alone


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=10),
        Sampling(max_new_tokens=10, temperature=0.8, top_p=0.95, repetition_penalty=1.1, samples_per_prompt=2),
    ],
    ids=["greedy", "sampled"],
)
def test_a_sample_of_the_packaged_model_does_not_depend_on_its_batch(
    packaged: Engine, chats: list[list[int]], sampling: Sampling
) -> None:
    shortest_to_longest = sorted(chats, key=len)
    prompts = {str(i): shortest_to_longest[i] for i in (0, 30, 60)}
    schedule = recipes.skipdecode(layers=30, warmup=4, max_active=30, min_active=20, horizon=8)
    expected = generate_alone(packaged, prompts, sampling, schedule)
    assert generate(packaged, prompts, sampling, schedule, batch_size=8) == expected
    backwards = dict(reversed(prompts.items()))
    assert generate(packaged, backwards, sampling, schedule, batch_size=2) == expected


def test_streams_differ_between_samples_ids_and_seeds(tiny: Engine) -> None:
    prompt = random_prompts([10])[0]

    def texts(ids: list[str], seed: int, samples: int = 1) -> list[tuple[int, ...]]:
        sampling = Sampling(
            max_new_tokens=16, min_new_tokens=16, temperature=1.5, seed=seed, samples_per_prompt=samples
        )
        return [g.tokens for g in tiny.generate([prompt] * len(ids), sampling, sample_ids=ids)]

    assert len(set(texts(["a", "b", "c"], seed=0))) == 3
    assert len(set(texts(["a"], seed=0, samples=8))) == 8
    assert len({texts(["a"], seed)[0] for seed in range(8)}) == 8
    assert texts(["a", "b"], seed=3) == texts(["a", "b"], seed=3)


def test_the_second_sample_of_one_id_has_a_stream_that_no_other_id_has(tiny: Engine) -> None:
    prompt = random_prompts([10])[0]
    sampling = Sampling(max_new_tokens=16, min_new_tokens=16, temperature=1.5, samples_per_prompt=2)
    generations = tiny.generate([prompt] * 2, sampling, sample_ids=["shard", "shard/1"])
    assert len({g.tokens for g in generations}) == 4


def test_more_samples_leave_the_first_ones_as_they_were(tiny: Engine) -> None:
    two, five = (
        generate(tiny, PROMPTS, Sampling(max_new_tokens=9, temperature=1.0, samples_per_prompt=n), None, 4)
        for n in (2, 5)
    )
    assert two == {key: five[key] for key in two}


def test_a_sample_id_not_given_is_the_position_in_the_call(tiny: Engine) -> None:
    sampling = Sampling(max_new_tokens=9, temperature=1.0)
    prompts = random_prompts([5, 9, 2])
    numbered = {str(index): prompt for index, prompt in enumerate(prompts)}
    unnamed = {(str(g.index), g.sample): g.tokens for g in tiny.generate(prompts, sampling)}
    assert unnamed == generate(tiny, numbered, sampling, None, 32)


def test_a_row_that_filled_its_context_does_not_disturb_the_others(make_checkpoint: Callable[..., Path]) -> None:
    """It leaves, the others go on."""
    engine = Engine.load(str(make_checkpoint(max_position_embeddings=64)), device="cpu")
    prompts = {str(i): prompt for i, prompt in enumerate(random_prompts([60] + [5] * 7))}
    sampling = Sampling(max_new_tokens=40, min_new_tokens=40)
    expected = generate_alone(engine, prompts, sampling, None)
    assert [len(tokens) for tokens in expected.values()] == [4] + [40] * 7
    assert generate(engine, prompts, sampling, None, batch_size=8) == expected


def test_a_long_row_that_ended_early_does_not_disturb_long_generations(make_checkpoint: Callable[..., Path]) -> None:
    free = Engine.load(str(make_checkpoint(num_hidden_layers=2, eos=95)), device="cpu")
    long, short = random_prompts([90, 3])
    prompts = {str(i): prompt for i, prompt in enumerate([long] + [short] * 7)}
    endless = list(generate_alone(free, prompts, Sampling(max_new_tokens=200), None).values())
    assert {len(tokens) for tokens in endless} == {200}
    # Let the end be a token that the long prompt's row says soon and the others never.
    end = next(token for token in endless[0][1:] if not any(token in tokens for tokens in endless[1:]))
    engine = Engine.load(str(make_checkpoint(num_hidden_layers=2, eos=end)), device="cpu")
    sampling = Sampling(max_new_tokens=200)
    expected = generate_alone(engine, prompts, sampling, None)
    lengths = [len(tokens) for tokens in expected.values()]
    assert lengths[0] < 60
    assert lengths[1:] == [200] * 7
    assert generate(engine, prompts, sampling, None, batch_size=8) == expected


def test_prompts_too_many_for_one_pass_are_read_in_several(make_checkpoint: Callable[..., Path]) -> None:
    engine = Engine.load(str(make_checkpoint(num_hidden_layers=2, max_position_embeddings=4096)), device="cpu")
    lengths = [3000, 2049, 2048, 2047, 1, 700, 700, 700, 60]
    prompts = {str(i): prompt for i, prompt in enumerate(random_prompts(lengths))}
    sampling = Sampling(max_new_tokens=6, temperature=1.0, samples_per_prompt=2)
    assert generate(engine, prompts, sampling, None, batch_size=18) == generate_alone(engine, prompts, sampling, None)
