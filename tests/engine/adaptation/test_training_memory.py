"""What training will keep in memory, foreseen and found."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import Engine, Sampling, ScheduleError
from engine.adaptation.memory import (
    LOGITS,
    SCATTERED,
    kept_bytes,
    model_bytes,
    teacher_bytes,
    trained_bytes,
    working_bytes,
)
from engine.adaptation.recipe import Recipe
from engine.adaptation.trainable import Trainable
from engine.adaptation.trainer import Trainer, attended_layers
from engine.calibration.prompts import counted_prompt_bridge, prompt_cut
from engine.forward.prompt_pass import PROMPT_TOKENS
from engine.forward.teacher_forcing import LOGIT_TOKENS, Answer
from engine.kernels import Kernels
from engine.memory import check_memory, token_elements
from tests.engine.adaptation.training import bridged
from tests.engine.quiet import quiet
from tests.engine.tensors import tensor_bytes


@pytest.mark.parametrize(("end", "prompt_layers"), [(3, None), (3, 4), (5, None)])
def test_what_training_keeps_is_foreseen(engine: Engine, end: int, prompt_layers: int | None) -> None:
    shape = engine.shape
    schedule = bridged(shape, 1, end)
    if prompt_layers is not None:
        found = counted_prompt_bridge(shape, prompt_cut(shape, prompt_layers, [schedule]))
        schedule = replace(schedule, prompt_bridge=found)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, shape.vocab, (60,), generator=draw).tolist() for _ in range(200)]
    sampling = Sampling(max_new_tokens=8, min_new_tokens=8)
    answers = [Answer(tuple(prompts[g.index]), g.tokens) for g in engine.generate(prompts, sampling)]
    before = tensor_bytes()
    trainer = Trainer(engine, [schedule], answers[40:], answers[:40], Recipe(adapter_rank=0), quiet)
    kept = tensor_bytes() - before
    foreseen = kept_bytes(shape, [schedule], [60] * 160, [60] * 40, 8)
    assert trainer.tokens == 160 * 7
    assert 0.75 * kept < foreseen / SCATTERED < 1.25 * kept
    states = 160 * 8 * (1 if prompt_layers else 3) * shape.hidden * 4
    more = kept_bytes(shape, [schedule], [60] * 160, [60] * 40, 8, answers_per_prompt=3)
    assert more - foreseen == pytest.approx(SCATTERED * 2 * states, rel=1e-3)
    apart = kept_bytes(shape, [schedule], [60] * 160, [60] * 40, 8, answers_per_prompt=3, tokens_per_step=10)
    in_lessons = 2 * 160 * 60 * len(attended_layers([schedule], schedule.changed_from)) * shape.cache_elements(1) * 4
    assert apart - more == pytest.approx(SCATTERED * in_lessons, rel=1e-3)


def test_the_model_is_counted_as_kernels_keep_it_on_a_cpu_with_what_gradients_pass(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, before = str(make_checkpoint()), tensor_bytes()
    loaded = Engine.load(model, device="cpu", kernels=Kernels())
    found, shape = tensor_bytes() - before, loaded.shape
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    once, twice = (model_bytes(shape, torch.device(kind)) for kind in ("cuda", "cpu"))
    assert 0.8 * found < once < found
    assert twice - once == 4 * (shape.layers * shape.layer_parameters + shape.head_parameters)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    units = 4 * shape.layers * shape.layer_parameters
    assert once - model_bytes(shape, torch.device("cuda")) == units // 2 - 2 * shape.head_parameters


@pytest.mark.parametrize("prompt_layers", [None, 4])
def test_what_is_trained_is_counted_with_its_optimizers_moments(engine: Engine, prompt_layers: int | None) -> None:
    shape, recipe = engine.shape, Recipe(adapter_rank=3, gate_width=5)
    schedule = bridged(shape, 1, 3)
    if prompt_layers is not None:
        found = counted_prompt_bridge(shape, prompt_cut(shape, prompt_layers, [schedule]))
        schedule = replace(schedule, prompt_bridge=found)
    trained = Trainable([schedule], engine.decoder, torch.device("cpu"), recipe).parameters.values()
    optimizer = torch.optim.AdamW(trained)
    sum((each**2).sum() for each in trained).backward()  # type: ignore[union-attr]
    optimizer.step()
    moments = [each for state in optimizer.state.values() for each in state.values() if each.dim()]
    gradients = [each.grad for each in trained if each.grad is not None]
    counted = trained_bytes([schedule], engine.decoder, recipe)
    assert counted == sum(each.nbytes for each in (*trained, *trained, *trained, *gradients, *moments))


def test_where_prompts_learn_the_longest_may_need_more_than_a_pass_of_others(engine: Engine) -> None:
    shape = engine.shape
    prompts = counted_prompt_bridge(shape, prompt_cut(shape, 4, [schedule := bridged(shape, 1, 3)]))
    schedules = [replace(schedule, prompt_bridge=prompts)]
    usual = working_bytes(shape, schedules, [60, 100], [60], 8)
    assert usual == working_bytes(shape, schedules, [PROMPT_TOKENS], [60], 8)
    more = [
        working_bytes(shape, schedules, train, held_out, 8) - usual
        for train, held_out in (([60, 2 * PROMPT_TOKENS], [60]), ([60], [2 * PROMPT_TOKENS]))
    ]
    a_pass = PROMPT_TOKENS * 4 * 2 * (shape.layer_parameters // shape.hidden) * 4
    assert more == [a_pass, a_pass]
    long, longer = (working_bytes(shape, schedules, [60], [60] * 100, tokens) for tokens in (10_000, 11_000))
    assert longer - long == 100 * 1_000 * token_elements(shape) * 4, "answers to judge by pass together"


def test_the_teachers_matrices_are_free_again_in_the_precision_that_they_had(
    make_checkpoint: Callable[..., Path],
) -> None:
    path = str(make_checkpoint())
    whole, half = (Engine.load(path, device="cpu", dtype=dtype) for dtype in ("float32", "bfloat16"))
    parameters = whole.shape.layers * whole.shape.layer_parameters + whole.shape.head_parameters
    assert (teacher_bytes(whole), teacher_bytes(half)) == (4 * parameters, 2 * parameters)


def test_a_lesson_takes_its_logits_and_what_gradients_need_wherever_prompts_run_at_full_depth(engine: Engine) -> None:
    shape, answer_tokens = engine.shape, Recipe().tokens_per_step
    found = {end: working_bytes(shape, [bridged(shape, 1, end)], [60] * 18, [60] * 2, 8) for end in (3, 5)}
    assert found[3] == found[5]  # both change from layer 1 on
    above = answer_tokens * (shape.layers - 1) * 2 * shape.layer_parameters // shape.hidden
    assert found[3] == 4 * (above + LOGITS * LOGIT_TOKENS * shape.vocab)


def test_too_many_answers_are_refused_with_how_many_would_do() -> None:
    check_memory("training", kept=7_000, working=0, free=10_000, prompts=100, model=1_000)
    giga = 10**9
    with pytest.raises(
        ScheduleError,
        match=r"training on 100 prompts keeps some 12\.0 GB .* 2\.0 GB and takes 2\.0 GB .*, and 10\.0 GB .* about 33 ",
    ):
        check_memory("training", kept=12 * giga, working=2 * giga, free=10 * giga, prompts=100, model=2 * giga)
    with pytest.raises(ScheduleError, match="the model alone is too large"):
        check_memory("training", kept=giga, working=0, free=10 * giga, prompts=100, model=9 * giga)
    with pytest.raises(ScheduleError, match=r"calibrating .* full depth in memory and .* what it works in alone does"):
        check_memory("calibrating", kept=giga, working=9 * giga, free=10 * giga, prompts=100)
    with pytest.raises(ScheduleError, match=r"free: fewer than the 20 prompts that it needs would fit, so it takes a "):
        check_memory("calibrating", kept=10 * giga, working=7 * giga, free=10 * giga, prompts=100)
