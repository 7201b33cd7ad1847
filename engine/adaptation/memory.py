"""Whether what training keeps of full depth fits the memory: told before the hours that it would be lost after."""

from __future__ import annotations

from collections.abc import Sequence

from engine.adaptation.trainer import attended_layers
from engine.errors import ScheduleError
from engine.forward.prompt_pass import PROMPT_TOKENS
from engine.memory import SHARE
from engine.schedules.schedule import Schedule
from engine.shape import ModelShape

FLOAT, HALF = 4, 2  # bytes
# What a process grows by over what it keeps, as it keeps it between things that it frees: 400 prompts of 160 tokens.
SCATTERED = 1.27


def kept_bytes(
    shape: ModelShape, schedules: Sequence[Schedule], train: Sequence[int], held_out: Sequence[int], answer_tokens: int
) -> int:
    """Memory that `Trainer` keeps of its answers: full depth's last states, of those to judge by its distributions, and
    of prompts that run at full depth keys and values in the layers that decode tokens attend in above the first change.

    Args:
        shape, schedules: of the model, and what is trained.
        train, held_out: tokens of each prompt.
        answer_tokens: of each answer, at most.
    """
    layers = attended_layers(schedules, min(each.changed_from for each in schedules))
    prompts = (sum(train) + sum(held_out)) * len(layers) * shape.cache_elements(1) * FLOAT
    states = (len(train) + len(held_out)) * answer_tokens * (2 if layers else 1) * shape.hidden * FLOAT
    return int(SCATTERED * (prompts + states)) + len(held_out) * answer_tokens * shape.vocab * HALF


def working_bytes(shape: ModelShape, schedules: Sequence[Schedule], held_out: Sequence[int]) -> int:
    """Memory that it takes for a while beside: the prompts of answers to judge by in all layers, or, where prompts
    learn, a pass of them with what gradients need: all that a layer's matrices take and give, and what is made of it.
    """
    judged = sum(held_out) * shape.layers * shape.cache_elements(1)
    plans = [each.prompt_plan for each in schedules if not each.prompt_plan.is_full_depth]
    depth = max((plan.bridge.layers if plan.bridge else shape.layers for plan in plans), default=0)
    learnt = PROMPT_TOKENS * depth * 2 * shape.layer_parameters // shape.hidden
    return max(judged, learnt) * FLOAT


def check_memory(needed: int, free: int, answers: int) -> None:
    """Raises ScheduleError if so many bytes for so many answers are more than the free ones can be counted on for."""
    room = int(SHARE * free)
    if needed > room:
        raise ScheduleError(
            f"training on {answers} answers keeps some {needed / 1e9:.1f} GB of full depth in memory, "
            f"and {free / 1e9:.1f} GB are free: with about {int(answers * room / needed)} answers it fits"
        )
