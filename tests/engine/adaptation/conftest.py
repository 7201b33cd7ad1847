"""A tiny engine, its answers, and schedules that learn from them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine import Block, Engine, Plateau, Sampling, Schedule
from engine.calibration.collect import answer_prompts
from engine.forward.teacher_forcing import Answer
from engine.kernels import Kernels
from tests.engine.adaptation.training import bridged
from tests.engine.conftest import silent_bridge
from tests.engine.quiet import quiet


@pytest.fixture(scope="session")
def engine(make_checkpoint: Callable[..., Path]) -> Engine:
    """With exact products, which every CPU has; those of training itself differ from one to another."""
    return Engine.load(str(make_checkpoint()), device="cpu", kernels=Kernels())


@pytest.fixture(scope="session")
def answers(engine: Engine) -> list[Answer]:
    draw = torch.Generator().manual_seed(7)
    prompts = [torch.randint(1, 96, (length,), generator=draw).tolist() for length in (*range(4, 28), *[6] * 176)]
    return answer_prompts(engine, prompts, Sampling(max_new_tokens=14, min_new_tokens=6), 8, quiet)


@pytest.fixture
def schedule(engine: Engine) -> Schedule:
    """Layers 1 and, from step 4 on, 2 give way to bridges that do nothing yet."""
    blocks = {f"1-{end}": Block.of_layers(1, end) for end in (2, 3)}
    bridges = {name: silent_bridge(block, engine.shape.hidden) for name, block in blocks.items()}
    plateaus = (Plateau(0, 2, ("1-2",)), Plateau(4, 4, ("1-3",)))
    return Schedule(engine.shape.layers, blocks["1-3"].units, plateaus, bridges=bridges)


@pytest.fixture
def deeper(engine: Engine) -> Schedule:
    return bridged(engine.shape, 2, 4)
