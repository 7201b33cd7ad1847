"""Rivals: published ways to spend fewer decode FLOPs, each solved for a target on the lengths really generated.

From which description each is built, and what of the original is unknown or left out, stands in docs/evaluating.md.
Solving takes minutes: what was solved is kept, and a rerun goes straight to what is missing.
"""

import hashlib
import json
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import TypeAdapter

from engine import EarlyExit, Engine, ModelShape, Sampling, Schedule, ScheduleError, __version__, for_target_speedup
from engine.decoding.early_exit import Kind, cheapest_check
from engine.schedules import decays, orders
from pipeline.evaluation.contender import Contender
from pipeline.evaluation.study import in_order
from pipeline.storage.records import LARGE, Record
from pipeline.storage.storage import Storage

log = logging.getLogger(__name__)

WARMUPS = range(1, 7)  # bottom layers that SkipDecode always runs: the best on the calibration prompts is taken
EXIT_PROMPTS = 16  # on which the threshold of an exit rule is solved, generating freely at each trial
FORMAT = 2  # of the records
TOLERANCE = 0.01  # share of the target by which an exit rule may miss it


@dataclass(frozen=True)
class RivalCalibration:
    """What rivals may look at before they are judged: prompts apart from the test's, and full depth's answers."""

    engine: Engine
    sampling: Sampling
    prompts: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]]

    @classmethod
    def measure(
        cls, engine: Engine, sampling: Sampling, prompts: Sequence[Sequence[int]], batch_size: int = 32
    ) -> Self:
        """Let full depth answer the prompts."""
        found = in_order(engine.generate(prompts, sampling, batch_size=batch_size))
        return cls(engine, sampling, prompts, [generation.tokens for generation in found])

    @property
    def shape(self) -> ModelShape:
        return self.engine.shape

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """(prompt tokens, generated tokens) of each answer."""
        return [(len(prompt), len(answer)) for prompt, answer in zip(self.prompts, self.answers, strict=True)]

    @property
    def horizon(self) -> int:
        """Decode passes of the longest answer allowed."""
        return self.sampling.max_new_tokens - 1

    @cached_property
    def similarity(self) -> orders.Order:
        return orders.most_similar_first(self.engine.unit_similarity(self.prompts, self.answers))

    def kl(self, schedules: Sequence[Schedule]) -> list[float]:
        """Mean KL divergence from full depth per decode token."""
        scores = self.engine.score(self.prompts, self.answers, schedules).schedules
        return [float(np.mean([kl for score in row for kl in score.kl])) for row in scores]


Rival = Callable[[RivalCalibration, float], Contender]


def _constant(
    name: str, order: Callable[[RivalCalibration], orders.Order], calibration: RivalCalibration, target: float
) -> Contender:
    """The same units at every step, those that come first in an order."""
    schedule = for_target_speedup(target, calibration.lengths, calibration.shape, order(calibration))
    return Contender(name, target, schedule, is_rival=True)


def _best_warmup(
    name: str, decay: Callable[[int, int], decays.Decay], calibration: RivalCalibration, target: float
) -> Contender:
    """The schedule of SkipDecode's order and a decay, given its horizon and floor, with the lowest calibration KL; what
    was tried is its note.
    """
    layers, lengths, horizon = calibration.shape.layers, calibration.lengths, calibration.horizon
    decay_to = partial(decay, horizon)
    options: dict[int, Schedule] = {}
    for warmup in WARMUPS:
        order = orders.lowest_first(layers, min(warmup, layers))
        try:
            options[warmup] = for_target_speedup(target, lengths, calibration.shape, order, decay_to, horizon)
        except ScheduleError as error:
            out_of_reach = error
    if not options:
        raise out_of_reach
    kl = dict(zip(options, calibration.kl(list(options.values())), strict=True))
    best = min(kl, key=lambda warmup: kl[warmup])
    tried = ", ".join(f"{warmup}: {value:.2f}" for warmup, value in kl.items())
    note = f"warm-up {best}; calibration KL by warm-up: {tried}"
    return Contender(name, target, options[best], is_rival=True, note=note)


