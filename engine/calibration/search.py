"""The search: which candidate comes closest to full depth at a target speed-up, on answers to choose by."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from engine.calibration.bridged import Bridges, Candidate
from engine.calibration.growth import Growth, best_growths
from engine.calibration.moments import Moments
from engine.engine import Engine
from engine.errors import ScheduleError
from engine.forward.ledger import Ledger
from engine.forward.packing import Progress
from engine.forward.quality import Judge, Quality
from engine.forward.target import Lengths
from engine.parts.head_preview import HeadPreview
from engine.parts.unit import Block, Unit
from engine.schedules.schedule import Plateau, Schedule

log = logging.getLogger(__name__)

WARMUPS = (2, 3, 4)  # layers below the block that are tried
RIDGES = (1e-3, 1e-2, 1e-1)
GAINS = (1.0, 1.1, 1.2, 1.3, 1.4)
FIRST = (1e-2, 1.2)  # ridge and gain with which blocks and growths are compared
DEPTH_STEP = 2  # layers between the depths that growths are made of
MOST_APART = 3  # bridges above the first
TRIED_LAYERS = 3  # that each of them may replace, those that are missed least
CORRECTED = (2, 3, 4)  # layers above the first block that it may correct: right behind it nothing can be told yet
DEEPER = 4  # layers beyond the constant depth that a growth may end at
TRIED_GROWTHS = 3


@dataclass(frozen=True)
class Found:
    """What the search ended with, and simpler candidates that it came by."""

    best: Candidate
    constant: Candidate  # the same bridges and head at one depth
    one: Candidate  # one bridge at one depth, the whole head where that will do


class Search:
    """Candidates of one model, compared on the answers to choose by."""

    def __init__(
        self,
        engine: Engine,
        moments: Mapping[int, Moments],
        bridges: Bridges,
        chooser: Judge,
        depths: Mapping[int, Sequence[int]],
        lengths: Lengths,
        previews: Sequence[HeadPreview],
        progress: Progress,
    ) -> None:
        """What to search among.

        Args:
            moments: by the layers below a block, of single layers too.
            chooser: has the answers to choose by.
            depths: layers that a first block may have, by its warm-up.
            lengths: of the samples to expect.
            previews: of the head, to try beside the whole of it.
        """
        self._engine, self._moments, self._bridges, self._chooser = engine, moments, bridges, chooser
        self._depths, self._lengths, self._progress = depths, lengths, progress
        self._shape, self._previews = engine.shape, previews
        self._seen: dict[Candidate, Quality] = {}
        self._harms: dict[int, float] = {}

    def best(self, target: float) -> Found:
        """The best candidate for a decode FLOP speed-up. Raises ScheduleError."""
        plain = [Candidate.constant(warmup, 0, *FIRST) for warmup in self._depths]
        for head in (None, *reversed(self._previews)):  # a preview first, the best one, if no depth will do without
            if deep := list(self._as_deep_as_need_be((replace(each, head=head) for each in plain), target)):
                break
        else:
            raise ScheduleError(f"a decode FLOP speed-up of {target:g}x cannot be met: ask for less")
        one = self._tuned(deep)
        constant = self._with_more_bridges(self._with_preview(one, target), target)
        grown = [replace(constant, growth=growth) for growth in self._growths(constant, target)]
        return Found(min([constant, *grown], key=self._choose_kl), constant, one)

    def schedule(self, candidate: Candidate) -> Schedule:
        """A candidate, fitted to nothing that it is chosen by."""
        return self._bridges.schedule(self._shape.layers, candidate)

    def chosen(self, candidate: Candidate) -> Quality:
        """Quality of a candidate on the answers to choose by."""
        if candidate not in self._seen:
            self._seen[candidate] = seen = self._on_choice(self.schedule(candidate))
            log.info(
                "warm-up %d, skipped %s, more bridges: %s, head %s, ridge %g, gain %g: KL %.3f, agreement %.3f",
                candidate.warmup, dict(candidate.growth), ", ".join(map(str, candidate.apart)) or "none",
                f"of rank {candidate.head.rank}" if candidate.head else "whole", candidate.ridge, candidate.gain,
                seen.mean_kl, seen.agreement,
            )  # fmt: skip
        return self._seen[candidate]

    def _choose_kl(self, candidate: Candidate) -> float:
        return self.chosen(candidate).mean_kl

    def _on_choice(self, schedule: Schedule) -> Quality:
        with torch.inference_mode():
            return self._chooser.judge(schedule, self._engine.compiled(schedule))

    def _with_preview(self, one: Candidate, target: float) -> Candidate:
        """With the head preview, if any, behind which fewer skipped layers meet the target best, tuned again."""
        headed = self._as_deep_as_need_be((replace(one, head=preview) for preview in self._previews), target)
        best = min((one, *headed), key=self._choose_kl)
        if best.head == one.head:
            return one
        moved = self._as_deep_as_need_be((replace(best, warmup=warmup) for warmup in self._depths), target)
        return self._tuned([best, *moved])

    def _tuned(self, candidates: Sequence[Candidate]) -> Candidate:
        """The best of them, then its best ridge, then its best gain."""
        best = min(candidates, key=self._choose_kl)
        best = min((replace(best, ridge=ridge) for ridge in RIDGES), key=self._choose_kl)
        return min((replace(best, gain=gain) for gain in GAINS), key=self._choose_kl)

    def _with_more_bridges(self, one: Candidate, target: float) -> Candidate:
        """A constant candidate that meets the target, with bridges above its block for as long as one more helps."""
        best = one
        for done in range(MOST_APART):
            self._progress("trying more bridges", done + 1, MOST_APART)
            apart = [sorted((*best.apart, block), key=lambda each: each.first.place) for block in self._apart(best)]
            more = self._as_deep_as_need_be((replace(best, apart=tuple(each)) for each in apart), target)
            found = min(more, key=self._choose_kl, default=best)
            if self._choose_kl(found) >= self._choose_kl(best):
                break
            best = found
        return best

    def _as_deep_as_need_be(self, candidates: Iterable[Candidate], target: float) -> Iterator[Candidate]:
        """With the first block only so deep that the target is met, those for which some depth will do."""
        for candidate in candidates:
            for depth in self._room_below(candidate.warmup, candidate.apart):
                constant = replace(candidate, growth=((0, depth),))
                if constant.speedup(self._shape, self._lengths) >= target:
                    yield constant
                    break

    def _apart(self, candidate: Candidate) -> list[Block]:
        """What may be bridged besides: the layers above the block that are missed least, corrections soon after it."""
        end, last = max(candidate.ends), self._shape.layers - 1
        taken = {block.first.layer for block in candidate.apart}
        free = [layer for layer in range(end + 1, last) if not taken & {layer - 1, layer, layer + 1}]
        layers = sorted((layer for layer in free if layer in self._moments), key=self._harm)[:TRIED_LAYERS]
        corrected = [end + above for above in CORRECTED if end + above <= last and end + above not in taken]
        return [
            *(Block.of_layers(layer, layer + 1) for layer in layers),
            *(Block.before(Unit("a", layer)) for layer in corrected),
        ]

    def _harm(self, layer: int) -> float:
        """KL divergence when this layer alone is bridged."""
        if layer not in self._harms:
            block = Block.of_layers(layer, layer + 1)
            bridges = {"one": self._moments[layer].fit(2 * layer + 2, FIRST[0])}
            schedule = Schedule(self._shape.layers, block.units, (Plateau(0, 2, ("one",)),), bridges=bridges)
            self._harms[layer] = self._on_choice(schedule).mean_kl
        return self._harms[layer]

    def _room_below(self, warmup: int, apart: tuple[Block, ...]) -> list[int]:
        """Depths of a first block that end below the others."""
        below = min((block.first.layer for block in apart), default=self._shape.layers)
        return [depth for depth in self._depths[warmup] if warmup + depth < below]

    def _growths(self, constant: Candidate, target: float) -> list[Growth]:
        """The growths that look best for a target, from what constant depths behind one bridge do at each step."""
        depths = self._room_below(constant.warmup, constant.apart)
        qualities = {}
        for done, depth in enumerate(depths):
            qualities[depth] = self.chosen(replace(constant, growth=((0, depth),), apart=()))
            self._progress("judging depths", done + 1, len(depths))
        qualities[0] = self.chosen(replace(constant, growth=((0, 0),), apart=()))  # what the head preview does
        ledgers = {
            depth: Ledger(self._shape, replace(constant, growth=((0, depth),)).counted(self._shape))
            for depth in qualities
        }
        full = ledgers[0].full_depth
        budget = sum(full.decode(prompt, generated) for prompt, generated in self._lengths) / target
        steps = self._chooser.answers.step.numpy()
        return best_growths(qualities, steps, ledgers, self._lengths, int(budget), TRIED_GROWTHS)
