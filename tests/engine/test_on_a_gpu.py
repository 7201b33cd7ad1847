"""The engine on a GPU beside itself on the CPU: the same tokens, costs and figures. Only where there is a GPU."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import Engine, Generation, Sampling, Schedule
from engine.adaptation.recipe import Recipe
from engine.adaptation.trainer import Trainer
from engine.calibration.calibrate import Calibration
from engine.calibration.collect import answer_prompts
from engine.decoding.early_exit import EarlyExit
from engine.kernels import Kernels
from tests.conftest import PACKAGED
from tests.engine.models.test_families import LAYERS, VARIANTS
from tests.engine.prompts import random_prompts
from tests.engine.quiet import quiet

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

DEMO = Path(__file__).parents[2] / "infra" / "demo"
SCHEDULES = ["full depth", "calibrated/1.65x", "adapted", "whole_sample_1.5x", "whole_sample_2x"]
LENGTHS = (1, 2, 7, 15, 16, 17, 33, 50, 64, 65, 120)
SAME = 0.95  # of greedy answers of a real model, at the least: others part where two logits are as good as alike

Pair = tuple[Engine, Engine]  # on the CPU, on the GPU
Schedules = Callable[..., st.SearchStrategy[Schedule]]


def in_order(generations: Any) -> list[Generation]:
    return sorted(generations, key=lambda each: (each.index, each.sample))


def both(pair: Pair, prompts: Sequence[Sequence[int]], *how: Any) -> tuple[list[Generation], list[Generation]]:
    ours, theirs = (in_order(engine.generate(prompts, *how)) for engine in pair)
    return ours, theirs


@pytest.fixture(scope="module")
def pair(make_checkpoint: Callable[..., Path]) -> Callable[[str], Pair]:
    """A family's tiny model, in float32."""
    made: dict[str, Pair] = {}

    def get(variant: str) -> Pair:
        if variant not in made:
            directory = str(make_checkpoint(eos=[3, 19], **VARIANTS[variant]))
            # Plain ones: on some CPUs the rough logits of head previews are products of 8-bit numbers.
            plain = Engine.load(directory, "cpu", kernels=Kernels())
            made[variant] = plain, Engine.load(directory, "cuda", "float32")
        return made[variant]

    return get


@pytest.fixture(scope="module")
def real() -> Pair:
    """The packaged model, in float32."""
    return Engine.load(PACKAGED, "cpu", kernels=Kernels()), Engine.load(PACKAGED, "cuda", "float32")


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_under_any_schedule(variant: str, pair: Callable[[str], Pair], schedules: Schedules) -> None:
    engines = pair(variant)
    shape, decoder = engines[0].shape, engines[0].decoder
    sampling = Sampling(max_new_tokens=14)

    @given(schedules(LAYERS, shape.hidden, shape, decoder, previews=True), st.booleans())
    @settings(max_examples=6)
    def check(schedule: Schedule, shares: bool) -> None:
        prefix = random_prompts([5], seed=1)[0]
        prompts = random_prompts(LENGTHS)
        for engine in engines:
            engine.share_prefix(prefix if shares else [])
        found = both(engines, [*prompts, *([*prefix, *prompt] for prompt in prompts[:4])], sampling, schedule, 5)
        assert found[0] == found[1]

    check()


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9, "samples_per_prompt": 3},
        {"temperature": 1.0, "top_k": 20, "min_p": 0.01},
        {"repetition_penalty": 1.3, "min_new_tokens": 8, "stop": ("q",)},
    ],
)
def test_sampling(how: dict[str, Any], pair: Callable[[str], Pair]) -> None:
    ours, theirs = both(pair("llama"), random_prompts(LENGTHS), Sampling(max_new_tokens=20, **how), None, 8)
    assert ours == theirs