def _exits(kind: Kind, calibration: RivalCalibration, target: float) -> Contender:
    """An exit rule of one check whose threshold meets the target on freely generated calibration answers."""
    context = int(np.mean([prompt + generated / 2 for prompt, generated in calibration.lengths]))
    check = cheapest_check(calibration.shape, kind, target, context)
    prompts = calibration.prompts[:EXIT_PROMPTS]

    def generated(threshold: float) -> tuple[float, list[float]]:
        """The speed-up with a threshold, and the confidences seen."""
        rule, confidences = EarlyExit(kind, (check,), threshold), list[float]()
        found = list(
            calibration.engine.generate_with_exits(
                prompts, calibration.sampling, rule, len(prompts), on_confidences=confidences.extend
            )
        )
        full = sum(generation.flops_decode_full_depth for generation in found)
        return full / max(1, sum(generation.flops_decode for generation in found)), confidences

    seen = generated(2.0)[1]
    if not seen:
        raise ScheduleError("no answer to the calibration prompts has a decode step")
    # Thresholds between the confidences seen: the share of tokens that leave falls along them.
    thresholds = np.quantile(seen, np.linspace(0, 1, 61)).tolist()
    speedup = cache(lambda threshold: generated(threshold)[0])
    reaching = bisect_left(thresholds, True, key=lambda threshold: speedup(threshold) < target * (1 - TOLERANCE))
    if not reaching:
        raise ScheduleError(f"with a check after layer {check} it stays below {target:g}x at every threshold")
    threshold = thresholds[reaching - 1]
    reached = speedup(threshold)
    note = f"one check after {check} layers, threshold {threshold:.3f}, {reached:.2f}x on the calibration prompts"
    return Contender(kind, target, EarlyExit(kind, (check,), threshold), is_rival=True, note=note)


def skipdecode_ramp(horizon: int, floor: int) -> decays.Decay:
    """From half of its floor, as the paper's is: for 2x, 22 of 32 layers run at first and 11 at last."""
    return decays.linear(floor // 2, floor, horizon)


RIVALS: dict[str, Rival] = {
    "skipdecode": partial(_best_warmup, "SkipDecode", skipdecode_ramp),
    "early-termination": partial(_constant, "early termination", lambda each: orders.top_first(each.shape.layers)),
    "unified-layer-skipping": partial(
        _constant, "Unified Layer Skipping", lambda each: orders.evenly_spaced(each.shape.layers)
    ),
    "power-law": partial(_best_warmup, "power-law decay", lambda horizon, floor: decays.power_law(0, floor, horizon)),
    "adaskip": partial(_constant, "AdaSkip", lambda each: each.similarity),
    "calm-dec": partial(_exits, "CALM-DEC"),
    "multi-layer-exit": partial(_exits, "multi-layer exit"),
}


def solve_rival(name: str, target: float, calibration: RivalCalibration) -> Contender | None:
    """A named rival; None, and said so, where it cannot meet the target."""
    try:
        return RIVALS[name](calibration, target)
    except ScheduleError as error:
        log.warning("%s at %gx is left out: %s", name, target, error)
        return None


# None stands for a target out of reach.
_KEPT = TypeAdapter[Contender | None](Contender | None)
_RECORD: Record[Contender] = Record(Contender | None, "delete it, and it is solved again", LARGE)


class SolvedRivals:
    """Rivals kept as JSON, under a name made of all that decides them."""

    def __init__(
        self, directory: Path, model_identity: str, sampling: Sampling, prompts: Sequence[Sequence[int]]
    ) -> None:
        """`prompts` are those to calibrate on."""
        self._directory, self._storage = directory, Storage(str(directory))
        self._basis = [FORMAT, __version__, model_identity, sampling.to_dict(), [list(prompt) for prompt in prompts]]

    def solve(
        self, names: Sequence[str], targets: Sequence[float], measure: Callable[[], RivalCalibration]
    ) -> Iterator[Contender]:
        """Each named rival at each target, but for those that cannot meet it, which is said.

        `measure` is called at most once, and only if one of them was not solved before.
        """
        calibration = cache(measure)
        for target in targets:
            for name in names:
                file = self._file(name, target)
                if is_new := not (self._directory / file).exists():
                    self._storage.write(file, _KEPT.dump_json(solve_rival(name, target, calibration()), indent=1))
                solved = _RECORD.read(self._storage, file)
                if solved is not None:
                    yield solved
                elif not is_new:
                    log.warning("%s at %gx is left out: it is out of reach", name, target)

    def _file(self, name: str, target: float) -> str:
        decided = json.dumps([name, target, self._basis])
        return f"{name}-{target:g}x-{hashlib.sha256(decided.encode()).hexdigest()[:12]}.json"
