"""Fit a configuration to a model: the schedule it names and the longest prompt it leaves room for."""

from __future__ import annotations

from engine import ModelShape, Schedule, for_target_speedup
from pipeline.config import GenerationConfig
from pipeline.errors import JobError

TYPICAL_PROMPT = 256  # tokens; a plain schedule's speed-up hardly depends on it


def choose_schedule(config: GenerationConfig, shape: ModelShape) -> Schedule:
    """The schedule the configuration names. Raises ScheduleError if it does not fit or cannot be met."""
    if config.schedule is not None:
        schedule = Schedule.read(config.schedule)
        schedule.check_fits(shape)
        return schedule
    if config.target_speedup is None or config.target_speedup == 1.0:
        return Schedule.full_depth(shape.layers)
    return for_target_speedup(config.target_speedup, [(TYPICAL_PROMPT, max(2, config.max_new_tokens))], shape)


def longest_prompt(config: GenerationConfig, shape: ModelShape) -> int:
    """In tokens. Raises JobError if there is no room at all."""
    room = shape.context - config.max_new_tokens
    if room < 1:
        raise JobError(
            f"max_new_tokens {config.max_new_tokens} leaves no room for a prompt in the model's context of "
            f"{shape.context} tokens: lower it"
        )
    return min(config.max_prompt_tokens or room, room)
