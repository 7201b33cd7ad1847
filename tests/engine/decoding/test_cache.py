"""The cache holds what later tokens attend to, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import engine.decoding.batch
from engine import Engine, ModelShape, Plateau, Sampling, Schedule, Unit
from engine.decoding.cache import KVCache

SHAPE = ModelShape("llama", 6, 8, 4, 2, 3, 50, 100, attention_parameters=1, mlp_parameters=1, head_parameters=1)
CPU = torch.device("cpu")


def make_cache(layers: Iterable[int] = (0, 1, 5), rows: int = 3, capacity: int = 8) -> KVCache:
    return KVCache(SHAPE, layers, rows, capacity, torch.float32, CPU)


def filled_cache(lengths: Sequence[int] = (4, 2, 6), capacity: int = 8) -> tuple[KVCache, list[Tensor]]:
    """A cache with a random prompt in each row, and each row's keys [n, kv_heads, head_dim] of layer 1."""
    draw = torch.Generator().manual_seed(0)
    cache = make_cache(rows=len(lengths), capacity=capacity)
    prompts = [torch.randint(1, 100, (length, 2, 3), generator=draw).float() for length in lengths]
    for layer in (0, 1, 5):
        for row, prompt in enumerate(prompts):
            cache.write_prompt(layer, row, prompt + layer - 1, -prompt)
    cache.lengths.copy_(torch.tensor(lengths))
    return cache, prompts


def keys_of(cache: KVCache, layer: int, row: int, length: int) -> Tensor:
    """[length, kv_heads, head_dim]."""
    keys, _ = cache.view(layer, slice(None), length)
    return keys.unflatten(0, (cache.rows, -1))[row].transpose(0, 1)


def test_a_layer_not_asked_for_takes_no_memory() -> None:
    cache = make_cache(layers=(0, 5))
    assert [layer in cache for layer in range(6)] == [True, False, False, False, False, True]
    assert cache.bytes == 2 * (2 * 3 * 2 * 8 * 3) * 4  # layers x (k and v, rows, heads, slots, width) x float32


def test_a_prompt_and_the_tokens_after_it_stand_in_order() -> None:
    cache, prompts = filled_cache()
    token = torch.rand(3, 2, 3)
    cache.append(1, token, -token)
    cache.lengths += 1
    for row, prompt in enumerate(prompts):
        length = len(prompt) + 1
        assert torch.equal(keys_of(cache, 1, row, length), torch.cat([prompt, token[row, None]]))
        _, values = cache.view(1, slice(None), length)
        assert torch.equal(values.unflatten(0, (3, -1))[row].transpose(0, 1), -torch.cat([prompt, token[row, None]]))


def test_slots_beyond_a_row_are_zero() -> None:
    cache, prompts = filled_cache()
    for row, prompt in enumerate(prompts):
        assert not keys_of(cache, 1, row, 8)[len(prompt) :].any()


def test_growing_keeps_the_content_and_makes_room() -> None:
    cache, prompts = filled_cache()
    cache.reserve(30)
    assert cache.capacity >= 30
    for layer in (0, 1, 5):
        for row, prompt in enumerate(prompts):
            assert torch.equal(keys_of(cache, layer, row, len(prompt)), prompt + layer - 1)
            assert not keys_of(cache, layer, row, 30)[len(prompt) :].any()


def test_room_enough_is_left_as_it_is() -> None:
    cache, _ = filled_cache()
    before = cache.bytes
    cache.reserve(8)
    assert (cache.capacity, cache.bytes) == (8, before)


def test_kept_rows_come_in_the_order_asked_for() -> None:
    cache, prompts = filled_cache()
    cache.keep_rows(torch.tensor([2, 0]))
    assert cache.rows == 2
    assert cache.lengths.tolist() == [6, 4]
    for row, kept in enumerate((2, 0)):
        assert torch.equal(keys_of(cache, 5, row, len(prompts[kept])), prompts[kept] + 4)
    token = torch.rand(2, 2, 3)
    cache.append(5, token, token)
    assert torch.equal(keys_of(cache, 5, 0, 7)[-1], token[0])
    assert torch.equal(keys_of(cache, 5, 1, 5)[-1], token[1])


def test_a_layer_no_longer_kept_is_freed() -> None:
    cache, _ = filled_cache()
    before = cache.bytes
    cache.keep_layers({0, 5})
    assert 1 not in cache
    assert cache.bytes == before * 2 // 3


class WatchedCache(KVCache):
    """The real cache, which writes down what it holds from the prompts on, then at every step."""

    history: list[tuple[set[int], int]]  # (layers, bytes) at each step

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._note()

    def keep_layers(self, layers: set[int]) -> None:
        super().keep_layers(layers)
        self._note()

    def _note(self) -> None:
        self.history.append(({layer for layer in range(6) if layer in self}, self.bytes))


@pytest.fixture(scope="module")
def tiny(make_checkpoint: Callable[..., Path]) -> Engine:
    return Engine.load(str(make_checkpoint(num_hidden_layers=6)), device="cpu")


def watch(tiny: Engine, schedule: Schedule, **settings: Any) -> list[tuple[set[int], int]]:
    WatchedCache.history = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.decoding.batch, "KVCache", WatchedCache)
        list(tiny.generate([[1, 2, 3], [4, 5]], Sampling(**settings), schedule))
    return WatchedCache.history


def test_layers_never_used_in_decoding_keep_no_cache(tiny: Engine) -> None:
    order = (Unit("a", 2), Unit("m", 2), Unit("m", 3), Unit("a", 4))
    history = watch(tiny, Schedule(6, order, (Plateau(0, 4),)), max_new_tokens=5, min_new_tokens=5)
    assert [layers for layers, _ in history] == [{0, 1, 3, 5}] * 5
    full = watch(tiny, Schedule.full_depth(6), max_new_tokens=5, min_new_tokens=5)
    assert history[0][1] == full[0][1] * 4 // 6


def test_the_memory_of_a_layer_skipped_for_good_is_freed(tiny: Engine) -> None:
    order = (Unit("a", 1), Unit("m", 1), Unit("a", 2), Unit("m", 2), Unit("a", 3))
    schedule = Schedule(6, order, (Plateau(0, 0), Plateau(2, 1), Plateau(3, 2), Plateau(5, 5)))
    history = watch(tiny, schedule, max_new_tokens=8, min_new_tokens=8)
    every = {0, 1, 2, 3, 4, 5}
    expected = [every, every, every, every - {1}, every - {1}, every - {1}, {0, 4, 5}, {0, 4, 5}]
    assert [layers for layers, _ in history] == expected
    assert [size for _, size in history] == [history[0][1] * len(layers) // 6 for layers in expected]


def test_a_generation_that_outgrows_the_cache_goes_on_as_in_transformers(make_checkpoint: Callable[..., Path]) -> None:
    directory = make_checkpoint(num_hidden_layers=2)
    prompts = [[7, 8, 9, 10, 11], [60, 50, 40]]
    model = AutoModelForCausalLM.from_pretrained(directory)
    settings = {"max_new_tokens": 300, "min_new_tokens": 300}
    expected = [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            pad_token_id=0,
            **settings,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    generations = Engine.load(str(directory), device="cpu").generate(prompts, Sampling(**settings))
    assert [list(generation.tokens) for generation in sorted(generations, key=lambda g: g.index)] == expected
