"""Contenders whose prompts are cut short too: prompt bridges fitted on calibration prompts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine import Engine, PromptBridge, Schedule
from engine.calibration.prompts import PromptCut, fit_prompt_bridge, prompt_cut
from pipeline.evaluation.contender import Contender
from pipeline.monitoring.stage_progress import StageProgress

log = logging.getLogger(__name__)


def with_shorter_prompts(
    contenders: Sequence[Contender], prompt_layers: Sequence[int], engine: Engine, prompts: Sequence[Sequence[int]]
) -> Iterator[Contender]:
    """Each schedule without a prompt bridge, with one for each number of layers that prompts are to run.

    The bridges are fitted on `prompts`, token ids; adaptive rules are passed over.
    """
    for layers in sorted(set(prompt_layers), reverse=True):
        note = f"prompts run {layers} layers; their bridge is fitted on {len(prompts)} prompts"
        bridges: dict[PromptCut, PromptBridge] = {}
        for one in contenders:
            if isinstance(one.method, Schedule) and one.prompt_layers is None:
                cut = prompt_cut(engine.shape, layers, [one.method])
                if cut not in bridges:
                    bridges[cut] = fit_prompt_bridge(engine, prompts, cut, StageProgress(log))
                yield replace(one, method=replace(one.method, prompt_bridge=bridges[cut]), note=note)
