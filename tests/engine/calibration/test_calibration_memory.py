"""What calibrating will keep in memory, foreseen and found."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine import Engine, Sampling
from engine.calibration.bridged import MOST_FITTED
from engine.calibration.calibrate import Calibration, depths_to_try, foreseen_depths
from engine.calibration.memory import FLOAT, HALF, kept_bytes, kept_of, working_bytes
from engine.forward.teacher_forcing import Answer
from engine.kernels import Kernels
from engine.memory import token_elements
from tests.engine.prompts import random_prompts
from tests.engine.quiet import quiet
from tests.engine.tensors import tensor_bytes

TOKENS = 12  # of every answer


@pytest.fixture(scope="module")
def engine(make_checkpoint: Callable[..., Path]) -> Engine:
    return Engine.load(str(make_checkpoint(num_hidden_layers=12)), device="cpu", kernels=Kernels())


@pytest.mark.parametrize("tokens", [20, 120])
def test_what_calibrating_keeps_is_foreseen(engine: Engine, tokens: int) -> None:
    shape, prompts = engine.shape, random_prompts([tokens] * 100)
    sampling = Sampling(max_new_tokens=TOKENS, min_new_tokens=TOKENS)
    answers = [Answer(prompts[each.index], each.tokens) for each in engine.generate(prompts, sampling)]
    before = tensor_bytes()
    calibration = Calibration(engine, answers, [1.2], quiet, whole_head=True)
    found = tensor_bytes() - before
    assert calibration is not None
    depths = foreseen_depths([1.2], shape, [tokens] * 100, TOKENS, whole_head=True)
    sizes = [tokens] * 100, TOKENS, engine.item_sizes
    working = working_bytes(shape, *sizes, depths, bridged_layers=0, whole_head=True)
    foreseen = kept_bytes(shape, *sizes, prompts_change=False) + working
    # Bridges, which are fitted while it runs, and passes of the answers to judge by, which are over.
    later = MOST_FITTED * HALF * shape.hidden**2 + 15 * TOKENS * token_elements(shape) * 4
    assert 0.8 * found < foreseen - later < 1.6 * found


def test_prompts_that_change_are_held_once_more(engine: Engine) -> None:
    sizes = [50] * 100, TOKENS, engine.item_sizes
    once, again = (kept_bytes(engine.shape, *sizes, prompts_change=each) for each in (False, True))
    judged = 15 * 50 * engine.shape.layers * engine.shape.cache_elements(1) * 4
    assert again - once == judged


def test_fewer_prompts_help_where_what_is_kept_grows_with_them(engine: Engine) -> None:
    assert [kept_of([50] * count) for count in (20, 100, 500, 1_000)] == [20, 100, 500, 840]
    assert kept_of([50] * 5_000) == kept_of([50] * 50_000) == 1_040


def test_the_head_is_taken_apart_where_previews_are_fitted(engine: Engine) -> None:
    shape, sizes = engine.shape, ([50] * 100, TOKENS, engine.item_sizes)
    whole, previews = (working_bytes(shape, *sizes, {2: [3]}, 0, whole_head) for whole_head in (True, False))
    assert previews - whole == 3 * FLOAT * shape.vocab * shape.hidden


def test_depths_are_foreseen_as_they_are_found_where_answers_have_all_their_tokens(engine: Engine) -> None:
    assert foreseen_depths([1.2, 1.5], engine.shape, [50] * 20, TOKENS, whole_head=True).keys() == {2, 3, 4}
    out_of_reach = foreseen_depths([90.0], engine.shape, [50] * 20, TOKENS, whole_head=True)
    assert out_of_reach == depths_to_try(engine.shape, [engine.shape.layers - 3])