def test_several_schedules_at_once_and_early_exits(pair: Callable[[str], Pair], schedules: Schedules) -> None:
    engines, prompts, sampling = pair("llama"), random_prompts(LENGTHS), Sampling(max_new_tokens=12)

    @given(st.lists(schedules(LAYERS, engines[0].shape.hidden, engines[0].shape), min_size=2, max_size=3))
    @settings(max_examples=4)
    def check(several: list[Schedule]) -> None:
        ours, theirs = (
            sorted(engine.generate_each(prompts, sampling, several, 4), key=lambda each: (each[0], each[1].index))
            for engine in engines
        )
        assert ours == theirs

    check()
    rule = EarlyExit("CALM-DEC", (2, 4), 0.3)
    exits = [in_order(engine.generate_with_exits(prompts, sampling, rule, 4)) for engine in engines]
    assert exits[0] == exits[1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_demos_schedules(name: str, real: Pair, chats: list[list[int]]) -> None:
    schedule = None if name == "full depth" else Schedule.read(DEMO / name)
    prefix = [tokens[0] for tokens in zip(*chats, strict=False) if len(set(tokens)) == 1]
    assert real[0].share_prefix(prefix) == real[1].share_prefix(prefix) > 0
    ours, theirs = both(real, chats, Sampling(max_new_tokens=48), schedule, 48)
    same = [one == other for one, other in zip(ours, theirs, strict=True)]
    assert sum(same) >= SAME * len(same)


def test_half_precision_says_about_the_same(real: Pair, chats: list[list[int]]) -> None:
    half = Engine.load(PACKAGED, "cuda")
    for engine in (*real, half):
        engine.share_prefix([])
    ours, theirs = both(
        (real[0], half), chats, Sampling(max_new_tokens=24), Schedule.read(DEMO / "whole_sample_2x"), 64
    )
    assert sum(one.tokens[0] == other.tokens[0] for one, other in zip(ours, theirs, strict=True)) > 0.9 * len(ours)


def test_known_answers_are_judged_alike(real: Pair, chats: list[list[int]]) -> None:
    for engine in real:
        engine.share_prefix([])
    answers = [each.tokens for each in in_order(real[0].generate(chats[:16], Sampling(max_new_tokens=16), None, 16))]
    found = [
        engine.score(
            chats[:16], answers, [Schedule.read(DEMO / name) for name in SCHEDULES[1:]], [answers[1:] + answers[:1]]
        )
        for engine in real
    ]
    for ours, theirs in zip(*(scores.schedules for scores in found), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.kl == pytest.approx(other.kl, abs=2e-3)
    for ours, theirs in zip(*(scores.nll for scores in found), strict=True):
        assert ours == pytest.approx(theirs, abs=2e-3)


def test_a_schedule_is_calibrated_trained_and_written(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    directory = str(make_checkpoint(num_hidden_layers=12, eos=[3, 40, 77]))
    # Plain ones: those that training takes on a CPU may learn through bfloat16 products.
    engines = Engine.load(directory, "cpu", kernels=Kernels()), Engine.load(directory, "cuda", "float32")
    prompts, sampling = random_prompts([*range(8, 128)]), Sampling(max_new_tokens=16, min_new_tokens=6, temperature=1.0)
    answers = answer_prompts(engines[0], prompts, sampling, 32, quiet)
    losses = []
    for where, engine in zip(("cpu", "gpu"), engines, strict=True):
        calibrated = list(Calibration(engine, answers, [1.2, 1.4], quiet, sample_targets=[1.3]).run())
        losses.append([each.provenance["held_out"]["kl"] for each in calibrated])
        for number, each in enumerate(calibrated):
            each.write(tmp_path / where / str(number))
            assert Schedule.read(tmp_path / where / str(number)) == each
    assert losses[1] == pytest.approx(losses[0], rel=0.05, abs=0.01)
    started, curves = Schedule.read(tmp_path / "gpu" / "0"), []
    recipe = Recipe(steps=20, tokens_per_step=200, learning_rate=1e-3, warmup_steps=2, gate_width=8, judge_every=5)
    for where, engine in zip(("cpu", "gpu"), engines, strict=True):
        trainer = Trainer(engine, [started], answers[20:], answers[:20], recipe, quiet)
        curves.append([point.kl for point in trainer.run(tmp_path / f"checkpoint of {where}")])
        trainer.best()[0][0].write(tmp_path / f"trained on {where}")
    assert curves[1] == pytest.approx(curves[0], rel=0.02)
    assert len(set(curves[0])) > 3
    trained = Schedule.read(tmp_path / "trained on gpu")
    ours, theirs = both(engines, prompts[:20], Sampling(max_new_tokens=16), trained)
    assert ours == theirs


def test_as_many_rows_as_memory_has_room_for() -> None:
    engine = Engine.load(PACKAGED, "cuda")
    schedule = Schedule.read(DEMO / "whole_sample_2x")
    rows = engine.fitting_batch_size(1000, Sampling(max_new_tokens=48), schedule)
    assert rows > 64
    prompts = [[*range(100, 1100)]] * rows
    assert len(list(engine.generate(prompts, Sampling(max_new_tokens=4, min_new_tokens=4), schedule, rows))) == rows
