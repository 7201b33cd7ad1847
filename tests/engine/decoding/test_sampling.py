"""Tokens follow the probabilities that the settings leave, and a generation ends where the settings say."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

import engine.decoding.sampling
from engine import Engine, Generation, PromptError, Sampling, ScheduleError
from engine.decoding.sampling import NO_TOKEN, Sampler, stream_key, waiting_times
from engine.decoding.stopping import Stopping
from tests.engine.prompts import random_prompts

CPU = torch.device("cpu")


def draw_tokens(logits: Tensor, sampling: Sampling, draws: int) -> Tensor:
    """Tokens [draws] chosen from the same logits [vocab], each on the stream of another sample."""
    ids = [str(number) for number in range(draws)]
    return choose(seated(sampling, len(logits), [[0]] * draws, ids), logits.repeat(draws, 1), 0)


def seated(sampling: Sampling, vocab: int, prompts: Sequence[Sequence[int]], ids: Sequence[str]) -> Sampler:
    """A sampler whose seats are taken by these prompts."""
    sampler = Sampler(sampling, [], vocab, len(prompts), CPU)
    for seat, (prompt, sample_id) in enumerate(zip(prompts, ids, strict=True)):
        sampler.enter(seat, prompt, sample_id)
    return sampler


def choose(sampler: Sampler, logits: Tensor, step: int) -> Tensor:
    """Of the first seats, all at one step."""
    return sampler.choose(logits, range(len(logits)), [step] * len(logits))


def allowed_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [vocab] after temperature, top-k, top-p and min-p in this order, token by token, in float64."""
    probabilities = (logits.double() / sampling.temperature).softmax(-1)
    by_rank = sorted(range(len(logits)), key=lambda token: -float(probabilities[token]))
    kept = by_rank[: sampling.top_k or None]
    total = sum(float(probabilities[token]) for token in kept)
    nucleus, reached = [], 0.0
    for token in kept:
        if reached >= sampling.top_p:
            break
        nucleus.append(token)
        reached += float(probabilities[token]) / total
    floor = sampling.min_p * float(probabilities[by_rank[0]])
    result = torch.zeros_like(probabilities)
    for token in nucleus:
        if probabilities[token] >= floor:
            result[token] = probabilities[token]
    return result / result.sum()


def assert_drawn_from(tokens: Tensor, probabilities: Tensor) -> None:
    """No token outside the support, and Pearson's statistic within five deviations of its mean."""
    assert set(tokens.tolist()) <= set(probabilities.nonzero()[:, 0].tolist())
    expected = probabilities * len(tokens)
    observed = torch.bincount(tokens, minlength=len(probabilities)).double()
    common = expected >= 5  # Pearson's rule of thumb; the rare tokens are one class together
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    observed = torch.cat([observed[common], observed[~common].sum()[None]])
    used = expected > 0
    statistic = float(((observed - expected)[used] ** 2 / expected[used]).sum())
    freedom = max(int(used.sum()) - 1, 1)
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


FILTERS = {
    "temperature 1": Sampling(temperature=1.0),
    "temperature 0.5": Sampling(temperature=0.5),
    "temperature 3": Sampling(temperature=3.0),
    "top-k 1": Sampling(temperature=2.0, top_k=1),
    "top-k 7": Sampling(temperature=2.0, top_k=7),
    "top-k beyond the vocabulary": Sampling(temperature=1.0, top_k=1000),
    "top-p 0.5": Sampling(temperature=1.5, top_p=0.5),
    "top-p 0.99": Sampling(temperature=1.5, top_p=0.99),
    "a top-p that only the likeliest token meets": Sampling(temperature=1.0, top_p=0.01),
    "min-p 0.1": Sampling(temperature=1.5, min_p=0.1),
    "min-p 0.9": Sampling(temperature=1.5, min_p=0.9),
    "top-k, then top-p of what is left": Sampling(temperature=2.0, top_k=12, top_p=0.7),
    "top-k, top-p and min-p": Sampling(temperature=2.0, top_k=30, top_p=0.95, min_p=0.1),
}


