"""Find, for each target speed-up, the bridged schedule that stays closest to full depth on held-out answers.

Measured on SmolLM2-135M-Instruct, package descriptions, 15 of 30 layers behind one bridge, 15,000 answer tokens: a gain
of 1.3 takes the KL divergence from 0.79 to 0.71, weighing tokens by their states' size from 0.80 to 0.79; a ridge
between 1e-4 and 1e-2 is all one. What did not help: entries of X scaled to one variance, the state's RMS norm as input
instead of or beside the state, prompt tokens as further data, matching the target's covariance by optimal transport.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.bridge import Bridge
from engine.calibration.bridged import Bridges, Candidate
from engine.calibration.collect import Progress, collect_moments
from engine.calibration.growth import Lengths, best_growths
from engine.calibration.prompts import fit_prompt_bridge
from engine.calibration.quality import Judge, Quality
from engine.engine import Engine
from engine.errors import ScheduleError
from engine.flops import Ledger
from engine.schedule import Schedule
from engine.shape import ModelShape
from engine.target import decode_flop_speedup, sample_flop_speedup
from engine.teacher_forcing import Answer
from engine.unit import Block

log = logging.getLogger(__name__)

WARMUPS = (2, 3, 4)  # layers below the block that are tried
RIDGES = (1e-3, 1e-2, 1e-1)
GAINS = (1.0, 1.1, 1.2, 1.3, 1.4)
FIRST = (1e-2, 1.2)  # ridge and gain with which blocks and growths are compared
DEPTH_STEP = 2  # layers between the depths that growths are made of
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
        self._constant = {target: _layers_for(target, shape, self._lengths) for target in targets}
        deepest = min(max(self._constant.values()) + DEEPER, shape.layers - min(WARMUPS) - 1)
        depths = {*range(DEPTH_STEP, deepest + 1, DEPTH_STEP), *self._constant.values()}
        ends = {
            warmup: sorted(warmup + depth for depth in depths if warmup + depth < shape.layers) for warmup in WARMUPS
        }
        ends = {warmup: up_to for warmup, up_to in ends.items() if up_to}  # a shallow model has no room for some
        fit, choose, judge = _parts(answers)
        fitted = collect_moments(engine, fit, ends, progress)
        held_out = collect_moments(engine, choose, ends, progress)
        self._bridges = Bridges(fitted)
        self._final_bridges = Bridges({warmup: fitted[warmup].merged(held_out[warmup]) for warmup in ends})
        self._depths = {warmup: [end - warmup for end in ends[warmup]] for warmup in ends}
        places = tuple(2 * warmup for warmup in ends)
        with torch.inference_mode():
            self._chooser = Judge(engine.teacher_forced(choose), shape.layers, places)
            self._judge = Judge(engine.teacher_forced(judge), shape.layers, places)
        self._prompt_bridge = self._judged = None
        if prompt_layers is not None:
            prompts = [answer.prompt for answer in (*fit, *choose)]
            self._prompt_bridge = fit_prompt_bridge(engine, prompts, prompt_layers, progress)
            with torch.inference_mode():
                self._judged = engine.teacher_forced(judge, self._prompt_bridge)
        self._seen: dict[Candidate, Quality] = {}
        self.fit_tokens = sum(answer.passes for answer in (*fit, *choose))

    def run(self) -> Iterator[Calibrated]:
        """The best schedule for each target."""
        for target in self._constant:
            yield self._calibrated(target)

    def _calibrated(self, target: float) -> Calibrated:
        skipped = self._constant[target]
        constants = [Candidate.constant(warmup, skipped, *FIRST) for warmup in self._depths]
        constant = min((c for c in constants if skipped in self._depths[c.warmup]), key=self._choose_kl)
        grown = [Candidate(constant.warmup, growth, *FIRST) for growth in self._growths(constant.warmup, target)]
        best = min([constant, *grown], key=self._choose_kl)
        best = min((replace(best, ridge=ridge) for ridge in RIDGES), key=self._choose_kl)
        best = min((replace(best, gain=gain) for gain in GAINS), key=self._choose_kl)
        with torch.inference_mode():
            schedule = self._final_bridges.schedule(self._shape.layers, best)
            schedule = replace(schedule, prompt_bridge=self._prompt_bridge)
            quality = self._judge.judge(schedule, self._engine.compiled_bridges(schedule), self._judged)
        figures = self._figures(target, best, constant, schedule, quality)
        return Calibrated(target, replace(schedule, provenance={"name": f"bridged, {target:g}x", **figures}), quality)

    def _choose_kl(self, candidate: Candidate) -> float:
        return self._chosen(candidate).mean_kl

    def _chosen(self, candidate: Candidate) -> Quality:
        """Quality of a candidate on the answers to choose by."""
        if candidate not in self._seen:
            with torch.inference_mode():
                schedule = self._bridges.schedule(self._shape.layers, candidate)
                self._seen[candidate] = self._chooser.judge(schedule, self._engine.compiled_bridges(schedule))
            seen = self._seen[candidate]
            log.info(
                "warm-up %d, skipped %s, ridge %g, gain %g: KL %.3f, agreement %.3f",
                candidate.warmup, dict(candidate.growth), candidate.ridge, candidate.gain, seen.mean_kl, seen.agreement,
            )  # fmt: skip
        return self._seen[candidate]

    def _growths(self, warmup: int, target: float) -> list[tuple[tuple[int, int], ...]]:
        """The growths that look best for a target, from what constant depths do at each step."""
        depths = self._depths[warmup]
        qualities = {}
        for done, depth in enumerate(depths):
            qualities[depth] = self._chosen(Candidate.constant(warmup, depth, *FIRST))
            self._progress("judging depths", done + 1, len(depths))
        nothing = next(iter(qualities.values()))
        qualities[0] = replace(nothing, kl=torch.zeros_like(nothing.kl), agrees=torch.ones_like(nothing.agrees))
        ledgers = {depth: Ledger(self._shape, self._constant_schedule(warmup, depth)) for depth in qualities}
        full = ledgers[0]
        budget = sum(full.full_depth.decode(prompt, generated) for prompt, generated in self._lengths) / target
        steps = self._chooser.answers.step.numpy()
        return best_growths(qualities, steps, ledgers, self._lengths, int(budget), TRIED_GROWTHS)

    def _constant_schedule(self, warmup: int, depth: int) -> Schedule:
        return self._bridges.schedule(self._shape.layers, Candidate.constant(warmup, depth, *FIRST))

    def _figures(
        self, target: float, best: Candidate, constant: Candidate, schedule: Schedule, quality: Quality
    ) -> dict[str, Any]:
        """Provenance: what was predicted, and on how much data."""
        chosen = self._chosen(constant)
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
            "instead_of_constant": {
                "skipped": constant.growth[0][1],
                "kl": [round(self._choose_kl(best), 4), round(chosen.mean_kl, 4)],
                "agreement": [round(self._chosen(best).agreement, 4), round(chosen.agreement, 4)],
            },
        }


def _parts(answers: Sequence[Answer]) -> tuple[list[Answer], list[Answer], list[Answer]]:
    """To fit, to choose and to judge by."""
    choose, judge = (max(1, min(most, round(share * len(answers)))) for share, most in (CHOOSE, JUDGE))
    fit = len(answers) - choose - judge
    return list(answers[:fit]), list(answers[fit : fit + choose]), list(answers[fit + choose :])


def _layers_for(target: float, shape: ModelShape, lengths: Lengths) -> int:
    """The fewest layers to skip at every step, behind one affine bridge, for a decode FLOP speed-up."""
    zeros = torch.zeros(shape.hidden, shape.hidden), torch.zeros(shape.hidden)
    speedup = 1.0
    for skipped in range(1, shape.layers - min(WARMUPS)):
        candidate = Candidate.constant(min(WARMUPS), skipped, *FIRST)
        end = min(WARMUPS) + skipped
        bridges: Mapping[str, Bridge] = {
            f"{min(WARMUPS)}-{end}": Bridge.affine(Block.of_layers(min(WARMUPS), end), *zeros)
        }
        speedup = decode_flop_speedup(shape, Bridges.assembled(shape.layers, candidate, bridges), lengths)
        if speedup >= target:
            return skipped
    raise ScheduleError(
        f"a decode FLOP speed-up of {target:g}x cannot be met, {speedup:.2f}x is the most: ask for less"
    )
