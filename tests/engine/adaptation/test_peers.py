"""Processes that train together take the steps of one process that has the mean of their gradients."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from engine import Engine, ScheduleError
from engine.adaptation.peers import Peers
from engine.adaptation.recipe import Recipe
from engine.adaptation.trainer import Trainer
from engine.forward.teacher_forcing import Answer
from engine.kernels import Kernels
from tests.engine.adaptation.training import bridged
from tests.engine.quiet import quiet

RECIPE = Recipe(steps=6, tokens_per_step=40, warmup_steps=2, adapter_rank=2, judge_every=2)
Curve = list[list[float | None]]


def answers(count: int, seed: int) -> list[Answer]:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 96, (count, 12), generator=draw).tolist()
    return [Answer(row[:4], row[4:]) for row in tokens]


def unequal() -> list[Answer]:
    """Two answers, of which one has four times as many tokens to learn from."""
    short, long = answers(2, seed=3)
    return [Answer(short.prompt, short.tokens[:2]), Answer(long.prompt, long.tokens[:5])]


def train(checkpoint: str, train: list[Answer], state: Path | None = None) -> tuple[Curve, Trainer]:
    engine = Engine.load(checkpoint, device="cpu", kernels=Kernels())
    trainer = Trainer(engine, [bridged(engine.shape, 1, 3)], train, answers(6, seed=9), RECIPE, quiet)
    return [[point.step, point.loss, point.kl, point.agreement] for point in trainer.run(state)], trainer


def one_of_two(rank: int, directory: str, checkpoint: str) -> None:
    """What each process runs; writes down what it found."""
    dist.init_process_group("gloo", init_method=f"file://{directory}/group", rank=rank, world_size=2)
    mine, state = Path(directory) / f"{rank}", Path(directory) / "state"
    same = answers(10, seed=1)
    curves = [train(checkpoint, [*same, *same])[0]]
    curves.append(train(checkpoint, unequal())[0])
    curve, trainer = train(checkpoint, [*same, *answers(10, seed=2)], state)
    ((schedule, _),) = trainer.best()
    with pytest.raises(ScheduleError, match="1 answers to learn from are too few for 2 processes"):
        train(checkpoint, same[:1])
    with pytest.raises(ScheduleError, match="not all processes find the checkpoint"):
        train(checkpoint, [*same, *same], state if rank else mine)
    assert Peers().everyones(rank) == [0, 1]
    assert list(Peers().share(range(5))) == ([0, 1] if rank == 0 else [2, 3, 4])
    assert schedule.adapter is not None
    parts = [schedule.adapter.digest, *(bridge.digest for bridge in schedule.bridges.values())]
    mine.write_text(json.dumps({"curves": [*curves, curve], "parts": parts}))
    dist.destroy_process_group()


def test_two_processes_train_as_one_with_the_mean_of_their_gradients(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint = str(make_checkpoint())
    torch.multiprocessing.spawn(one_of_two, (str(tmp_path), checkpoint), nprocs=2)
    first, second = (json.loads((tmp_path / f"{rank}").read_text()) for rank in (0, 1))
    assert first == second
    same, shared, different = first["curves"]
    (alone, _), (together, _) = train(checkpoint, answers(10, seed=1)), train(checkpoint, unequal())
    for found, expected in ((same, alone), (shared, together)):
        assert [value for point in found for value in point] == pytest.approx([v for point in expected for v in point])
    assert different[-1][2] != pytest.approx(alone[-1][2])
    assert [point[0] for point in different] == [0, 2, 4, 6]


def test_a_process_alone_has_all_and_waits_for_nobody() -> None:
    peers = Peers()
    assert (peers.is_first, peers.count) == (True, 1)
    assert list(peers.share(range(5))) == [0, 1, 2, 3, 4]
    assert peers.everyones("x") == ["x"]
