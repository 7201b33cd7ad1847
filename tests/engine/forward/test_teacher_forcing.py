"""One teacher-forced pass over known answers gives the logits that decoding them step by step gave."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import Engine, Sampling, Schedule
from engine.forward.operations import Compiled
from engine.forward.teacher_forcing import Answer
from tests.engine.conftest import THREE_FAMILIES, random_prompt_bridge
from tests.engine.tapped import tapped

LAYERS = 5


@pytest.fixture(scope="module", params=THREE_FAMILIES)
def model(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path]) -> Engine:
    return Engine.load(str(make_checkpoint(num_hidden_layers=LAYERS, **THREE_FAMILIES[request.param])), device="cpu")


@settings(max_examples=15)
@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4) | st.lists(st.integers(9, 10), min_size=2, max_size=4),
    new_tokens=st.integers(2, 14),
)
def test_teacher_forcing_is_decoding(
    model: Engine,
    schedules: Callable[..., st.SearchStrategy[Schedule]],
    data: st.DataObject,
    lengths: list[int],
    new_tokens: int,
) -> None:
    schedule = data.draw(schedules(LAYERS, model.shape.hidden, model.shape, model.decoder))
    answers, decoded = [], []
    sampling = Sampling(max_new_tokens=new_tokens, min_new_tokens=2, temperature=1.0)
    with tapped() as kept:
        for index, length in enumerate(lengths):
            # Of one length is one prompt: some have several answers.
            prompt = torch.randint(1, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()
            [generation] = model.generate([prompt], sampling, schedule, sample_ids=[str(index)])
            answers.append(Answer(prompt, generation.tokens))
            decoded += kept[str(index)][1 : len(generation.tokens)]
    with torch.inference_mode():
        compiled = model.compiled(schedule)
        forced = model.teacher_forced(answers, schedule.prompt_plan, compiled)
        hidden = forced.hidden(schedule, compiled)
        logits = torch.cat([part for _, part in forced.logits(hidden)])
    expected = torch.stack(decoded)
    assert len(forced.step) == len(expected)
    assert forced.next_token.tolist() == [token for answer in answers for token in answer.tokens[1:]]
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_pass_goes_on_from_a_kept_state(model: Engine) -> None:
    draw = torch.Generator().manual_seed(0)
    answers = [Answer(*torch.randint(1, 96, (2, 9), generator=draw).tolist()) for _ in range(3)]
    full, states = Schedule.full_depth(LAYERS), {}
    with torch.inference_mode():
        forced = model.teacher_forced(answers)
        hidden = forced.hidden(full, Compiled(), observe=lambda place, x: states.__setitem__(place, x.clone()))
        assert sorted(states) == list(range(2 * LAYERS + 1))
        torch.testing.assert_close(states[2 * LAYERS], hidden)
        for place in (3, 6):
            torch.testing.assert_close(forced.hidden(full, Compiled(), start=(place, states[place])), hidden)


def test_first_tokens_are_those_that_prompts_give(model: Engine) -> None:
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, 96, (3, 8), generator=draw).tolist()
    answers = [Answer(prompts[index], torch.randint(1, 96, (5,), generator=draw).tolist()) for index in (0, 0, 1, 2)]
    schedule = Schedule(LAYERS, prompt_bridge=random_prompt_bridge(model.shape, 2))
    with torch.inference_mode():
        bridged = model.teacher_forced(answers, schedule.prompt_plan, model.compiled(schedule))
        deep = model.teacher_forced(answers)
        assert not torch.allclose(bridged.first_hidden, deep.first_hidden)
        first = next(logits.argmax(-1) for _, logits in bridged.logits(bridged.first_hidden)).tolist()
    generated = {g.index: g.tokens[0] for g in model.generate(prompts, Sampling(max_new_tokens=1), schedule)}
    assert first == [generated[index] for index in (0, 0, 1, 2)]
