"""Fit a prompt bridge: ridge regression of the upper layers' keys and values on the state below them.

Where prompts skip a block, its bridge is fitted first, and these on the states that it leaves.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.calibration.moments import RidgeSums
from engine.engine import Engine
from engine.errors import ScheduleError
from engine.forward.packing import Progress, told_packs
from engine.forward.prompt_pass import PROMPT_TOKENS
from engine.forward.target import DEFAULT_WARMUP, Lengths, sample_flop_speedup
from engine.parts.bridge import Bridge
from engine.parts.part import rounded
from engine.parts.prompt_bridge import ROLES, WITHIN, PromptBridge
from engine.parts.unit import Block, Unit
from engine.schedules.schedule import Schedule
from engine.shape import ModelShape

STATES = -1  # key of a Y that is a state
RIDGE = 1e-3  # relative to the mean variance of an entry of the state


def check_prompt_layers(layers: int, shape: ModelShape) -> None:
    """Raises ScheduleError unless prompts of such a model can run so many layers."""
    if not 1 <= layers < shape.layers:
        raise ScheduleError(f"prompts can run 1 to {shape.layers - 1} of this model's layers, not {layers}")


class PromptCut(NamedTuple):
    """Which layers prompts run."""

    first: int  # layer that they stop before
    skipped: range  # layers that they skip below
    keeps_skipped: bool  # decode tokens run some of these

    @property
    def layers(self) -> int:
        """How many they run."""
        return self.first - len(self.skipped)


def prompt_cut(shape: ModelShape, layers: int, schedules: Iterable[Schedule]) -> PromptCut:
    """Where prompts that run so many layers are best cut: half of the others skipped, half at the top.

    Each half alone moves the answers' distributions further. The skipped ones begin with those that decode tokens skip
    from their first step on under all of the schedules, and may go on above.
    """
    spared = _skipped_by_decoding(schedules)
    start = spared.start if spared else min(DEFAULT_WARMUP, layers)
    skipped = range(start, start + (shape.layers - layers) // 2) if start <= layers else range(0)
    return PromptCut(layers + len(skipped), skipped, not set(skipped) <= set(spared))


def _skipped_by_decoding(schedules: Iterable[Schedule]) -> range:
    """The longest run of layers that decode tokens skip from their first step on, under all of the schedules."""
    sets = [schedule.skipped_units(0) for schedule in schedules]
    longest, start = range(0), 0
    for layer in range(max((unit.layer for units in sets for unit in units), default=0) + 1):
        if not all({Unit("a", layer), Unit("m", layer)} <= units for units in sets):
            start = layer + 1
        elif layer + 1 - start > len(longest):
            longest = range(start, layer + 1)
    return longest


def fit_prompt_bridge(
    engine: Engine, prompts: Sequence[Sequence[int]], cut: PromptCut, progress: Progress
) -> PromptBridge:
    """The prompt bridge with the least ridge loss over the prompts' tokens, in memory that does not grow with them.

    Tokens that prompts share (`Engine.share_prefix`) are never bridged, and not fitted to. Raises ScheduleError if too
    few tokens could be bridged.
    """
    with torch.inference_mode():
        skips, within = _fit_skip(engine, prompts, cut, progress) if cut.skipped else (None, {})
        sums = _PromptSums(engine, range(cut.first, engine.shape.layers))
        for pack in told_packs(prompts, len, PROMPT_TOKENS, "collecting keys and values", progress):
            stopped = engine.stop_prompts(pack, cut.first, skips)
            if len(stopped.others):
                sums.add_inputs(stopped.states)
                engine.observe_prompts(pack, partial(sums.observe, stopped.others))
        return PromptBridge(cut.first, {**sums.maps(ROLES), **within}, skips)


def counted_prompt_bridge(shape: ModelShape, cut: PromptCut) -> PromptBridge:
    """One that says what `fit_prompt_bridge` will cost before it is fitted."""
    hidden, kept = shape.hidden, shape.cache_elements(1)
    block = Block.of_layers(cut.skipped.start, cut.skipped.stop)
    skips = Bridge.affine(block, torch.zeros(hidden, hidden), torch.zeros(hidden)) if cut.skipped else None
    tensors: dict[str, Tensor] = {}
    widths = [(ROLES, shape.layers - cut.first), (WITHIN, len(cut.skipped) if cut.keeps_skipped else 0)]
    for (weight, bias), layers in widths:
        if layers:
            tensors |= {weight: torch.zeros(hidden, layers * kept), bias: torch.zeros(layers * kept)}
    return PromptBridge(cut.first, tensors, skips)


def prompt_cut_for(
    shape: ModelShape, schedule: Schedule, lengths: Lengths, target: float, shared: int
) -> PromptCut | None:
    """The cut with the most layers on prompts with which a schedule without a prompt bridge reaches a whole-sample FLOP
    speed-up, as `sample_flop_speedup` has it of these lengths; None where one layer is too many.
    """
    for layers in range(shape.layers - 1, 0, -1):
        cut = prompt_cut(shape, layers, [schedule])
        counted = replace(schedule, prompt_bridge=counted_prompt_bridge(shape, cut))
        if sample_flop_speedup(shape, counted, lengths, shared) >= target:
            return cut
    return None


def _fit_skip(
    engine: Engine, prompts: Sequence[Sequence[int]], cut: PromptCut, progress: Progress
) -> tuple[Bridge, dict[str, Tensor]]:
    """The affine bridge over the skipped layers for prompt tokens, and what gives their keys and values if need be."""
    start, end = cut.skipped.start, cut.skipped.stop
    sums = _PromptSums(engine, cut.skipped if cut.keeps_skipped else range(0), {STATES: engine.shape.hidden})
    for pack in told_packs(prompts, len, PROMPT_TOKENS, "collecting states", progress):
        states: dict[int, Tensor] = {}
        stopped = engine.stop_prompts(pack, end, observe=states.__setitem__)
        if not len(stopped.others):
            continue
        before = states[2 * start][stopped.others]
        sums.add_inputs(before)
        sums.add_outputs(STATES, stopped.states - before)
        for place, x in states.items():
            sums.observe(stopped.others, place, x)
    skips = Bridge.affine(Block.of_layers(start, end), *sums.stored([STATES]))
    return skips, sums.maps(WITHIN) if cut.keeps_skipped else {}


class _PromptSums(RidgeSums):
    """X is a state of prompts, Y the keys and values of some layers at full depth, by layer."""

    def __init__(self, engine: Engine, layers: range, others: Mapping[int, int] | None = None) -> None:
        """`others`: the widths of further Y, by key."""
        self._decoder, self._layers, shape = engine.decoder, layers, engine.shape
        widths = {**(others or {}), **dict.fromkeys(layers, shape.cache_elements(1))}
        super().__init__(shape.hidden, widths, engine.device)

    def observe(self, rows: Tensor, place: int, x: Tensor) -> None:
        """Y of the same tokens as X: hidden states before a unit at full depth, of which these are some rows."""
        layer, is_mlp = divmod(place, 2)
        if is_mlp or layer not in self._layers:
            return
        k, v = self._decoder.keys_and_values(layer, x[rows])
        self.add_outputs(layer, torch.cat([k.flatten(1), v.flatten(1)], 1))

    def stored(self, keys: Sequence[int]) -> tuple[Tensor, Tensor]:
        """W and b as they are stored; raises ScheduleError where there are too few tokens to say how they vary."""
        if self.count < 2:
            raise ScheduleError(
                "a prompt bridge is fitted to what lies between a prompt's first token and its last, and these prompts "
                "have next to nothing there: name more prompts, or longer ones"
            )
        weight, bias = self.solve(keys, RIDGE)
        return rounded(weight).cpu(), rounded(bias).cpu()

    def maps(self, roles: Sequence[str]) -> dict[str, Tensor]:
        """What gives these keys and values, by the roles of its matrix and bias."""
        return dict(zip(roles, self.stored(self._layers), strict=True))
