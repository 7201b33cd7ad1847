"""Tokens that prompts share are computed once, and nobody's generation is another for it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine import Engine, Generation, PromptError, Sampling
from engine.schedules import recipes
from tests.engine.models.test_families import LAYERS, VARIANTS, loaded
from tests.engine.prompts import random_prompts, sharing

SHARED = 20  # more than the windows of the variants that have them


def prompts_with(prefix: list[int]) -> list[list[int]]:
    """Some that begin with it, one twice; the prefix itself, most of it, and others."""
    rests = random_prompts([1, 5, 30, 12], seed=1)
    others = random_prompts([9, 26], seed=2)
    return [*(prefix + rest for rest in rests), prefix + rests[1], prefix, prefix[:-1], *others]


def by_index(engine: Engine, prompts: list[list[int]], batch_size: int) -> list[Generation]:
    sampling = Sampling(max_new_tokens=16, samples_per_prompt=2, temperature=0.7)
    schedule = recipes.unified_layer_skipping(LAYERS, active=3)
    found = engine.generate(prompts, sampling, schedule, batch_size)
    return sorted(found, key=lambda generation: (generation.index, generation.sample))


@pytest.mark.parametrize("variant", VARIANTS)
def test_generations_are_the_same_with_and_without(make_checkpoint: Callable[..., Path], variant: str) -> None:
    engine = loaded(make_checkpoint(**VARIANTS[variant]))
    [prefix] = random_prompts([SHARED])
    prompts = prompts_with(prefix)
    plain = by_index(engine, prompts, 32)
    assert {generation.shared_prefix_tokens for generation in plain} == {0}
    with sharing(engine, prefix) as flops:
        assert flops > 0
        for batch_size in (32, 3):
            found = by_index(engine, prompts, batch_size)
            assert [g.tokens for g in found] == [g.tokens for g in plain]
            assert [g.shared_prefix_tokens for g in found] == [SHARED] * 10 + [0] * 8
    assert by_index(engine, prompts, 32) == plain


def test_another_prefix_takes_the_place_of_the_last(make_checkpoint: Callable[..., Path]) -> None:
    engine = Engine.load(str(make_checkpoint()), device="cpu")
    first, second, rest = random_prompts([8, 6, 5])
    engine.share_prefix(first)
    engine.share_prefix(second)
    found = engine.generate([first + rest, second + rest], Sampling(max_new_tokens=2))
    assert sorted((g.index, g.shared_prefix_tokens) for g in found) == [(0, 0), (1, 6)]


def test_keys_that_depend_on_a_prompts_length_are_not_shared(make_checkpoint: Callable[..., Path]) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **factors}
    engine = Engine.load(str(make_checkpoint(rope_parameters=scaling, max_position_embeddings=128)), device="cpu")
    [prefix] = random_prompts([SHARED])
    assert engine.share_prefix(prefix) == 0
    [generation] = engine.generate([[*prefix, 5]], Sampling(max_new_tokens=2))
    assert generation.shared_prefix_tokens == 0


@pytest.mark.parametrize("tokens", [128, 200])
def test_a_prefix_that_fills_the_context_is_left_to_the_prompts_own_errors(
    make_checkpoint: Callable[..., Path], tokens: int
) -> None:
    engine = Engine.load(str(make_checkpoint(max_position_embeddings=128)), device="cpu")
    [prefix] = random_prompts([tokens])
    assert engine.share_prefix(prefix) == 0
    [generation] = engine.generate([prefix[:20]], Sampling(max_new_tokens=2))
    assert generation.shared_prefix_tokens == 0


def test_an_instruction_with_a_token_that_the_model_has_not_is_not_shared(make_checkpoint: Callable[..., Path]) -> None:
    """Each of its prompts is refused, not the engine."""
    engine = Engine.load(str(make_checkpoint()), device="cpu")
    strange = [5, engine.shape.vocab, 6]
    assert engine.share_prefix(strange) == 0
    assert engine.shared_tokens == 0
    with pytest.raises(PromptError, match="the model's vocabulary ends at"):
        list(engine.generate([[*strange, 7]], Sampling(max_new_tokens=2)))
