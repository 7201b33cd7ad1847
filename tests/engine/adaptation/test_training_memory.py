"""What training will keep in memory, foreseen and found."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import Block, Bridge, Engine, Plateau, Sampling, Schedule, ScheduleError
from engine.adaptation.memory import SCATTERED, check_memory, kept_bytes
from engine.adaptation.recipe import Recipe
from engine.adaptation.trainer import Trainer
from engine.calibration.prompts import counted_prompt_bridge, prompt_cut
from engine.forward.teacher_forcing import Answer
from engine.kernels.base import Kernels
from engine.schedules.orders import lowest_first


@pytest.fixture(scope="module")
def engine(make_checkpoint: Callable[..., Path]) -> Engine:
    return Engine.load(str(make_checkpoint()), device="cpu", kernels=Kernels())


def tensor_bytes() -> int:
    """Of all storages that tensors live in; packed ones hide theirs."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and each.layout == torch.strided and not each.is_mkldnn:
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@pytest.mark.parametrize("prompt_layers", [None, 4])
def test_what_training_keeps_is_foreseen(engine: Engine, prompt_layers: int | None) -> None:
    shape = engine.shape
    bridge = Bridge.affine(Block.of_layers(1, 3), torch.zeros(shape.hidden, shape.hidden), torch.zeros(shape.hidden))
    order = tuple(unit for group in lowest_first(shape.layers, 1)[:2] for unit in group)
    schedule = Schedule(shape.layers, order, (Plateau(0, 4, ("1-3",)),), bridges={"1-3": bridge})
    if prompt_layers is not None:
        found = counted_prompt_bridge(shape, prompt_cut(shape, prompt_layers, [schedule]))
        schedule = replace(schedule, prompt_bridge=found)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, shape.vocab, (60,), generator=draw).tolist() for _ in range(200)]
    sampling = Sampling(max_new_tokens=8, min_new_tokens=8)
    answers = [Answer(tuple(prompts[g.index]), g.tokens) for g in engine.generate(prompts, sampling)]
    before = tensor_bytes()
    trainer = Trainer(engine, [schedule], answers[40:], answers[:40], Recipe(adapter_rank=0), lambda *_: None)
    kept = tensor_bytes() - before
    foreseen = kept_bytes(shape, [schedule], [60] * 160, [60] * 40, 8)
    assert trainer.tokens == 160 * 7
    assert 0.75 * kept < foreseen / SCATTERED < 1.25 * kept


def test_too_many_answers_are_refused_with_how_many_would_do() -> None:
    check_memory(needed=8_000, free=10_000, answers=100)
    with pytest.raises(ScheduleError, match=r"100 answers keeps some 20\.0 GB .* 10\.0 GB are free: with about 40 "):
        check_memory(needed=20_000_000_000, free=10_000_000_000, answers=100)
