"""Rivals that are given bridges: published orders and decays, with an affine map in place of every skipped block.

And a head preview. Both are what this project adds, so these are no published methods: they show how much of the
quality comes from that and how much from the choice of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from engine import Block, Bridge, Schedule, ScheduleError, decode_flop_speedup
from engine.calibration.collect import collect_moments
from engine.calibration.head import HeadStates, counted_preview
from engine.forward.teacher_forcing import Answer
from engine.schedules import decays, orders
from pipeline.evaluation.contender import Contender
from pipeline.evaluation.rivals import RivalCalibration

RIDGE = 1e-3  # of the mean variance; the calibration job's usual choice
SKIPDECODE_WARMUP = 3  # bare, the best warm-up varies; behind a bridge 2 to 4 do about equally well

Layers = tuple[int, int]  # [first, end)


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

    def fitted(self, schedules: Sequence[Schedule]) -> list[Schedule]:
        """Schedules with theirs."""
        bridges = _fit({block for schedule in schedules for block in _blocks(schedule)}, self._calibration, self._head)
        (preview,) = self._head.fit([self._rank])
        return [attach(replace(schedule, head_preview=preview), bridges.__getitem__) for schedule in schedules]

    @property
    def note(self) -> str:
        """How."""
        tokens = sum(len(answer) - 1 for answer in self._calibration.answers)
        return f"bridges and a head preview of rank {self._rank} fitted on {tokens} tokens"


def bridged_rivals(targets: Sequence[float], calibration: RivalCalibration) -> Iterator[Contender]:
    """Early termination, Unified Layer Skipping and SkipDecode at each target, bridged and with a head preview.

    Raises ScheduleError for a target out of reach.
    """
    bridges = RivalBridges(calibration)
    solved = [(name, target, schedule) for target in targets for name, schedule in solve(target, calibration, bridges)]
    fitted = bridges.fitted([schedule for _, _, schedule in solved])
    for (name, target, _), schedule in zip(solved, fitted, strict=True):
        yield Contender(f"{name}, bridged", target, schedule, is_rival=True, note=bridges.note)


def solve(target: float, calibration: RivalCalibration, bridges: RivalBridges) -> Iterator[tuple[str, Schedule]]:
    """Each rival by name, with the lowest floor that meets the target, bridges and preview counted; without them.

    Raises ScheduleError for a target out of reach.
    """
    shape, horizon = calibration.shape, calibration.horizon
    layers = shape.layers
    kinds: dict[str, tuple[orders.Order, Callable[[int], decays.Decay], int]] = {
        "early termination": (orders.top_first(layers), decays.constant, 0),
        "Unified Layer Skipping": (orders.evenly_spaced(layers), decays.constant, 0),
        "SkipDecode": (
            orders.lowest_first(layers, SKIPDECODE_WARMUP),
            lambda floor: decays.linear(floor // 2, floor, horizon),
            horizon,
        ),
    }
    for name, (order, decay, last) in kinds.items():
        for floor in range(1, len(order) + 1):
            schedule = Schedule.build(layers, order, decay(floor), last)
            if decode_flop_speedup(shape, bridges.counted(schedule), calibration.lengths) >= target:
                yield name, schedule
                break
        else:
            raise ScheduleError(f"a decode FLOP speed-up of {target:g}x cannot be met with bridges: ask for less")


def attach(schedule: Schedule, bridge: Callable[[Layers], Bridge]) -> Schedule:
    """The schedule with a bridge in place of every block of neighbouring layers that a plateau skips."""
    named: dict[str, Bridge] = {}
    plateaus = []
    for index, plateau in enumerate(schedule.plateaus):
        names = []
        for block in _skipped_blocks(schedule, index):
            name = f"{block[0]}-{block[1]}"
            names.append(name)
            named.setdefault(name, bridge(block))
        plateaus.append(plateau._replace(bridges=tuple(names)))
    return replace(schedule, plateaus=tuple(plateaus), bridges=named)


def _fit(blocks: set[Layers], calibration: RivalCalibration, head: HeadStates) -> Mapping[Layers, Bridge]:
    """Affine bridges by ridge regression on full-depth states; the head is given what it sees."""
    ends: dict[int, list[int]] = {}
    for first, end in sorted(blocks):
        ends.setdefault(first, []).append(end)
    pairs = zip(calibration.prompts, calibration.answers, strict=True)
    answers = [Answer(prompt, tokens) for prompt, tokens in pairs if len(tokens) > 1]
    moments = collect_moments(calibration.engine, answers, ends, lambda *_: None, head=head)
    return {(first, end): moments[first].fit(2 * end, RIDGE) for first, end in blocks}


def _blocks(schedule: Schedule) -> set[Layers]:
    return {block for index in range(len(schedule.plateaus)) for block in _skipped_blocks(schedule, index)}


def _skipped_blocks(schedule: Schedule, plateau: int) -> list[Layers]:
    """Runs of neighbouring skipped layers, lowest first; both units of a layer are skipped or none."""
    skipped = sorted({unit.layer for unit in schedule.skipped_units(plateau)})
    starts = [layer for layer in skipped if layer - 1 not in skipped]
    ends = [layer + 1 for layer in skipped if layer + 1 not in skipped]
    return list(zip(starts, ends, strict=True))
