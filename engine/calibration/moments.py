"""Streaming sums for ridge regressions: their size does not depend on the number of tokens."""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Self

import torch
from torch import Tensor

from engine.errors import ScheduleError
from engine.parts.bridge import Bridge
from engine.parts.part import rounded
from engine.parts.unit import Block, Unit


class RidgeSums:
    """Sums over tokens of X'X and X'Y, X [n, d] being the same for several Y [n, e].

    In float64: hidden states have a few very large entries.
    """

    def __init__(self, inputs: int, outputs: Mapping[int, int], device: torch.device) -> None:
        """`inputs` is d, `outputs` the e of each Y, by its key."""
        self.count = 0.0  # tokens, or the sum of their weights
        self._xx = torch.zeros(inputs, inputs, dtype=torch.float64, device=device)
        self._sum_x = self._xx.new_zeros(inputs)
        self._sum_y = {key: self._xx.new_zeros(width) for key, width in outputs.items()}
        self._xy = {key: self._xx.new_zeros(inputs, width) for key, width in outputs.items()}

    def add_inputs(self, x: Tensor, weights: Tensor | None = None) -> None:
        """X of some tokens, whose Y are to follow; `weights` [n] are theirs, default 1 each."""
        x = x.double()
        self._weights = torch.ones(len(x), dtype=x.dtype, device=x.device) if weights is None else weights.double()
        self._weighted = x * self._weights[:, None]
        self.count += float(self._weights.sum())
        self._sum_x += self._weighted.sum(0)
        self._xx += self._weighted.T @ x

    def add_outputs(self, key: int, y: Tensor) -> None:
        """A Y of the same tokens."""
        self._sum_y[key] += self._weights @ y.double()
        self._xy[key] += self._weighted.T @ y.double()

    def merged(self, other: Self) -> Self:
        """The sums over the tokens of both."""
        both = copy(self)
        both.count, both._sum_x, both._xx = self.count + other.count, self._sum_x + other._sum_x, self._xx + other._xx
        both._sum_y = {key: sums + other._sum_y[key] for key, sums in self._sum_y.items()}
        both._xy = {key: sums + other._xy[key] for key, sums in self._xy.items()}
        return both

    def solve(self, keys: Sequence[int], ridge: float, gain: float = 1.0) -> tuple[Tensor, Tensor]:
        """W [d, e] and b [e] with the least ridge loss for these Y side by side, W then scaled.

        With Xc, Yc the centred X and Y, C = Xc'Xc: W = gain (C + ridge trace(C)/d I)^-1 Xc'Yc, b = mean(Y) - mean(X) W.

        Raises ScheduleError where all X are the same.

        Args:
            keys: of the Y.
            ridge: relative to the mean variance of an entry of X.
            gain: a regression predicts less variance than there is, while the layers above expect states that are
                spread as they know them; a little more than 1 brings them closer to full depth.
        """
        mean_x = self._sum_x / self.count
        mean_y = torch.cat([self._sum_y[key] for key in keys]) / self.count
        covariance = self._xx - self.count * torch.outer(mean_x, mean_x)
        cross = torch.cat([self._xy[key] for key in keys], 1) - self.count * torch.outer(mean_x, mean_y)
        penalty = ridge * covariance.trace() / len(mean_x)
        factor, failed = torch.linalg.cholesky_ex(covariance + penalty * torch.eye(len(mean_x), device=mean_x.device))
        if failed:
            raise ScheduleError(
                "the states of these tokens are all alike, nothing can be fitted to them: name more prompts"
            )
        weight = gain * torch.cholesky_solve(cross, factor)
        return weight, mean_y - mean_x @ weight


class Moments(RidgeSums):
    """What bridges are fitted from: X is the state at `start`, Y = state(end) - X for each of `ends`.

    Places are positions of units in running order.
    """

    def __init__(self, start: int, ends: tuple[int, ...], hidden: int, device: torch.device) -> None:
        super().__init__(hidden, dict.fromkeys(ends, hidden), device)
        self.start, self.ends = start, ends

    def add(self, x: Tensor, after: Mapping[int, Tensor], weights: Tensor | None = None) -> None:
        """Count in tokens of these hidden states [n, hidden] at `start` and, by place, at all `ends`; weights are [n],
        default 1 each.
        """
        self.add_inputs(x, weights)
        for end in self.ends:
            self.add_outputs(end, after[end].double() - x.double())

    def fit(self, end: int, ridge: float, gain: float = 1.0) -> Bridge:
        """The affine bridge from `start` to `end`, one of `ends`; other arguments as for `RidgeSums.solve`."""
        weight, bias = self.solve([end], ridge, gain)
        return Bridge.affine(Block(Unit.at(self.start), Unit.at(end - 1)), rounded(weight), rounded(bias))


def relative(states: Tensor) -> Tensor:
    """Weights [n] of tokens by their states [n, hidden] after a bridge: one over the mean square.

    The layers above see states after an RMS norm: an error counts in relation to the state's size.
    """
    return 1 / states.double().square().mean(-1)
