"""The learning curve of a training, and an early look at where it will end."""

from math import log
from typing import NamedTuple

EARLY = 0.1  # share of the steps after which the estimate is made
ONSET = 2.0  # steps
TINY = 1e-9  # nats: as good as none


class Point(NamedTuple):
    """A point of the learning curve, means over the schedules."""

    step: int  # steps taken
    loss: float | None  # mean of the steps since the last point, in nats per token; None before any
    kl: float  # held-out, nats per token
    agreement: float  # held-out
    seconds: float  # of training, over all sessions


def is_early_look(points: list[Point], steps: int) -> bool:
    """Whether the newest judgement is the first after the early share of the steps, with something left to foresee."""
    done = [point.step for point in points if point.step >= EARLY * steps]
    return len(done) == 1 and done[0] < steps


def reachable_kl(points: list[Point], steps: int) -> float:
    """Held-out KL at the end, in nats per token, if it goes on falling as it has.

    KL(s) = KL(0) (1 + s / 2)^-p, a power law in the steps as learning curves tend to be, p from the first point and the
    newest: an order of magnitude, blind to overfitting.
    """
    first, now = points[0], points[-1]
    exponent = log(max(first.kl, TINY) / max(now.kl, TINY)) / log(1 + now.step / ONSET)
    return first.kl * float((1 + steps / ONSET) ** -exponent)
