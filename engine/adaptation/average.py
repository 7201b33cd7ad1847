"""Trainings of one schedule, averaged."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.errors import ScheduleError
from engine.schedules.schedule import Schedule


def average(schedules: Sequence[Schedule]) -> Schedule:
    """The mean of what trainings have made of one schedule, with the provenance of the first: at the same FLOPs it errs
    less than each of them, as far as they err in different ways (model soups, arXiv 2203.05482).

    The changes of adapters are averaged as such, so that ranks add up.

    Raises ScheduleError for schedules that differ in more than the numbers in bridges and adapters, and for bridges
    that are no affine maps: the mean of a product's factors, and of a gate's, is no mean of what they do.
    """
    first, frames = schedules[0], [_frame(each) for each in schedules]
    for number, frame in enumerate(frames, 1):
        if differs := [what for what, theirs in frame.items() if theirs != frames[0][what]]:
            raise ScheduleError(f"schedule {number} is of another kind than the first, by its {', '.join(differs)}")
    for bridge in first.all_bridges:
        if bridge.form != "affine":
            raise ScheduleError(
                f"the bridge over {bridge.block} is {bridge.form}: of affine ones alone is there a mean"
            )
    bridges = {
        name: replace(bridge, tensors=_mean([each.bridges[name].tensors for each in schedules]))
        for name, bridge in first.bridges.items()
    }
    prompts, adapter = first.prompt_bridge, first.adapter
    if prompts is not None:
        all_prompts = [each.prompt_bridge for each in schedules if each.prompt_bridge is not None]
        skips = [each.skips.tensors for each in all_prompts if each.skips is not None]
        prompts = replace(
            prompts,
            tensors=_mean([each.tensors for each in all_prompts]),
            skips=replace(prompts.skips, tensors=_mean(skips)) if prompts.skips is not None else None,
        )
    if adapter is not None:
        adapter = replace(adapter, tensors=_summed([each.adapter.tensors for each in schedules if each.adapter]))
    return replace(first, bridges=bridges, prompt_bridge=prompts, adapter=adapter)


def _frame(schedule: Schedule) -> dict[str, Any]:
    """What trainings of a schedule leave as it is, in words."""
    prompts, adapter = schedule.prompt_bridge, schedule.adapter
    parts = {**schedule.bridges, "on prompts": prompts.skips if prompts else None}
    # Of an adapter's matrices the sizes but ranks, which may differ.
    sizes = adapter and {name: each.shape[name.endswith(".up")] for name, each in adapter.tensors.items()}
    return {
        "layers": (schedule.layers, schedule.skip_order, schedule.plateaus),
        "head preview": schedule.head_preview,
        "bridges": {name: part and (part.block, _shapes(part.tensors)) for name, part in parts.items()},
        "prompt bridge": prompts and (prompts.first, _shapes(prompts.tensors)),
        "adapter": adapter and (adapter.changes_prompts, sizes),
    }


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {role: list(tensor.shape) for role, tensor in tensors.items()}


def _mean(all_tensors: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {
        role: torch.stack([tensors[role].float() for tensors in all_tensors]).mean(0).to(tensor.dtype)
        for role, tensor in all_tensors[0].items()
    }


def _summed(all_tensors: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """One change of an adapter, down up, that is the mean of several."""
    share, found = 1 / len(all_tensors), {}
    for name, tensor in all_tensors[0].items():
        is_down = name.endswith(".down")
        joined = torch.cat([tensors[name].float() for tensors in all_tensors], dim=1 if is_down else 0)
        found[name] = (joined if is_down else share * joined).to(tensor.dtype)
    return found
