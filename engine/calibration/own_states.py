"""Bridges above the first one, fitted on the states that the schedule itself arrives with.

What the first bridge gets wrong reaches the layers above it. Another map takes those states back towards
full depth's: in place of a layer that goes as well, or between two layers, as a correction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from engine.bridge import Bridge
from engine.calibration.moments import Moments, relative
from engine.engine import Engine
from engine.schedule import Schedule
from engine.teacher_forcing import AnswerPass
from engine.unit import Block

KEPT_TOKENS = 1 << 16  # prompt and answer tokens whose keys, values and states stay in memory


class OwnStates:
    """Answers that can pass through schedules as they are built up, as many of them as `KEPT_TOKENS` allows."""

    def __init__(self, engine: Engine, starts: Collection[int]) -> None:
        """`starts`: places below which schedules may leave everything alone; answers then pass from there."""
        self._engine, self._starts, self._room = engine, sorted(starts), KEPT_TOKENS
        self.places = set(range(min(starts), 2 * engine.shape.layers + 1, 2))  # whose states are wanted: before layers
        self._kept: list[tuple[AnswerPass, dict[int, Tensor]]] = []

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
        place = max(place for place in self._starts if place <= schedule.first_place)
        with torch.inference_mode():
            bridges = self._engine.compiled(schedule)
            for answers, states in self._kept:
                x = answers.hidden(schedule, bridges, (place, states[place]), end=start)
                moments.add(x, states, relative(states[end]))
        return moments.fit(end, ridge)
