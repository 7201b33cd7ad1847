"""Whether what training keeps of full depth fits the memory: told before the hours that it would be lost after."""

from __future__ import annotations

from collections.abc import Sequence

from engine.adaptation.trainer import attended_layers, prompts_stop
from engine.errors import ScheduleError
from engine.memory import SHARE
from engine.schedules.schedule import Schedule
from engine.shape import ModelShape

FLOAT, HALF = 4, 2  # bytes
# What a process grows by over what it keeps, as it keeps it between things that it frees: 400 prompts of 160 tokens.
SCATTERED = 1.27


def kept_bytes(
    shape: ModelShape, schedules: Sequence[Schedule], train: Sequence[int], held_out: Sequence[int], answer_tokens: int
) -> int:
    """Memory that `Trainer` takes for its answers: of those to learn from a prompt's keys and values in the layers that
    decode tokens attend in above the first change, of those to judge by in all layers, and full depth's distributions.

    Args:
        shape, schedules: of the model, and what is trained.
        train, held_out: tokens of each prompt.
        answer_tokens: of each answer, at most.

    Raises ScheduleError if the schedules stop prompts at different layers.
    """
    layers, bridge = attended_layers(schedules, min(each.changed_from for each in schedules)), prompts_stop(schedules)
    stopped = 0
    if bridge is not None:
        layers &= set(range(bridge.first)) - set(bridge.skipped_layers)
        stopped = 2 * shape.hidden  # where a token stopped, and where it began
    learnt = len(layers) * shape.cache_elements(1) + stopped  # numbers of a prompt's token
    judged = shape.layers * shape.cache_elements(1) + (learnt if bridge else 0)  # kept once more where prompts stop
    prompts = (sum(train) * learnt + sum(held_out) * judged) * FLOAT
    states = (len(train) + len(held_out)) * answer_tokens * 2 * shape.hidden * FLOAT
    return int(SCATTERED * (prompts + states)) + len(held_out) * answer_tokens * shape.vocab * HALF


def check_memory(needed: int, free: int, answers: int) -> None:
    """Raises ScheduleError if so many bytes for so many answers are more than the free ones can be counted on for."""
    room = int(SHARE * free)
    if needed > room:
        raise ScheduleError(
            f"training on {answers} answers keeps some {needed / 1e9:.1f} GB of full depth in memory, "
            f"and {free / 1e9:.1f} GB are free: with about {int(answers * room / needed)} answers it fits"
        )