@pytest.mark.parametrize("name", FILTERS)
def test_tokens_are_drawn_from_the_probabilities_that_the_filters_leave(name: str) -> None:
    logits = 2 * torch.randn(60, generator=torch.Generator().manual_seed(1))
    assert_drawn_from(draw_tokens(logits, FILTERS[name], 20_000), allowed_probabilities(logits, FILTERS[name]))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(2, 200),
    temperature=st.floats(0.3, 3.0),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.5),
)
def test_any_combination_of_filters_draws_from_its_reference(
    seed: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = 2 * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    assert_drawn_from(draw_tokens(logits, sampling, 3000), allowed_probabilities(logits, sampling))


@pytest.mark.parametrize("vocab", [1500, 12_000])
def test_a_nucleus_of_thousands_of_tokens_is_not_cut(vocab: int) -> None:
    logits = 0.3 * torch.randn(vocab, generator=torch.Generator().manual_seed(2))
    sampling = Sampling(temperature=1.0, top_p=0.9)
    allowed = allowed_probabilities(logits, sampling)
    assert int((allowed > 0).sum()) > 1024
    tokens = draw_tokens(logits, sampling, 500)
    assert set(tokens.tolist()) <= set(allowed.nonzero()[:, 0].tolist())
    beyond = torch.ones(vocab, dtype=torch.bool)
    beyond[logits.topk(1024).indices] = False
    expected = 500 * float(allowed[beyond].sum())
    assert abs(int(beyond[tokens].sum()) - expected) < 5 * expected**0.5


def test_a_wide_nucleus_in_the_batch_does_not_widen_the_others() -> None:
    draw = torch.Generator().manual_seed(3)
    peaked, flat = 8 * torch.randn(5000, generator=draw), 0.1 * torch.randn(5000, generator=draw)
    sampling = Sampling(temperature=1.0, top_p=0.9)
    ids = [str(number) for number in range(1000)]
    sampler = seated(sampling, 5000, [[0]] * 1000, ids)
    mixed = choose(sampler, torch.stack([peaked, flat]).repeat(500, 1), 0)
    assert torch.equal(mixed[0::2], draw_tokens(peaked, sampling, 1000)[0::2])
    assert torch.equal(mixed[1::2], draw_tokens(flat, sampling, 1000)[1::2])


def test_the_steps_of_one_sample_follow_the_probabilities_too() -> None:
    logits = 2 * torch.randn(40, generator=torch.Generator().manual_seed(4))
    sampling = Sampling(max_new_tokens=20_000, temperature=1.0)
    sampler = seated(sampling, 40, [[0]], ["only"])
    tokens = torch.cat([choose(sampler, logits.clone()[None], step) for step in range(20_000)])
    assert_drawn_from(tokens, allowed_probabilities(logits, sampling))
    pairs = tokens[:-1] * 40 + tokens[1:]
    independent = torch.outer(logits.double().softmax(-1), logits.double().softmax(-1)).flatten()
    assert_drawn_from(pairs, independent)


def test_waiting_times_are_exponential_and_a_function_of_seed_id_and_step() -> None:
    key = stream_key(7, "row")
    times = waiting_times(key, 3, 50_000)
    assert (waiting_times(key, 3, 100) == times[:100]).all(), "more of them must not change the first"
    for threshold in (0.1, 0.7, 2.0, 5.0):
        share = 1 - np.exp(-threshold)
        assert abs((times < threshold).mean() - share) < 5 * (share * (1 - share) / 50_000) ** 0.5
    assert times.min() > 0
    for other, step in [(stream_key(8, "row"), 3), (stream_key(7, "roW"), 3), (key, 4)]:
        assert not (waiting_times(other, step, 100) == times[:100]).any()


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("shortest", [0, 1])
def test_the_most_extreme_random_numbers_pick_an_allowed_token(
    monkeypatch: pytest.MonkeyPatch, name: str, shortest: int
) -> None:
    extremes = np.array([np.finfo(np.float32).tiny, 53 * np.log(2)], np.float32)

    def alternating(key: int, step: int, count: int) -> np.ndarray:
        return extremes[(np.arange(count) + shortest) % 2]

    monkeypatch.setattr(engine.decoding.sampling, "waiting_times", alternating)
    logits = 2 * torch.randn(60, generator=torch.Generator().manual_seed(1))
    logits[-5:] = -torch.inf
    [token] = draw_tokens(logits, FILTERS[name], 1).tolist()
    assert allowed_probabilities(logits, FILTERS[name])[token] > 0


@pytest.mark.parametrize("name", ["temperature 1", "top-p 0.99"])
def test_rounding_in_a_large_vocabulary_hardly_ever_changes_a_draw(name: str) -> None:
    draw = torch.Generator().manual_seed(6)
    logits = 2 * torch.randn(500, 49_152, generator=draw)
    rounded = logits + 1e-4 * torch.randn(logits.shape, generator=draw)
    samplers = (seated(FILTERS[name], 49_152, [[0]] * 500, [str(row) for row in range(500)]) for _ in range(2))
    one, other = (choose(sampler, each, 0) for sampler, each in zip(samplers, (logits, rounded), strict=True))
    assert int((one != other).sum()) <= 2


def test_greedy_takes_the_likeliest_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0], [5.0, -1.0, 4.9]])
    sampler = seated(Sampling(), 3, [[0], [0]], ["a", "b"])
    assert choose(sampler, logits, 0).tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_first_of_equally_likely_tokens(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 1001, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, [7, 500, 1000]] = logits[1, [0, 999]] = 9.0
    logits[3, :] = -torch.inf
    expected = [7, 0, int(logits[2].float().sort(descending=True, stable=True).indices[0]), 0]
    sampler = seated(Sampling(), 1001, [[0]] * 4, list("abcd"))
    assert choose(sampler, logits, 0).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(repetition_penalty=1.3),
        Sampling(temperature=1.0),
        Sampling(temperature=1.0, top_k=5),
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=1.0, min_p=0.1),
    ],
    ids=lambda sampling: str({name: value for name, value in sampling.to_dict().items() if value}),
)
def test_logits_that_are_not_numbers_give_no_token(sampling: Sampling, dtype: torch.dtype) -> None:
    logits = torch.randn(3, 3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0], logits[2, 2999] = torch.nan, torch.nan
    none, token, also_none = choose(seated(sampling, 3000, [[0]] * 3, list("abc")), logits, 0).tolist()
    assert none == also_none == NO_TOKEN < 0 <= token


