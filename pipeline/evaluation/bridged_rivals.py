"""Rivals that are given what this project adds: published orders and decays with an affine map in place of every
skipped block and a head preview, and for the whole sample a prompt bridge besides.

So these are no published methods: they show how much of the quality comes from that and how much from the choice of
layers. They can be trained like this project's own schedules.

Prompt bridges are fitted for any contender here, rival or not.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

import torch

from engine import Block, Bridge, Engine, Schedule, ScheduleError, for_target_speedup
from engine.calibration.collect import collect_moments
from engine.calibration.head import HeadStates, counted_preview
from engine.calibration.memory import sums_bytes
from engine.calibration.prompts import PromptCut, counted_prompt_bridge, fit_prompt_bridge, prompt_cut, prompt_cut_for
from engine.forward.target import DEFAULT_WARMUP, sample_flop_speedup
from engine.forward.teacher_forcing import Answer
from engine.memory import SHARE, free_bytes
from engine.schedules import decays, orders
from pipeline.evaluation.contender import Contender
from pipeline.evaluation.rivals import RivalCalibration, skipdecode_ramp
from pipeline.monitoring.stage_progress import StageProgress

log = logging.getLogger(__name__)

RIDGE = 1e-3  # of the mean variance; the calibration job's usual choice
SKIPDECODE_WARMUP = 3  # bare, the best warm-up varies; behind a bridge 2 to 4 do about equally well

Layers = tuple[int, int]  # [first, end)
Named = tuple[str, float | None, Schedule]  # with the decode FLOP speed-up that it was made for


class RivalBridges:
    """Fits what rivals are given: an affine bridge for every block that they skip, and a head preview for all.

    Its rank is the largest that calibrating tries, and mostly ends with. All calibration answers are used to fit.
    """

    def __init__(self, calibration: RivalCalibration) -> None:
        self._calibration = calibration
        self._head = HeadStates(calibration.engine.decoder)
        self._rank = max(self._head.ranks)
        shape = calibration.shape
        # Made once: a preview is as large as the vocabulary.
        self._counted_preview = counted_preview(self._rank, shape, self._head.width)
        self._zeros = torch.zeros(shape.hidden, shape.hidden), torch.zeros(shape.hidden)

    def counted(self, schedule: Schedule) -> Schedule:
        """A schedule with what is only good for counting FLOPs."""
        return attach(
            replace(schedule, head_preview=self._counted_preview),
            lambda block: Bridge.affine(Block.of_layers(*block), *self._zeros),
        )

    def fitted(self, rivals: Sequence[Named]) -> list[Contender]:
        """Rivals with theirs, by ridge regression on full-depth states. Raises ScheduleError for too little memory."""
        ends: dict[int, set[int]] = {}
        for _, _, schedule in rivals:
            for index in range(len(schedule.plateaus)):
                for first, end in _skipped_blocks(schedule, index):
                    ends.setdefault(first, set()).add(end)
        pairs = zip(self._calibration.prompts, self._calibration.answers, strict=True)
        answers = [Answer(prompt, tokens) for prompt, tokens in pairs if len(tokens) > 1]
        up_to = {first: sorted(ends[first]) for first in sorted(ends)}
        engine = self._calibration.engine
        taken, free = sums_bytes(engine.shape, up_to), free_bytes(engine.device)
        if taken > SHARE * free:
            raise ScheduleError(
                f"fitting the rivals' bridges takes {taken / 1e9:.1f} GB beside the model, and {free / 1e9:.1f} GB are "
                "free: ask for fewer of target_speedups, or leave bridged_rivals and target_sample_speedup out"
            )
        moments = collect_moments(engine, answers, up_to, StageProgress(log), head=self._head)
        bridges = {(first, end): moments[first].fit(2 * end, RIDGE) for first in up_to for end in up_to[first]}
        (preview,) = self._head.fit([self._rank])
        tokens = sum(len(answer) - 1 for answer in self._calibration.answers)
        note = f"bridges and a head preview of rank {self._rank} fitted on {tokens} tokens"
        return [
            Contender(name, target, attach(replace(bare, head_preview=preview), bridges.__getitem__), True, note)
            for name, target, bare in rivals
        ]


def bridged_rivals(targets: Sequence[float], calibration: RivalCalibration) -> list[Contender]:
    """Early termination, Unified Layer Skipping and SkipDecode at each target, bridged and with a head preview.

    Raises ScheduleError for a target out of reach, or too little memory.
    """
    bridges = RivalBridges(calibration)
    return bridges.fitted(_solve(targets, calibration, bridges))


def whole_sample_rivals(
    target: float, decode_targets: Sequence[float], calibration: RivalCalibration
) -> Iterator[Contender]:
    """The bridged rivals at decode targets, with as many layers on prompts as reach one of the whole sample; decoding
    through all layers with still fewer on prompts; and a pruned model. What cannot reach it is left out, and said so.

    Raises ScheduleError for a decode target out of reach, or too little memory.
    """
    shape, lengths, bridges = calibration.shape, calibration.lengths, RivalBridges(calibration)
    rivals = _solve(decode_targets, calibration, bridges)
    rivals.append(("prompts alone", None, Schedule.full_depth(shape.layers)))
    shared = calibration.engine.shared_tokens
    cuts = [prompt_cut_for(shape, bridges.counted(schedule), lengths, target, shared) for _, _, schedule in rivals]
    pruned, pruned_cut = _pruned(target, calibration, bridges)
    rivals.append(("pruned", None, pruned))
    for rival, cut in zip(bridges.fitted(rivals), [*cuts, pruned_cut], strict=True):
        if cut is None:
            log.warning("%s is left out: it cannot reach %gx of the whole sample", rival.name, target)
            continue
        bridge = fit_prompt_bridge(calibration.engine, calibration.prompts, cut, StageProgress(log))
        assert isinstance(rival.method, Schedule)
        yield replace(rival, method=replace(rival.method, prompt_bridge=bridge))


def with_shorter_prompts(
    contenders: Sequence[Contender], prompt_layers: Sequence[int], engine: Engine, prompts: Sequence[Sequence[int]]
) -> Iterator[Contender]:
    """Each schedule without a prompt bridge, with one for each number of layers that prompts are to run.

    The bridges are fitted on `prompts`, token ids; adaptive rules are passed over.
    """
    fitted = cache(lambda cut: fit_prompt_bridge(engine, prompts, cut, StageProgress(log)))
    for layers in sorted(set(prompt_layers), reverse=True):
        note = f"prompts run {layers} layers; their bridge is fitted on {len(prompts)} prompts"
        for one in contenders:
            if isinstance(one.method, Schedule) and one.prompt_layers is None:
                bridge = fitted(prompt_cut(engine.shape, layers, [one.method]))
                yield replace(one, method=replace(one.method, prompt_bridge=bridge), note=note)


def _solve(targets: Sequence[float], calibration: RivalCalibration, bridges: RivalBridges) -> list[Named]:
    """Each rival with the lowest floor that meets each target, bridges and preview counted; without them.

    Raises ScheduleError for a target out of reach.
    """
    layers, horizon = calibration.shape.layers, calibration.horizon
    found: list[Named] = []
    upwards, ramp = orders.lowest_first(layers, SKIPDECODE_WARMUP), partial(skipdecode_ramp, horizon)
    for target in targets:
        solve = partial(for_target_speedup, target, calibration.lengths, calibration.shape, counted=bridges.counted)
        found += [
            ("early termination, bridged", target, solve(orders.top_first(layers))),
            ("Unified Layer Skipping, bridged", target, solve(orders.evenly_spaced(layers))),
            ("SkipDecode, bridged", target, solve(upwards, ramp, horizon)),
        ]
    return found


def _pruned(target: float, calibration: RivalCalibration, bridges: RivalBridges) -> tuple[Schedule, PromptCut | None]:
    """The fewest neighbouring layers, above the lowest ones, that no token runs, neither of prompts nor of answers."""
    shape = calibration.shape
    schedule, order = Schedule.full_depth(shape.layers), orders.lowest_first(shape.layers, DEFAULT_WARMUP)
    for skipped in range(1, shape.layers - DEFAULT_WARMUP - 1):
        schedule = Schedule.build(shape.layers, order, decays.constant(skipped), 0)
        # A prompt bridge leaves out the last layer of prompts besides.
        cut = PromptCut(shape.layers - 1, range(DEFAULT_WARMUP, DEFAULT_WARMUP + skipped), keeps_skipped=False)
        counted = replace(bridges.counted(schedule), prompt_bridge=counted_prompt_bridge(shape, cut))
        if sample_flop_speedup(shape, counted, calibration.lengths, calibration.engine.shared_tokens) >= target:
            return schedule, cut
    return schedule, None


def attach(schedule: Schedule, bridge: Callable[[Layers], Bridge]) -> Schedule:
    """The schedule with a bridge in place of every block of neighbouring layers that a plateau skips."""
    named: dict[str, Bridge] = {}
    plateaus = []
    for index, plateau in enumerate(schedule.plateaus):
        blocks = {f"{first}-{end}": (first, end) for first, end in _skipped_blocks(schedule, index)}
        named |= {name: bridge(block) for name, block in blocks.items() if name not in named}
        plateaus.append(plateau._replace(bridges=tuple(blocks)))
    return replace(schedule, plateaus=tuple(plateaus), bridges=named)


def _skipped_blocks(schedule: Schedule, plateau: int) -> list[Layers]:
    """Runs of neighbouring skipped layers, lowest first; both units of a layer are skipped or none."""
    skipped = sorted({unit.layer for unit in schedule.skipped_units(plateau)})
    starts = [layer for layer in skipped if layer - 1 not in skipped]
    ends = [layer + 1 for layer in skipped if layer + 1 not in skipped]
    return list(zip(starts, ends, strict=True))
