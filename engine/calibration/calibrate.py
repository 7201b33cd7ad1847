"""Find, for each target speed-up, the bridged schedule that stays closest to full depth on held-out answers.

What its parts bring, and what was left out, stands in docs/calibrating.md.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, TypeVar

import torch

from engine.calibration.bridged import Bridges, Candidate
from engine.calibration.collect import collect_moments
from engine.calibration.head import HeadStates, counted_preview, ranks_of
from engine.calibration.own_states import OwnStates
from engine.calibration.prompts import PromptCut, check_prompt_layers, fit_prompt_bridge, prompt_cut, prompt_cut_for
from engine.calibration.search import DEEPER, DEPTH_STEP, FIRST, MOST_APART, WARMUPS, Found, Search
from engine.engine import Engine
from engine.errors import ScheduleError
from engine.forward.packing import Progress
from engine.forward.quality import Judge, Quality
from engine.forward.target import Lengths, decode_flop_speedup, sample_flop_speedup
from engine.forward.teacher_forcing import Answer
from engine.memory import LEAST_ANSWERS
from engine.parts.head_preview import HeadPreview
from engine.parts.prompt_bridge import PromptBridge
from engine.schedules.schedule import Schedule
from engine.shape import ModelShape

T = TypeVar("T")

log = logging.getLogger(__name__)

# Share of the answers, and how many at most, to choose among candidates and to judge the choice. The rest is fitted on.
CHOOSE, JUDGE = (0.1, 60), (0.15, 200)
CHOOSE_PROMPTS = 150  # that prompt bridges are fitted to while one of them is chosen


class Calibration:
    """One model, its full-depth answers, and candidates compared on them."""

    def __init__(
        self,
        engine: Engine,
        answers: Sequence[Answer],
        targets: Sequence[float],
        progress: Progress,
        prompt_layers: int | None = None,
        whole_head: bool = False,
        sample_targets: Sequence[float] = (),
    ) -> None:
        """Collects the states of full-depth answers.

        Raises ScheduleError for too few, a target that cannot be met, or a number of prompt layers that cannot be.

        Args:
            targets: decode FLOP speed-ups.
            prompt_layers: that all prompt tokens run, as `check_prompt_layers` has it; a prompt bridge takes the place
                of the others.
            whole_head: try no head previews.
            sample_targets: FLOP speed-ups of the whole sample, prompts included; each gets one of the decode targets,
                and as many prompt layers as reach it.
        """
        if len(answers) < LEAST_ANSWERS:
            raise ScheduleError(
                f"calibration needs {LEAST_ANSWERS} answers of two tokens or more, got {len(answers)}: "
                "name more prompts, or give a larger input"
            )
        self._engine, self._progress = engine, progress
        self._shape = shape = engine.shape
        if prompt_layers is not None:
            check_prompt_layers(prompt_layers, shape)
        self._lengths: Lengths = [(len(answer.prompt), len(answer.tokens)) for answer in answers]
        self._shared = engine.shared_tokens
        self._targets = targets
        head = None if whole_head else HeadStates(engine.decoder)
        counted = _previews(shape, whole_head)
        least = [layers for target in targets for layers in _fewest_layers(target, shape, self._lengths, counted)]
        self._check_sample_targets(sample_targets, max(least), counted)
        depths_by = depths_to_try(shape, least)
        ends = {warmup: [warmup + depth for depth in deep] for warmup, deep in depths_by.items()}
        alone = {layer: [layer + 1] for layer in range(max(WARMUPS) + 1, shape.layers - 1)}
        fit, choose, judge = split(answers)
        places = tuple(2 * warmup for warmup in ends)
        own = OwnStates(engine, places)
        fitted = collect_moments(engine, fit, ends | alone, progress, own, head)
        held_out = collect_moments(engine, choose, ends, progress)
        self._final_bridges = Bridges({warmup: fitted[warmup].merged(held_out.pop(warmup)) for warmup in ends}, own)
        with torch.inference_mode():
            everywhere = tuple(range(min(places), 2 * shape.layers, 2))
            chooser = Judge(engine.teacher_forced(choose), everywhere)
            self._judge = Judge(engine.teacher_forced(judge), places)
            if prompt_layers is not None and not sample_targets:  # those that schedules are judged behind run otherwise
                self._judge.answers.prompts.forget_all_but(set())
        self._prompt_layers, self._sample_targets = prompt_layers, sample_targets
        self._chooser, self._prompts = chooser, [answer.prompt for answer in (*fit, *choose)]
        self._fit_prompts = len(fit)  # of these, the first ones
        self._prompt_bridges: dict[tuple[PromptCut, int], PromptBridge] = {}  # by how many prompts, too
        self._found: dict[float, Found] = {}  # by decode target
        bridges, previews = Bridges(fitted, own), head.fit(head.ranks) if head else []
        self._search = Search(engine, fitted, bridges, chooser, depths_by, self._lengths, previews, progress)
        self._fit_tokens = sum(answer.passes for answer in (*fit, *choose))

    def run(self) -> Iterator[Schedule]:
        """The best schedule for each target, in their order: of the whole sample where such are asked for, else of
        decoding. `held_out` of its provenance is of answers that neither fitting nor choosing has seen.
        """
        if self._sample_targets:
            yield from map(self._mixed, self._sample_targets)
        else:
            for target in self._targets:
                best = self._decoding(target).best
                schedule = self._schedule(best)
                if self._prompt_layers is not None:
                    schedule = self._bridged(schedule, prompt_cut(self._shape, self._prompt_layers, [schedule]))
                yield self._calibrated(target, target, best, schedule)

    def _decoding(self, target: float) -> Found:
        """What is best for a decode target, prompts at full depth."""
        if target not in self._found:
            self._found[target] = self._search.best(target)
        return self._found[target]

    def _schedule(self, candidate: Candidate) -> Schedule:
        """A candidate, fitted to all that its choice was fitted to and made by."""
        return self._final_bridges.schedule(self._shape.layers, candidate)

    def _bridged(self, schedule: Schedule, cut: PromptCut | None, fitted_to: int | None = None) -> Schedule:
        """The same with prompts cut so, if at all. Fitted to all prompts, or to so many."""
        if cut is None:
            return schedule
        prompts = self._prompts[:fitted_to]
        key = cut, len(prompts)
        if key not in self._prompt_bridges:
            self._prompt_bridges[key] = fit_prompt_bridge(self._engine, prompts, cut, self._progress)
        return replace(schedule, prompt_bridge=self._prompt_bridges[key])

    def _mixed(self, target: float) -> Schedule:
        """The best mix of both savings for a whole-sample target. Raises ScheduleError."""
        best: tuple[float, float, Candidate, PromptCut | None] | None = None
        fitted_to = min(CHOOSE_PROMPTS, self._fit_prompts)  # none of those that the choice is made by
        for decode_target, candidate in self._candidates():
            schedule, cut = self._search.schedule(candidate), None
            if sample_flop_speedup(self._shape, schedule, self._lengths, self._shared) < target:
                cut = prompt_cut_for(self._shape, schedule, self._lengths, target, self._shared)
                if cut is None:
                    continue
                schedule = self._bridged(schedule, cut, fitted_to)
            quality, layers = self._judged(self._chooser, schedule), cut.layers if cut else self._shape.layers
            log.info(
                "%gx of the whole sample: %gx in decoding, skipped %s, prompts in %d layers: KL %.3f",
                target, decode_target, dict(candidate.growth), layers, quality.mean_kl,
            )  # fmt: skip
            kl = float(quality.kl.sum())  # of whole answers: behind prompts that run as they are, first tokens have 0
            if best is None or kl < best[0]:
                best = kl, decode_target, candidate, cut
        if best is None:
            raise self._mix_out_of_reach(target)
        _, decode_target, candidate, cut = best
        return self._calibrated(target, decode_target, candidate, self._bridged(self._schedule(candidate), cut))

    def _check_sample_targets(
        self, sample_targets: Sequence[float], least: int, previews: Sequence[HeadPreview | None]
    ) -> None:
        """Raises ScheduleError for a speed-up of the whole sample that not even the deepest candidate that the search
        may come to reaches, with as few layers on prompts as there can be.

        Args:
            least: layers that the decode targets need skipped.
            previews: that candidates may have.
        """
        shape, warmup = self._shape, min(WARMUPS)
        alike = len({shape.attention_kind(layer).window for layer in range(shape.layers)}) == 1
        deepest = shape.layers - warmup - 1
        depth = min(deepest, least + DEEPER + MOST_APART) if alike else deepest
        candidates = [replace(Candidate.constant(warmup, depth, *FIRST), head=preview) for preview in previews]
        schedule = max(candidates, key=lambda each: each.speedup(shape, self._lengths)).counted(shape)
        for target in sample_targets:
            decoding_does = sample_flop_speedup(shape, schedule, self._lengths, self._shared) >= target
            if not decoding_does and not prompt_cut_for(shape, schedule, self._lengths, target, self._shared):
                raise self._mix_out_of_reach(target)

    def _mix_out_of_reach(self, target: float) -> ScheduleError:
        decoding = ", ".join(f"{decode_target:g}x" for decode_target in self._targets)
        return ScheduleError(
            f"a speed-up of {target:g}x of the whole sample cannot be met with {decoding} in decoding: ask for less, "
            "or for more in decoding"
        )

    def _candidates(self) -> Iterator[tuple[float, Candidate]]:
        """What decoding may do, by its target: nothing, the best, and the best at one depth: a growth that begins with
        little has prompts keep keys and values of layers that it skips later.
        """
        nothing = Candidate.constant(min(WARMUPS), 0, *FIRST)
        self._found[1.0] = Found(nothing, nothing, nothing)
        yield 1.0, nothing
        for target in self._targets:
            found = self._decoding(target)
            for candidate in dict.fromkeys((found.best, found.constant)):
                yield target, candidate

    def _judged(self, judge: Judge, schedule: Schedule) -> Quality:
        with torch.inference_mode():
            return judge.judge(schedule, self._engine.compiled(schedule))

    def _calibrated(self, target: float, decode_target: float, candidate: Candidate, schedule: Schedule) -> Schedule:
        """With provenance: what was predicted, on how much data, what one bridge and no growth would have given."""
        quality, found = self._judged(self._judge, schedule), self._found[decode_target]
        if not isfinite(quality.mean_kl):
            raise ScheduleError(
                f"at {target:g}x distributions on held-out answers are no numbers: another precision (dtype) may help"
            )

        def chosen(one: Candidate) -> dict[str, float]:
            seen = self._search.chosen(one)
            return {"kl": round(seen.mean_kl, 4), "agreement": round(seen.agreement, 4)}

        provenance: dict[str, Any] = {
            "name": f"bridged, {decode_target:g}x",
            "target_speedup": decode_target,
            "decode_flop_speedup": round(decode_flop_speedup(self._shape, schedule, self._lengths), 4),
            "sample_flop_speedup": round(sample_flop_speedup(self._shape, schedule, self._lengths, self._shared), 4),
            "held_out": {"answers": int(quality.sample.max()) + 1, "tokens": len(quality.kl), **quality.figures()},
            "fit": {
                "tokens": self._fit_tokens,
                "warmup": candidate.warmup,
                "ridge": candidate.ridge,
                "gain": candidate.gain,
                "head_rank": candidate.head.rank if candidate.head else None,
            },
        }
        if schedule.prompt_bridge is None:  # else these are not what it was chosen by
            candidates = {"chosen": candidate, "with_one_bridge": found.one, "with_constant_depth": found.constant}
            provenance |= {name: chosen(one) for name, one in candidates.items()}
        if self._sample_targets:
            provenance["target_sample_speedup"] = target
        return replace(schedule, provenance=provenance)


def check_targets(
    targets: Sequence[float],
    shape: ModelShape,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    whole_head: bool = False,
) -> None:
    """Raises ScheduleError for a decode FLOP speed-up that no answers to these prompts can have, whatever they are."""
    preview = _previews(shape, whole_head)[-1]
    first, last = min(map(len, prompts)), max(map(len, prompts)) + max_new_tokens - 2
    # No answers save more than the token that saves most, which is the first, the last, or where a window fills.
    windows = [shape.attention_kind(layer).window for layer in range(shape.layers)]
    filled = [window - 1 for window in windows if window is not None and first < window - 1 < last]
    speedups = [_speedups(shape, [(context, 2)], preview) for context in {first, last, *filled}]
    most = max((speedup for by_depth in speedups for speedup in by_depth), default=1.0)
    for target in targets:
        if target > most:
            raise _out_of_reach(target, most)


def _previews(shape: ModelShape, whole_head: bool) -> list[HeadPreview | None]:
    """That candidates may have, good for counting FLOPs: none first, the cheapest last."""
    narrow = shape.head_parameters != shape.vocab * shape.hidden  # with a projection to the head's own width
    width = shape.head_parameters // (shape.vocab + shape.hidden * narrow)
    ranks = [] if whole_head else sorted(ranks_of(width), reverse=True)
    return [None, *(counted_preview(rank, shape, width) for rank in ranks)]


def foreseen_depths(
    targets: Sequence[float], shape: ModelShape, prompts: Sequence[int], answer_tokens: int, whole_head: bool
) -> dict[int, list[int]]:
    """`depths_to_try` before answers are there, as if each had all of its tokens; `prompts` are their lengths."""
    lengths, previews = [(tokens, answer_tokens) for tokens in prompts], _previews(shape, whole_head)
    try:
        least = [layers for target in targets for layers in _fewest_layers(target, shape, lengths, previews)]
    except ScheduleError:  # shorter ones may meet it
        least = [shape.layers - min(WARMUPS) - 1]
    return depths_to_try(shape, least)


def depths_to_try(shape: ModelShape, least: Sequence[int]) -> dict[int, list[int]]:
    """Layers that a first block may have, by its warm-up, where targets need these at the least."""
    deepest = min(max(least) + DEEPER, shape.layers - min(WARMUPS) - 1)
    depths = {*range(DEPTH_STEP, deepest + 1, DEPTH_STEP)}
    depths |= {layers - fewer for layers in least for fewer in range(min(MOST_APART + 1, layers))}
    by_warmup = {warmup: sorted(depth for depth in depths if warmup + depth < shape.layers) for warmup in WARMUPS}
    return {warmup: deep for warmup, deep in by_warmup.items() if deep}  # a shallow model has no room for some


def _fewest_layers(
    target: float, shape: ModelShape, lengths: Lengths, previews: Sequence[HeadPreview | None]
) -> list[int]:
    """To skip at every step, behind one bridge as low as possible, with each head preview that the target can be met
    with. Raises ScheduleError where it can't with any.
    """
    least, most = [], 1.0
    for preview in previews:
        for depth, speedup in enumerate(_speedups(shape, lengths, preview), 1):
            most = max(most, speedup)
            if speedup >= target:
                least.append(depth)
                break
    if not least:
        raise _out_of_reach(target, most)
    return least


def _speedups(shape: ModelShape, lengths: Lengths, preview: HeadPreview | None) -> Iterator[float]:
    """Decode FLOP speed-ups with 1, 2, ... layers skipped at every step, behind one bridge as low as possible."""
    warmup = min(WARMUPS)
    for depth in range(1, shape.layers - warmup):
        yield replace(Candidate.constant(warmup, depth, *FIRST), head=preview).speedup(shape, lengths)


def _out_of_reach(target: float, most: float) -> ScheduleError:
    return ScheduleError(f"a decode FLOP speed-up of {target:g}x cannot be met, {most:.2f}x is the most: ask for less")


def split(answers: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
    """To fit, to choose and to judge by."""
    choose, judge = (max(1, min(most, round(share * len(answers)))) for share, most in (CHOOSE, JUDGE))
    fit = len(answers) - choose - judge
    return list(answers[:fit]), list(answers[fit : fit + choose]), list(answers[fit + choose :])