@settings(max_examples=50)
@given(
    seed=st.integers(0, 10_000),
    penalty=st.floats(0.5, 2.0),
    prompts=st.lists(st.lists(st.integers(0, 29), min_size=1, max_size=8), min_size=1, max_size=5),
)
def test_the_repetition_penalty_is_that_of_transformers(seed: int, penalty: float, prompts: list[list[int]]) -> None:
    """Step by step, with the tokens generated so far, until every other row has left and after."""
    draw = torch.Generator().manual_seed(seed)
    reference = RepetitionPenaltyLogitsProcessor(penalty)
    ids = [str(row) for row in range(len(prompts))]
    sampler = seated(Sampling(repetition_penalty=penalty), 30, prompts, ids)
    histories, seats = [list(prompt) for prompt in prompts], list(range(len(prompts)))
    for step in range(6):
        if step == 3 and len(histories) > 1:
            histories, seats = histories[1::2], seats[1::2]
        logits = torch.randn(len(histories), 30, generator=draw)
        scores = [
            reference(torch.tensor([history]), row[None].clone())[0]
            for history, row in zip(histories, logits, strict=True)
        ]
        tokens = sampler.choose(logits.clone(), seats, [step] * len(seats)).tolist()
        assert tokens == [int(row.argmax()) for row in scores]
        for history, token in zip(histories, tokens, strict=True):
            history.append(token)


