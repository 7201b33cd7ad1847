"""Fit a configuration to a model: the schedule it names and the longest prompt it leaves room for."""

from __future__ import annotations

import logging
from pathlib import Path

from engine import ModelShape, Schedule, ScheduleError, for_target_speedup
from engine.schedule import SCHEDULE_FILE
from pipeline.config import AnswerConfig, GenerationConfig
from pipeline.errors import JobError

log = logging.getLogger(__name__)

TYPICAL_PROMPT = 256  # tokens; a plain schedule's speed-up hardly depends on it


def choose_schedule(config: GenerationConfig, shape: ModelShape) -> Schedule:
    """The schedule the configuration names. Raises ScheduleError if it does not fit or cannot be met."""
    if config.schedule is not None:
        schedule = read_schedule(config.schedule, config.target_speedup)
        schedule.check_fits(shape)
        return schedule
    if config.target_speedup is None or config.target_speedup == 1.0:
        return Schedule.full_depth(shape.layers)
    log.info("a plain schedule: calibrate_schedule.py makes one for your prompts that keeps far more quality")
    return for_target_speedup(config.target_speedup, [(TYPICAL_PROMPT, max(2, config.max_new_tokens))], shape)


def read_schedule(path: str, target: float | None) -> Schedule:
    """A schedule, or of several calibrated ones below a directory the one whose speed-up just reaches the target.

    Raises ScheduleError: there is none that can be read, none that fast, or no telling which.
    """
    directory = Path(path)
    if (directory / SCHEDULE_FILE).is_file() or not directory.is_dir():
        if target is not None:
            raise ScheduleError(
                f"{path!r} is one schedule, so target_speedup has nothing to choose from: leave it out, or name a "
                "directory of calibrated schedules"
            )
        return Schedule.read(path)
    schedules = {folder.parent: Schedule.read(folder) for folder in sorted(directory.glob(f"*/{SCHEDULE_FILE}"))}
    speedups = {
        folder: float(schedule.provenance["decode_flop_speedup"])
        for folder, schedule in schedules.items()
        if "decode_flop_speedup" in schedule.provenance
    }
    if not speedups:
        return Schedule.read(path)  # which says what is missing
    offered = ", ".join(f"{speedup:.2f}x" for speedup in sorted(speedups.values()))
    if target is None:
        raise ScheduleError(f"{path!r} holds several schedules: choose one with target_speedup, among {offered}")
    enough = [folder for folder, speedup in speedups.items() if speedup >= target]
    if not enough:
        raise ScheduleError(
            f"{path!r} holds no schedule of {target:g}x, only {offered}: calibrate one, or ask for less"
        )
    return schedules[min(enough, key=lambda folder: speedups[folder])]


def longest_prompt(config: AnswerConfig, shape: ModelShape) -> int:
    """In tokens. Raises JobError if there is no room at all."""
    room = shape.context - config.max_new_tokens
    if room < 1:
        raise JobError(
            f"max_new_tokens {config.max_new_tokens} leaves no room for a prompt in the model's context of "
            f"{shape.context} tokens: lower it"
        )
    return min(config.max_prompt_tokens or room, room)
