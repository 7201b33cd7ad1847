"""Decoding in passes that the host only starts gives what decoding step by step from the host gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_double import recorded_graphs
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import BatchStats, Block, Bridge, Engine, Generation, Ledger, Plateau, Sampling, Schedule, memory
from engine.captured.workspace import Workspace, Workspaces, padded_rows
from engine.kernels.base import Kernels
from engine.schedules import decays, orders, recipes
from tests.engine.prompts import random_prompts

Schedules = Callable[..., st.SearchStrategy[Schedule]]
LAYERS = 5


class StaticKernels(Kernels):
    """What CUDA does, as far as a CPU can."""

    static_passes = True


def fresh(engine: Engine) -> Engine:
    """The same engine with no graphs made yet."""
    twin = copy(engine)
    twin._workspaces = Workspaces()
    return twin


Pair = tuple[Engine, Engine]  # decoding step by step, and in static passes


def load_pair(directory: Path) -> Pair:
    return (
        Engine.load(str(directory), device="cpu", kernels=Kernels()),
        Engine.load(str(directory), device="cpu", kernels=StaticKernels()),
    )


@pytest.fixture(scope="module")
def tiny(make_checkpoint: Callable[..., Path]) -> Pair:
    """Ends a text with any of six tokens, so that rows leave their batch at different steps."""
    return load_pair(make_checkpoint(num_hidden_layers=LAYERS, eos=[3, 19, 35, 51, 67, 83], max_position_embeddings=96))


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, schedule: Schedule | None, batch_size: int
) -> tuple[list[Generation], list[BatchStats]]:
    stats: list[BatchStats] = []
    generations = engine.generate(prompts, sampling, schedule, batch_size, on_batch=stats.append)
    return sorted(generations, key=lambda g: (g.index, g.sample)), stats


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalised": {"repetition_penalty": 1.3},
    "sampled": {"temperature": 0.9},
    "top-k": {"temperature": 1.3, "top_k": 12},
    "top-p, some samples": {"temperature": 1.2, "top_p": 0.8, "samples_per_prompt": 3},
    "everything": {
        **{"temperature": 1.1, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
        **{"repetition_penalty": 1.2, "samples_per_prompt": 2, "seed": 11},
    },
}


@pytest.mark.parametrize("replayed", [False, True], ids=["run", "replayed"])
@pytest.mark.parametrize("name", SAMPLINGS)
@settings(max_examples=15)
@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=20),
    seed=st.integers(0, 1000),
    new_tokens=st.integers(1, 24),
    batch_size=st.integers(1, 40),
    stop=st.lists(st.text("abcdefgh", min_size=1, max_size=2), max_size=3),
)
def test_generations_and_their_costs_are_the_same(
    tiny: Pair,
    schedules: Schedules,
    data: st.DataObject,
    name: str,
    replayed: bool,
    lengths: list[int],
    seed: int,
    new_tokens: int,
    batch_size: int,
    stop: list[str],
) -> None:
    """Tokens, text, finish reason, FLOPs and mean depth, for every kind of sampling, schedule, bridge and end."""
    schedule = data.draw(schedules(LAYERS, tiny[0].shape.hidden, adaptable=tiny[0].decoder, previews=True))
    held_back = data.draw(st.integers(0, new_tokens))
    sampling = Sampling(new_tokens, held_back, stop=tuple(stop), **SAMPLINGS[name])
    prompts = random_prompts(lengths, seed)
    expected = generate(tiny[0], prompts, sampling, schedule, batch_size)
    with recorded_graphs() if replayed else nullcontext():
        static = tiny[1] if not replayed else fresh(tiny[1])
        found = generate(static, prompts, sampling, schedule, batch_size)
    assert found[0] == expected[0]
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert (ours.samples, ours.generated_tokens) == (theirs.samples, theirs.generated_tokens)
        assert theirs.steps <= ours.steps <= theirs.steps + 1, "ends are seen one pass late"
        assert ours.flops_padding >= 0


GREEDY = Sampling(max_new_tokens=24)
RAMP = recipes.skipdecode(LAYERS, warmup=1, max_active=5, min_active=2, horizon=16)


def test_graphs_are_made_once_for_each_plateau_and_batch_size_and_serve_later_batches(tiny: Pair) -> None:
    prompts = random_prompts([5] * 60, seed=4)
    expected, _ = generate(tiny[0], prompts, GREEDY, RAMP, 20)
    engine = fresh(tiny[1])
    with recorded_graphs() as graphs:
        for _ in range(2):
            found, stats = generate(engine, prompts, GREEDY, RAMP, 20)
            assert found == expected
            made = len(graphs)
            assert made < sum(batch.steps for batch in stats) / 2
        again, _ = generate(engine, prompts, GREEDY, RAMP, 20)
        assert len(graphs) == made
        assert again == expected


def test_other_bridges_are_other_graphs(tiny: Pair) -> None:
    width = tiny[0].shape.hidden
    prompts = random_prompts([5] * 4, seed=4)
    engine = fresh(tiny[1])
    with recorded_graphs():
        for seed in (0, 1, 0):
            weight = torch.randn(width, width, generator=torch.Generator().manual_seed(seed)) * width**-0.5
            bridge = Bridge.affine(Block.of_layers(1, 3), weight, torch.zeros(width))
            schedule = Schedule.build(LAYERS, orders.lowest_first(LAYERS), decays.constant(2), horizon=0)
            schedule = replace(schedule, plateaus=(Plateau(0, 4, ("b",)),), bridges={"b": bridge})
            expected, _ = generate(tiny[0], prompts, GREEDY, schedule, 4)
            assert generate(engine, prompts, GREEDY, schedule, 4)[0] == expected


def test_batches_of_other_sizes_lengths_samplings_and_schedules_follow_each_other(tiny: Pair) -> None:
    engine = fresh(tiny[1])
    calls: list[tuple[list[int], int, Sampling, Schedule | None]] = [
        ([9] * 5, 5, GREEDY, RAMP),
        ([70, 3], 2, GREEDY, RAMP),
        ([4] * 9, 4, GREEDY, None),
        ([4] * 9, 9, Sampling(24, temperature=1.0), RAMP),
        ([30, 2, 2], 9, Sampling(24, temperature=1.0, seed=1), None),
    ]
    with recorded_graphs():
        for lengths, batch_size, sampling, schedule in calls:
            prompts = random_prompts(lengths, seed=len(lengths))
            expected, _ = generate(tiny[0], prompts, sampling, schedule, batch_size)
            assert generate(engine, prompts, sampling, schedule, batch_size)[0] == expected


def test_schedules_compared_on_one_prompt_pass_give_what_they_give_alone(tiny: Pair) -> None:
    prompts = random_prompts([3, 9, 20, 20, 41], seed=2)
    schedules = [None, RAMP, recipes.skipdecode(LAYERS, warmup=1, max_active=3, min_active=2, horizon=4)]
    with recorded_graphs():
        found = list(fresh(tiny[1]).generate_each(prompts, GREEDY, schedules, batch_size=3))
    for index, schedule in enumerate(schedules):
        ours = sorted((g for of, g in found if of == index), key=lambda g: g.index)
        assert ours == generate(tiny[0], prompts, GREEDY, schedule, 3)[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"family": "opt", "ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
        {"family": "mistral", "sliding_window": 7},
        {"family": "gemma2", "head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 16},
        {"family": "gemma3_text", "head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 16},
        {"family": "qwen3", "head_dim": 8},
        {"family": "smollm3"},
    ],
    ids=lambda settings: settings["family"],
)
def test_every_family_decodes_in_static_passes(make_checkpoint: Callable[..., Path], settings: dict[str, Any]) -> None:
    plain, static = load_pair(make_checkpoint(eos=[3, 19, 35], **settings))
    prompts = random_prompts([1, 4, 12, 30, 30], seed=6)
    with recorded_graphs():
        assert generate(static, prompts, GREEDY, RAMP, 8)[0] == generate(plain, prompts, GREEDY, RAMP, 8)[0]


def test_rows_that_end_leave_the_batch(tiny: Pair) -> None:
    prompts = random_prompts([5] * 64, seed=3)
    sampling = Sampling(max_new_tokens=60, temperature=1.0)
    plain, static = (generate(engine, prompts, sampling, RAMP, 64) for engine in tiny)
    assert static == (plain[0], static[1])
    never_left = 64 * static[1][0].steps - sum(g.generated_tokens - 1 for g in static[0])
    whole = tiny[0].shape
    cheapest = min(cost.weights for cost in Ledger(whole, RAMP).plateaus)
    assert static[1][0].flops_padding < cheapest * never_left / 2, "the batch was never compacted"


@given(st.integers(1, 2000))
def test_batches_are_padded_by_a_third_at_most(rows: int) -> None:
    padded = padded_rows(rows)
    assert rows <= padded <= max(8, rows * 3 / 2)
    assert padded_rows(padded) == padded


def test_the_ladder_of_batch_sizes_is_short() -> None:
    assert sorted({padded_rows(rows) for rows in range(1, 129)}) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]


def test_a_batch_that_fails_leaves_no_memory_behind(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fresh(tiny[1])
    generate(engine, random_prompts([5]), GREEDY, None, 1)
    assert engine._workspaces.bytes > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "run_pass", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(engine, random_prompts([5]), GREEDY, None, 1)
    assert engine._workspaces.bytes == 0


@given(rows=st.integers(1, 40), prompt=st.integers(1, 40), new_tokens=st.integers(1, 50))
@settings(max_examples=12)
def test_the_cache_of_a_static_batch_is_part_of_what_is_predicted(
    tiny: Pair, rows: int, prompt: int, new_tokens: int
) -> None:
    engine = fresh(tiny[1])
    _, [stats] = generate(engine, [[5] * prompt] * rows, Sampling(new_tokens, new_tokens), RAMP, rows)
    with_cache, without = (
        memory.batch_bytes(replace(engine.shape, kv_heads=heads), RAMP, rows, prompt, new_tokens, 4, static=True)
        for heads in (engine.shape.kv_heads, 0)
    )
    layers = engine.shape.layers
    assert stats.cache_bytes <= with_cache - without <= stats.cache_bytes * (layers + 1) / layers
    assert stats.cache_course[-1] <= stats.cache_course[0]