def test_the_penalty_lowers_what_was_said_in_a_sampled_generation_too() -> None:
    logits = 2 * torch.randn(30, generator=torch.Generator().manual_seed(5))
    sampling = Sampling(temperature=1.0, repetition_penalty=1.5)
    sampler = seated(sampling, 30, [[3, 4, 5]] * 20_000, list(map(str, range(20_000))))
    penalised = RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([[3, 4, 5]]), logits[None].clone())[0]
    assert_drawn_from(choose(sampler, logits.repeat(20_000, 1), 0), allowed_probabilities(penalised, sampling))


# --- when a generation ends ---


@pytest.fixture(scope="module")
def tiny(make_checkpoint: Callable[..., Path]) -> Engine:
    """Says printable ASCII, one character a token; its end-of-sequence token is 0."""
    return Engine.load(str(make_checkpoint(seed=3, max_position_embeddings=64)), device="cpu")


@pytest.fixture(scope="module")
def eager_to_end(make_checkpoint: Callable[..., Path]) -> Engine:
    return Engine.load(str(make_checkpoint(eos=list(range(0, 96, 2)))), device="cpu")


def generate(engine_: Engine, prompts: Sequence[Sequence[int]], **settings: Any) -> list[Generation]:
    return sorted(engine_.generate(prompts, Sampling(**settings)), key=lambda generation: generation.index)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.5}, {"temperature": 1.5, "top_p": 0.9}])
def test_end_of_sequence_ends_a_generation_and_is_counted_but_not_in_the_text(
    eager_to_end: Engine, settings: dict[str, Any]
) -> None:
    generations = generate(eager_to_end, random_prompts([5] * 20), max_new_tokens=30, **settings)
    stopped = [generation for generation in generations if generation.finish_reason == "stop"]
    assert len(stopped) > 10
    for generation in stopped:
        assert generation.tokens[-1] % 2 == 0
        assert all(token % 2 == 1 for token in generation.tokens[:-1])
        assert generation.text == eager_to_end.tokenizer.decode(generation.tokens[:-1])


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.5}, {"temperature": 1.5, "top_p": 0.9, "top_k": 5}])
def test_end_of_sequence_is_held_back_before_min_new_tokens(eager_to_end: Engine, settings: dict[str, Any]) -> None:
    generations = generate(eager_to_end, random_prompts([5] * 20), max_new_tokens=30, min_new_tokens=10, **settings)
    for generation in generations:
        assert generation.generated_tokens > 10
        assert all(token % 2 == 1 for token in generation.tokens[:10])
    assert any(generation.generated_tokens == 11 for generation in generations)


def test_an_end_token_that_the_model_does_not_have_is_never_held_back() -> None:
    sampler = Sampler(Sampling(min_new_tokens=1), [1, 4], 4, 1, torch.device("cpu"))
    sampler.enter(0, [0], "a")
    assert sampler.choose(torch.tensor([[0.0, 2.0, 1.0, 0.0]]), [0], [0]).tolist() == [2]


@pytest.mark.parametrize("limit", [1, 2, 17])
def test_max_new_tokens_ends_a_generation_by_length(tiny: Engine, limit: int) -> None:
    generations = generate(tiny, random_prompts([1, 5, 20]), max_new_tokens=limit, min_new_tokens=limit)
    assert [(g.generated_tokens, g.finish_reason) for g in generations] == [(limit, "length")] * 3


def test_the_context_ends_a_generation_by_length(tiny: Engine) -> None:
    """63 tokens leave room for one: prompt and generation together fill the 64, the last one included."""
    [almost] = generate(tiny, random_prompts([63]), max_new_tokens=100)
    assert (almost.generated_tokens, almost.finish_reason) == (1, "length")
    [half] = generate(tiny, random_prompts([34]), max_new_tokens=100, min_new_tokens=100)
    assert (half.generated_tokens, half.finish_reason) == (30, "length")


