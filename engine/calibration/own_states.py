"""Bridges above the first one, fitted on the states that the schedule itself arrives with.

What the first bridge gets wrong reaches the layers above it. Another map takes those states back towards
full depth's: in place of a layer that goes as well, or between two layers, as a correction.
"""

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from engine.calibration.moments import Moments, relative
from engine.engine import Engine
from engine.forward.teacher_forcing import AnswerPass
from engine.parts.bridge import Bridge
from engine.parts.unit import Block
from engine.schedules.schedule import Schedule

KEPT_TOKENS = 1 << 16  # prompt and answer tokens whose keys, values and states stay in memory


class OwnStates:
    """Answers that can pass through schedules as they are built up, as many of them as `KEPT_TOKENS` allows."""

    def __init__(self, engine: Engine, starts: Collection[int]) -> None:
        """`starts`: places below which schedules may leave everything alone; answers then pass from there."""
        self._engine, self._starts, self._room = engine, sorted(starts), KEPT_TOKENS
        self.places = set(range(min(starts), 2 * engine.shape.layers + 1, 2))  # whose states are wanted: before layers
        self._kept: list[tuple[AnswerPass, dict[int, Tensor]]] = []
        self._arrived: tuple[Schedule, list[dict[int, Tensor]]] | None = None  # by the last schedule and place, of each

    def keep(self, answers: AnswerPass, states: Mapping[int, Tensor]) -> None:
        """Answers after their prompts, with full depth's states [N, hidden] at all `places`; once full, nothing."""
        self._room -= sum(len(answer.prompt) + len(answer.tokens) for answer in answers.answers)
        if self._room >= 0 or not self._kept:
            self._kept.append((answers, {place: states[place] for place in self.places}))

    def fit(self, schedule: Schedule, block: Block, ridge: float) -> Bridge:
        """The affine bridge from the states that tokens arrive with under a schedule to full depth's after the block.

        Args:
            schedule: with bridges below the block only.
            block: of whole layers, to replace; where it is empty, the bridge is a correction.
            ridge: as for `Moments.fit`.
        """
        start, end = block.first.place, block.last.place + 1
        moments = Moments(start, (end,), self._engine.shape.hidden, self._engine.device)
        with torch.inference_mode():
            for x, (_, states) in zip(self._arriving(schedule, start), self._kept, strict=True):
                moments.add(x, states, relative(states[end]))
        return moments.fit(end, ridge)

    def _arriving(self, schedule: Schedule, place: int) -> Iterator[Tensor]:
        """States [N, hidden] of each of the kept under a schedule, going on from where calls before left them."""
        if self._arrived is None or self._arrived[0] != schedule:
            start = max(start for start in self._starts if start <= schedule.first_place)
            self._arrived = schedule, [{start: states[start]} for _, states in self._kept]
        compiled = self._engine.compiled(schedule)
        for (answers, _), arrived in zip(self._kept, self._arrived[1], strict=True):
            if place not in arrived:
                below = max(passed for passed in arrived if passed < place)
                arrived[place] = answers.hidden(schedule, compiled, (below, arrived[below]), end=place)
            yield arrived[place]
