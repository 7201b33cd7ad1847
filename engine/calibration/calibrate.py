"""Find, for each target speed-up, the bridged schedule that stays closest to full depth on held-out answers.

Measured on SmolLM2-135M-Instruct, package descriptions, 15 of 30 layers behind one bridge, 15,000 answer tokens: a gain
of 1.3 takes the KL divergence from 0.79 to 0.71, weighing tokens by their states' size from 0.80 to 0.79; a ridge
between 1e-4 and 1e-2 is all one. On 10,800 tokens a correction before layer 19 takes it from 0.60 to 0.54, one of the
15 layers taken at 21 or 25 instead to 0.50, both to 0.45; corrections in many places or right behind the block make it
worse. What did not help: entries of X scaled to one variance, the state's RMS norm as input instead of or beside the
state, prompt tokens as further data, matching the target's covariance by optimal transport.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.calibration.bridged import Bridges, Candidate
from engine.calibration.collect import Progress, collect_moments
from engine.calibration.growth import Growth, Lengths, best_growths
from engine.calibration.own_states import OwnStates
from engine.calibration.prompts import fit_prompt_bridge
from engine.calibration.quality import Judge, Quality
from engine.engine import Engine
from engine.errors import ScheduleError
from engine.flops import Ledger
from engine.schedule import Plateau, Schedule
from engine.target import decode_flop_speedup, sample_flop_speedup
from engine.teacher_forcing import Answer
from engine.unit import Block, Unit

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
# Share of the answers, and how many at most, to choose among candidates and to judge the choice. The rest is fitted on.
CHOOSE, JUDGE = (0.1, 60), (0.15, 200)
LEAST_ANSWERS = 20


@dataclass(frozen=True)
class Calibrated:
    """A schedule, and what was found out about it."""

    target: float
    schedule: Schedule
    quality: Quality  # on answers that neither fitting nor choosing has seen

    def with_provenance(self, **more: object) -> Schedule:
        """The schedule, with more said about where it comes from."""
        return replace(self.schedule, provenance={**self.schedule.provenance, **more})


class Calibration:
    """One model, its full-depth answers, and candidates compared on them."""

    def __init__(
        self,
        engine: Engine,
        answers: Sequence[Answer],
        targets: Sequence[float],
        progress: Progress,
        prompt_layers: int | None = None,
    ) -> None:
        """Collects states.

        Args:
            engine: with the model.
            answers: at full depth.
            targets: decode FLOP speed-ups.
            progress: told what is done of how much.
            prompt_layers: layers that all prompt tokens run; a prompt bridge takes the place of those above.

        Raises:
            ScheduleError: too few answers, a target that cannot be met, or no such number of layers.
        """
        if len(answers) < LEAST_ANSWERS:
            raise ScheduleError(
                f"calibration needs {LEAST_ANSWERS} answers of two tokens or more, got {len(answers)}: "
                "name more prompts"
            )
        self._engine, self._progress = engine, progress
        self._shape = shape = engine.shape
        if prompt_layers is not None and not 1 <= prompt_layers < shape.layers:
            raise ScheduleError(f"prompts can run 1 to {shape.layers - 1} of this model's layers, not {prompt_layers}")
        self._lengths: Lengths = [(len(answer.prompt), len(answer.tokens)) for answer in answers]
        self._targets = targets
        least = [self._layers_for(target) for target in targets]
        deepest = min(max(least) + DEEPER, shape.layers - min(WARMUPS) - 1)
        depths = {*range(DEPTH_STEP, deepest + 1, DEPTH_STEP)}
        depths |= {layers - fewer for layers in least for fewer in range(min(MOST_APART + 1, layers))}
        ends = {
            warmup: sorted(warmup + depth for depth in depths if warmup + depth < shape.layers) for warmup in WARMUPS
        }
        ends = {warmup: up_to for warmup, up_to in ends.items() if up_to}  # a shallow model has no room for some
        self._depths = {warmup: [end - warmup for end in ends[warmup]] for warmup in ends}
        alone = {layer: [layer + 1] for layer in range(max(WARMUPS) + 1, shape.layers - 1)}
        fit, choose, judge = _parts(answers)
        own = OwnStates(engine, [2 * warmup for warmup in ends])
        self._fitted = collect_moments(engine, fit, ends | alone, progress, own)
        held_out = collect_moments(engine, choose, ends, progress)
        self._bridges = Bridges(self._fitted, own)
        self._final_bridges = Bridges({warmup: self._fitted[warmup].merged(held_out[warmup]) for warmup in ends}, own)
        places = tuple(2 * warmup for warmup in ends)
        with torch.inference_mode():
            everywhere = tuple(range(min(places), 2 * shape.layers, 2))
            self._chooser = Judge(engine.teacher_forced(choose), shape.layers, everywhere)
            self._judge = Judge(engine.teacher_forced(judge), shape.layers, places)
        self._prompt_bridge = self._judged = None
        if prompt_layers is not None:
            prompts = [answer.prompt for answer in (*fit, *choose)]
            self._prompt_bridge = fit_prompt_bridge(engine, prompts, prompt_layers, progress)
            with torch.inference_mode():
                self._judged = engine.teacher_forced(judge, self._prompt_bridge)
        self._seen: dict[Candidate, Quality] = {}
        self._harms: dict[int, float] = {}
        self.fit_tokens = sum(answer.passes for answer in (*fit, *choose))

    def run(self) -> Iterator[Calibrated]:
        """The best schedule for each target."""
        for target in self._targets:
            yield self._calibrated(target)

    def _calibrated(self, target: float) -> Calibrated:
        skipped = self._layers_for(target)
        constants = [Candidate.constant(warmup, skipped, *FIRST) for warmup in self._depths]
        one = min((c for c in constants if skipped in self._depths[c.warmup]), key=self._choose_kl)
        one = min((replace(one, ridge=ridge) for ridge in RIDGES), key=self._choose_kl)
        one = min((replace(one, gain=gain) for gain in GAINS), key=self._choose_kl)
        constant = self._with_more_bridges(one, target)
        grown = [replace(constant, growth=growth) for growth in self._growths(constant, target)]
        best = min([constant, *grown], key=self._choose_kl)
        with torch.inference_mode():
            schedule = self._final_bridges.schedule(self._shape.layers, best)
            schedule = replace(schedule, prompt_bridge=self._prompt_bridge)
            quality = self._judge.judge(schedule, self._engine.compiled_bridges(schedule), self._judged)
        figures = self._figures(target, best, (one, constant), schedule, quality)
        return Calibrated(target, replace(schedule, provenance={"name": f"bridged, {target:g}x", **figures}), quality)

    def _choose_kl(self, candidate: Candidate) -> float:
        return self._chosen(candidate).mean_kl

    def _chosen(self, candidate: Candidate) -> Quality:
        """Quality of a candidate on the answers to choose by."""
        if candidate not in self._seen:
            schedule = self._bridges.schedule(self._shape.layers, candidate)
            self._seen[candidate] = seen = self._on_choice(schedule)
            log.info(
                "warm-up %d, skipped %s, more bridges: %s, ridge %g, gain %g: KL %.3f, agreement %.3f",
                candidate.warmup, dict(candidate.growth), ", ".join(map(str, candidate.apart)) or "none",
                candidate.ridge, candidate.gain, seen.mean_kl, seen.agreement,
            )  # fmt: skip
        return self._seen[candidate]

    def _on_choice(self, schedule: Schedule) -> Quality:
        with torch.inference_mode():
            return self._chooser.judge(schedule, self._engine.compiled_bridges(schedule))

    def _with_more_bridges(self, one: Candidate, target: float) -> Candidate:
        """A constant candidate, with bridges above its block for as long as one more brings it closer."""
        best = one
        for done in range(MOST_APART):
            self._progress("trying more bridges", done + 1, MOST_APART)
            more = [self._with_bridge(best, block, target) for block in self._tried_apart(best)]
            found = min((candidate for candidate in more if candidate), key=self._choose_kl, default=best)
            if self._choose_kl(found) >= self._choose_kl(best):
                break
            best = found
        return best

    def _tried_apart(self, candidate: Candidate) -> list[Block]:
        """What may be bridged besides: the layers above the block that are missed least, corrections soon after it."""
        end, last = max(candidate.ends), self._shape.layers - 1
        taken = {block.first.layer for block in candidate.apart}
        free = [layer for layer in range(end + 1, last) if not taken & {layer - 1, layer, layer + 1}]
        layers = sorted((layer for layer in free if layer in self._fitted), key=self._harm)[:TRIED_LAYERS]
        corrected = [end + above for above in CORRECTED if end + above <= last and end + above not in taken]
        return [
            *(Block.of_layers(layer, layer + 1) for layer in layers),
            *(Block.before(Unit("a", layer)) for layer in corrected),
        ]

    def _harm(self, layer: int) -> float:
        """KL divergence when this layer alone is bridged."""
        if layer not in self._harms:
            block = Block.of_layers(layer, layer + 1)
            bridges = {"one": self._fitted[layer].fit(2 * layer + 2, FIRST[0])}
            schedule = Schedule(self._shape.layers, block.units, (Plateau(0, 2, ("one",)),), bridges=bridges)
            self._harms[layer] = self._on_choice(schedule).mean_kl
        return self._harms[layer]

    def _with_bridge(self, candidate: Candidate, block: Block, target: float) -> Candidate | None:
        """With one more, and the first block only as deep as it then must be; None if no depth will do."""
        apart = tuple(sorted((*candidate.apart, block), key=lambda block: block.first.place))
        least = self._least_depth(target, candidate.warmup, apart)
        fits = [depth for depth in self._room_below(candidate.warmup, apart) if least and depth >= least]
        return replace(candidate, growth=((0, min(fits)),), apart=apart) if fits else None

    def _room_below(self, warmup: int, apart: tuple[Block, ...]) -> list[int]:
        """Depths of a first block that end below the others."""
        below = min((block.first.layer for block in apart), default=self._shape.layers)
        return [depth for depth in self._depths[warmup] if warmup + depth < below]

    def _layers_for(self, target: float) -> int:
        """The fewest layers to skip at every step, behind one bridge as low as possible. Raises ScheduleError."""
        warmup = min(WARMUPS)
        depth = self._least_depth(target, warmup)
        if depth is None:
            most = Candidate.constant(warmup, self._shape.layers - warmup - 1, *FIRST).counted(self._shape)
            speedup = decode_flop_speedup(self._shape, most, self._lengths)
            raise ScheduleError(
                f"a decode FLOP speed-up of {target:g}x cannot be met, {speedup:.2f}x is the most: ask for less"
            )
        return depth

    def _least_depth(self, target: float, warmup: int, apart: tuple[Block, ...] = ()) -> int | None:
        """The fewest layers to skip at every step for a decode FLOP speed-up; None if there are not that many."""
        top = min((block.first.layer for block in apart), default=self._shape.layers)
        for depth in range(1, top - warmup):
            schedule = Candidate.constant(warmup, depth, *FIRST, apart).counted(self._shape)
            if decode_flop_speedup(self._shape, schedule, self._lengths) >= target:
                return depth
        return None

    def _growths(self, constant: Candidate, target: float) -> list[Growth]:
        """The growths that look best for a target, from what constant depths behind one bridge do at each step."""
        depths = self._room_below(constant.warmup, constant.apart)
        qualities = {}
        for done, depth in enumerate(depths):
            qualities[depth] = self._chosen(replace(constant, growth=((0, depth),), apart=()))
            self._progress("judging depths", done + 1, len(depths))
        nothing = next(iter(qualities.values()))
        qualities[0] = replace(nothing, kl=torch.zeros_like(nothing.kl), agrees=torch.ones_like(nothing.agrees))
        ledgers = {
            depth: Ledger(self._shape, replace(constant, growth=((0, depth),)).counted(self._shape)) for depth in depths
        }
        full = ledgers[depths[0]].full_depth
        budget = sum(full.full_depth.decode(prompt, generated) for prompt, generated in self._lengths) / target
        steps = self._chooser.answers.step.numpy()
        return best_growths(qualities, steps, ledgers | {0: full}, self._lengths, int(budget), TRIED_GROWTHS)

    def _figures(
        self,
        target: float,
        best: Candidate,
        simpler: tuple[Candidate, Candidate],
        schedule: Schedule,
        quality: Quality,
    ) -> dict[str, Any]:
        """Provenance: what was predicted, on how much data, what one bridge and no growth would have given."""

        def chosen(candidate: Candidate) -> dict[str, float]:
            seen = self._chosen(candidate)
            return {"kl": round(seen.mean_kl, 4), "agreement": round(seen.agreement, 4)}

        return {
            "target_speedup": target,
            "decode_flop_speedup": round(decode_flop_speedup(self._shape, schedule, self._lengths), 4),
            "sample_flop_speedup": round(sample_flop_speedup(self._shape, schedule, self._lengths), 4),
            "held_out": {
                "answers": int(quality.sample.max()) + 1,
                "tokens": len(quality.kl),
                **quality.figures(),
            },
            "fit": {"tokens": self.fit_tokens, "warmup": best.warmup, "ridge": best.ridge, "gain": best.gain},
            "chosen": chosen(best),
            "with_one_bridge": chosen(simpler[0]),
            "with_constant_depth": chosen(simpler[1]),
        }


def _parts(answers: Sequence[Answer]) -> tuple[list[Answer], list[Answer], list[Answer]]:
    """To fit, to choose and to judge by."""
    choose, judge = (max(1, min(most, round(share * len(answers)))) for share, most in (CHOOSE, JUDGE))
    fit = len(answers) - choose - judge
    return list(answers[:fit]), list(answers[fit : fit + choose]), list(answers[fit + choose :])