@pytest.mark.parametrize("length", [64, 65, 500])
def test_a_prompt_that_leaves_no_room_is_refused_naming_its_length(tiny: Engine, length: int) -> None:
    with pytest.raises(PromptError, match=f"prompt 1 has {length} tokens, the context is 64"):
        list(tiny.generate(random_prompts([3, length])))


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused_by_its_position(tiny: Engine, prompt: str | list[int]) -> None:
    with pytest.raises(PromptError, match="prompt 2 is empty"):
        list(tiny.generate([[1], [2], prompt]))


@pytest.mark.parametrize("width", [1, 2, 5])
def test_a_stop_string_cuts_the_text_where_it_first_stands(tiny: Engine, width: int) -> None:
    prompts = random_prompts([3, 8, 15, 22, 30])
    long = [free for free in generate(tiny, prompts, max_new_tokens=30) if free.generated_tokens == 30]
    assert len(long) > 2
    for free in long:
        stop = free.text[10 : 10 + width]
        [stopped] = generate(tiny, [prompts[free.index]], max_new_tokens=30, stop=(stop, "never said"))
        cut = free.text.find(stop)
        assert stopped.text == free.text[:cut]
        assert stopped.finish_reason == "stop"
        # One character a token: the generation ends with the token that completes the string.
        assert stopped.tokens == free.tokens[: cut + width]


def test_the_first_of_several_stop_strings_cuts(tiny: Engine) -> None:
    prompts = random_prompts([8])
    [free] = generate(tiny, prompts, max_new_tokens=30)
    late, early = free.text[20:23], free.text[12:15]
    [stopped] = generate(tiny, prompts, max_new_tokens=30, stop=(late, early))
    assert stopped.text == free.text[: min(free.text.find(early), free.text.find(late))]


def test_of_stop_strings_completed_by_one_token_the_one_that_starts_first_cuts(tiny: Engine) -> None:
    prompts = random_prompts([8])
    [free] = generate(tiny, prompts, max_new_tokens=30)
    inner, outer = free.text[14:16], free.text[12:16]
    assert free.text.find(inner) == free.text.find(outer) + 2
    for stop in ((inner, outer), (outer, inner)):
        [stopped] = generate(tiny, prompts, max_new_tokens=30, stop=stop)
        assert stopped.text == free.text[:12]


def test_a_stop_string_completed_by_the_last_token_still_stops(tiny: Engine) -> None:
    prompts = random_prompts([8])
    [free] = generate(tiny, prompts, max_new_tokens=12)
    [stopped] = generate(tiny, prompts, max_new_tokens=12, stop=(free.text[9:12],))
    assert (stopped.finish_reason, stopped.text, stopped.tokens) == ("stop", free.text[:9], free.tokens)


def test_a_stop_string_never_completed_stays_in_the_text(tiny: Engine) -> None:
    prompts = random_prompts([8])
    [free] = generate(tiny, prompts, max_new_tokens=12)
    [going] = generate(tiny, prompts, max_new_tokens=12, stop=(free.text[9:12] + "?!",))
    assert (going.finish_reason, going.text) == ("length", free.text)


def test_a_stop_string_held_back_does_not_cut_the_text_either(tiny: Engine) -> None:
    """What is held back before min_new_tokens is as if it were not there: the text is that of the tokens paid for."""
    prompts = random_prompts([8])
    [free] = generate(tiny, prompts, max_new_tokens=30)
    stop = free.text[4:7]
    [held] = generate(tiny, prompts, max_new_tokens=30, min_new_tokens=12, stop=(stop,))
    again = free.text.find(stop, 12 - len(stop))
    assert held.text == (free.text if again < 0 else free.text[:again])


