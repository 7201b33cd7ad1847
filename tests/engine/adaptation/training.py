"""What tests of training share: a recipe of few steps, a schedule that can learn, a trainer of few answers."""

from collections.abc import Sequence
from pathlib import Path

from engine import Block, Engine, ModelShape, Plateau, Schedule
from engine.adaptation.curve import Point
from engine.adaptation.recipe import Recipe
from engine.adaptation.trainer import Trainer
from engine.forward.teacher_forcing import Answer
from tests.engine.conftest import silent_bridge
from tests.engine.quiet import quiet

RECIPE = Recipe(
    steps=40, tokens_per_step=120, learning_rate=3e-3, warmup_steps=5, gate_width=8, adapter_rank=0, judge_every=10
)


def bridged(shape: ModelShape, first: int, end: int) -> Schedule:
    """Layers from the first to the one below the end give way to a bridge that does nothing yet."""
    block = Block.of_layers(first, end)
    plateau = Plateau(0, len(block.units), ("bridge",))
    return Schedule(shape.layers, block.units, (plateau,), bridges={"bridge": silent_bridge(block, shape.hidden)})


def trainer_of(
    engine: Engine, schedules: Sequence[Schedule], answers: Sequence[Answer], recipe: Recipe = RECIPE
) -> Trainer:
    """Learns from eighteen of the answers, and is judged by six others."""
    return Trainer(engine, schedules, answers[6:24], answers[:6], recipe, quiet)


def train(
    engine: Engine, schedule: Schedule, answers: list[Answer], recipe: Recipe = RECIPE, checkpoint: Path | None = None
) -> tuple[Trainer, list[Point]]:
    trainer = trainer_of(engine, [schedule], answers, recipe)
    return trainer, list(trainer.run(checkpoint))
