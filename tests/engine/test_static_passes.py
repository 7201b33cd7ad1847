"""Decoding in passes that the host only starts gives what decoding step by step from the host gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import BatchStats, Engine, Generation, Sampling, Schedule
from engine.kernels import Kernels

Schedules = Callable[..., st.SearchStrategy[Schedule]]
LAYERS = 5


class StaticKernels(Kernels):
    """What CUDA does, as far as a CPU can."""

    static_passes = True


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


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 96, (length,), generator=draw).tolist() for length in lengths]


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


@pytest.mark.parametrize("name", SAMPLINGS)
@settings(max_examples=25)
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
    lengths: list[int],
    seed: int,
    new_tokens: int,
    batch_size: int,
    stop: list[str],
) -> None:
    """Tokens, text, finish reason, FLOPs and mean depth, for every kind of sampling, schedule, bridge and end."""
    schedule = data.draw(schedules(LAYERS, hidden=tiny[0].shape.hidden))
    held_back = data.draw(st.integers(0, new_tokens))
    sampling = Sampling(new_tokens, held_back, stop=tuple(stop), **SAMPLINGS[name])
    prompts = random_prompts(lengths, seed)
    expected, found = (generate(engine, prompts, sampling, schedule, batch_size) for engine in tiny)
    assert found[0] == expected[0]
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert (ours.samples, ours.generated_tokens) == (theirs.samples, theirs.generated_tokens)
        assert theirs.steps <= ours.steps <= theirs.steps + 1, "ends are seen one pass late"
        assert ours.flops_padding >= 0
