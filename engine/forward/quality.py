"""How far a schedule's next-token distributions are from full depth's, token by token along known answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.bootstrap import Bootstrap
from engine.forward.divergence import divergence
from engine.forward.operations import Compiled
from engine.forward.teacher_forcing import AnswerPass
from engine.schedules.schedule import Schedule


@dataclass(frozen=True)
class Quality:
    """Per decode token: KL divergence from full depth in nats, and whether the likeliest token is the same."""

    kl: Tensor  # [N]
    agrees: Tensor  # [N], bool
    sample: Tensor  # [N]: whose token

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean())

    @property
    def agreement(self) -> float:
        return float(self.agrees.double().mean())

    def figures(self, seed: int = 0) -> dict[str, float | list[float]]:
        """Means over tokens with 95 % bootstrap intervals; answers are drawn, as tokens of one are not independent."""
        figures: dict[str, float | list[float]] = {}
        tokens = torch.bincount(self.sample).double().numpy()
        bootstrap = Bootstrap(len(tokens), seed)
        for name, values in (("kl", self.kl.double()), ("agreement", self.agrees.double())):
            estimate = bootstrap.ratio(torch.bincount(self.sample, weights=values).numpy(), tokens)
            assert estimate is not None
            value, low, high = (round(figure, 4) for figure in estimate)
            figures |= {name: value, f"{name}_interval": [low, high]}
        return figures


class Judge:
    """Compares schedules with full depth on a fixed set of answers."""

    def __init__(self, answers: AnswerPass, layers: int, places: tuple[int, ...] = ()) -> None:
        """Runs the answers at full depth once.

        Args:
            answers: the held-out ones.
            layers: of the model.
            places: where to keep full-depth states, so that schedules that leave what is below alone start there.
        """
        self._answers, self._layers = answers, layers
        self._states: dict[int, Tensor] = {}

        def keep(place: int, x: Tensor) -> None:
            if place in places:
                self._states[place] = x

        x = answers.hidden(Schedule.full_depth(layers), Compiled(), observe=keep)
        # In half precision: a probability is then off by a thousandth of itself, the divergence by less than that.
        self._full = torch.cat([logits.float().log_softmax(-1).half() for _, logits in answers.logits(x)])

    @property
    def answers(self) -> AnswerPass:
        return self._answers

    def judge(self, schedule: Schedule, compiled: Compiled, answers: AnswerPass | None = None) -> Quality:
        """Teacher-forced quality of a schedule.

        Args:
            schedule: to judge.
            compiled: its bridges and adapted units, on the device.
            answers: the same, after their prompts ran under the schedule's prompt bridge, if it has one.
        """
        passed = answers or self._answers
        place = max((place for place in self._states if place <= schedule.changed_from), default=0)
        start = (place, self._states[place]) if place else None
        x = passed.hidden(schedule, compiled, start)
        kl, agrees = [], []
        for part, logits in passed.scheduled_logits(x, schedule, compiled):
            found = divergence(self._full[part], logits)
            kl.append(found[0])
            agrees.append(found[1])
        return Quality(torch.cat(kl).cpu(), torch.cat(agrees).cpu(), self._answers.sample)
