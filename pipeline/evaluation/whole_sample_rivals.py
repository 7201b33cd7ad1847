"""Rivals that spend fewer FLOPs on prompts too, all of them as many on the whole sample.

All have what this project adds, bridges, a head preview and a prompt bridge, and can be trained like its own schedules:
so they show what the choice of layers is worth.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine import Schedule
from engine.calibration.prompts import (
    PromptCut,
    counted_prompt_bridge,
    fit_prompt_bridge,
    prompt_cut_for,
)
from engine.forward.target import DEFAULT_WARMUP, sample_flop_speedup
from engine.schedules import decays, orders
from pipeline.evaluation.bridged_rivals import RivalBridges, solve
from pipeline.evaluation.contender import Contender
from pipeline.evaluation.rivals import RivalCalibration
from pipeline.monitoring.stage_progress import StageProgress

log = logging.getLogger(__name__)


def whole_sample_rivals(
    target: float, decode_targets: Sequence[float], calibration: RivalCalibration
) -> Iterator[Contender]:
    """The bridged rivals at decode targets, with as many layers on prompts as reach one of the whole sample; decoding
    through all layers with still fewer on prompts; and a pruned model. What cannot reach it is left out, and said so.

    Raises ScheduleError for a decode target out of reach.
    """
    shape, lengths, bridges = calibration.shape, calibration.lengths, RivalBridges(calibration)
    rivals: list[tuple[str, float | None, Schedule]] = [
        (f"{name}, bridged", each, schedule)
        for each in decode_targets
        for name, schedule in solve(each, calibration, bridges)
    ]
    rivals.append(("prompts alone", None, Schedule.full_depth(shape.layers)))
    cuts = [prompt_cut_for(shape, bridges.counted(schedule), lengths, target) for _, _, schedule in rivals]
    schedule, cut = _pruned(target, calibration, bridges)
    rivals.append(("pruned", None, schedule))
    cuts.append(cut)
    fitted = bridges.fitted([schedule for _, _, schedule in rivals])
    for (name, each, _), schedule, cut in zip(rivals, fitted, cuts, strict=True):
        if cut is None:
            log.warning("%s is left out: it cannot reach %gx of the whole sample", name, target)
            continue
        bridge = fit_prompt_bridge(calibration.engine, calibration.prompts, cut, StageProgress(log))
        yield Contender(name, each, replace(schedule, prompt_bridge=bridge), is_rival=True, note=bridges.note)


def _pruned(target: float, calibration: RivalCalibration, bridges: RivalBridges) -> tuple[Schedule, PromptCut | None]:
    """The fewest neighbouring layers, above the lowest ones, that no token runs, neither of prompts nor of answers."""
    shape = calibration.shape
    schedule, order = Schedule.full_depth(shape.layers), orders.lowest_first(shape.layers, DEFAULT_WARMUP)
    for skipped in range(1, shape.layers - DEFAULT_WARMUP - 1):
        schedule = Schedule.build(shape.layers, order, decays.constant(skipped), 0)
        # A prompt bridge leaves out the last layer of prompts besides.
        cut = PromptCut(shape.layers - 1, range(DEFAULT_WARMUP, DEFAULT_WARMUP + skipped), keeps_skipped=False)
        counted = replace(bridges.counted(schedule), prompt_bridge=counted_prompt_bridge(shape, cut))
        if sample_flop_speedup(shape, counted, calibration.lengths) >= target:
            return schedule, cut
    return schedule, None