def test_a_stop_string_of_real_text_spans_its_tokens(packaged: Engine, chats: list[list[int]]) -> None:
    [free] = generate(packaged, chats[:1], max_new_tokens=24)
    stop = free.text[24:40]
    assert len(packaged.tokenizer.encode_plain(stop)) > 2
    [stopped] = generate(packaged, chats[:1], max_new_tokens=24, stop=(stop,))
    assert stopped.text == free.text[: free.text.find(stop)]
    assert stop in packaged.tokenizer.decode(stopped.tokens)
    assert stop not in packaged.tokenizer.decode(stopped.tokens[:-1])
    assert stopped.tokens == free.tokens[: stopped.generated_tokens]


BAD_SETTINGS: dict[str, dict[str, Any]] = {
    "max_new_tokens": {"max_new_tokens": 0},
    "min_new_tokens": {"min_new_tokens": -1},
    "min_new_tokens above max_new_tokens": {"max_new_tokens": 4, "min_new_tokens": 5},
    "temperature": {"temperature": -0.5},
    "temperature nan": {"temperature": float("nan")},
    "top_k": {"top_k": -3},
    "top_p": {"top_p": 0.0},
    "top_p above": {"top_p": 1.5},
    "top_p nan": {"top_p": float("nan")},
    "min_p": {"min_p": -0.25},
    "min_p above": {"min_p": 1.0},
    "repetition_penalty": {"repetition_penalty": 0.0},
    "stop": {"stop": ("fine", "")},
    "stop, not in a tuple": {"stop": "tool"},
    "stop, by tokens": {"stop": (1,)},
    "max_new_tokens in parts": {"max_new_tokens": 4.5},
    "samples_per_prompt": {"samples_per_prompt": 0},
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_a_bad_setting_is_refused_by_name_and_value(case: str) -> None:
    name = re.split(r"\W", case)[0]
    with pytest.raises(ValueError, match=name) as caught:
        Sampling(**BAD_SETTINGS[case])
    assert re.search(rf"{name}={re.escape(repr(BAD_SETTINGS[case][name]))}", str(caught.value))


def test_a_bad_call_is_refused_before_anything_is_generated(tiny: Engine) -> None:
    with pytest.raises(ValueError, match="batch_size must be >= 1, got 0"):
        tiny.generate([[1]], batch_size=0)
    with pytest.raises(ValueError, match="2 prompts need as many sample_ids, got 1"):
        tiny.generate([[1], [2]], sample_ids=["a"])
    with pytest.raises(ValueError, match="must be a list of prompts, got one: 'a text'"):
        tiny.generate("a text")
    with pytest.raises(ScheduleError, match=r"'a/path' is no schedule: read one by Schedule.read\(path\)"):
        tiny.generate([[1]], schedule="a/path")  # type: ignore[arg-type]


def test_no_prompts_give_no_generations(tiny: Engine) -> None:
    assert list(tiny.generate([])) == []


def test_a_special_token_may_be_a_stop_string(packaged: Engine) -> None:
    """It is in no text, so it ends a generation as the model's own end does."""
    tokenizer = packaged.tokenizer
    special = tokenizer.special_ids["<|im_start|>"]
    assert special not in tokenizer.eos_ids
    stopping = Stopping(Sampling(stop=("<|im_start|>", "never said")), tokenizer)
    tokens = tokenizer.encode_plain("A summary.")
    assert not stopping.ends(tokens)
    assert stopping.ends([*tokens, special])
    assert stopping.text([*tokens, special]) == "A summary."
    assert not Stopping(Sampling(stop=("never said",)), tokenizer).ends([*tokens, special])


@pytest.mark.parametrize("temperature", [1e-38, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_logits_cannot_be_divided_by_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be 0, or 1e-06 at least"):
        Sampling(temperature=temperature)


@pytest.mark.parametrize("token", [-1, 96])
def test_a_token_that_the_model_does_not_have_is_refused(tiny: Engine, token: int) -> None:
    """A tokenizer may name more than the model has: on a GPU looking such a one up would end the process."""
    assert tiny.shape.vocab == 96
    with pytest.raises(PromptError, match=f"prompt 1 has token {token}, the model's vocabulary ends at 95"):
        list(tiny.generate([[1, 95], [1, token, 2]], Sampling(max_new_tokens=2)))
