"""Streaming sums for the ridge regression of a bridge: their size does not depend on the number of tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.parts.bridge import Bridge
from engine.parts.part import rounded
from engine.parts.unit import Block, Unit


class Moments:
    """Sums over tokens of X'X and X'Y, X being the state at `start` and Y = state(end) - X for each of `ends`.

    Places are positions of units in running order. In float64: hidden states have a few very large entries.
    """

    def __init__(self, start: int, ends: tuple[int, ...], hidden: int, device: torch.device) -> None:
        self.start, self.ends = start, ends
        self.count = 0.0  # tokens, or the sum of their weights
        zeros = torch.zeros(hidden, hidden, dtype=torch.float64, device=device)
        self._sum_x, self._xx = zeros[0].clone(), zeros.clone()
        self._sum_y = {end: zeros[0].clone() for end in ends}
        self._xy = {end: zeros.clone() for end in ends}

    def add(self, x: Tensor, after: Mapping[int, Tensor], weights: Tensor | None = None) -> None:
        """Count in some tokens.

        Args:
            x: hidden states [n, hidden] at `start`.
            after: place -> hidden states [n, hidden], for all `ends`.
            weights: of the tokens, [n]; default 1 each.
        """
        x = x.double()
        weighted = x if weights is None else x * weights.double()[:, None]
        self.count += len(x) if weights is None else float(weights.sum())
        self._sum_x += weighted.sum(0)
        self._xx += weighted.T @ x
        for end in self.ends:
            y = after[end].double() - x
            self._sum_y[end] += y.sum(0) if weights is None else weights.double() @ y
            self._xy[end] += weighted.T @ y

    def merged(self, other: Moments) -> Moments:
        """The sums over the tokens of both."""
        both = Moments(self.start, self.ends, len(self._sum_x), self._sum_x.device)
        for part in (self, other):
            both.count += part.count
            both._sum_x += part._sum_x
            both._xx += part._xx
            for end in self.ends:
                both._sum_y[end] += part._sum_y[end]
                both._xy[end] += part._xy[end]
        return both

    def fit(self, end: int, ridge: float, gain: float = 1.0) -> Bridge:
        """The affine bridge from `start` to `end` with the least ridge loss, its linear part then scaled.

        With Xc, Yc the centred states, C = Xc'Xc: W = gain (C + ridge trace(C)/d I)^-1 Xc'Yc, b = mean(Y) - mean(X) W.

        Args:
            end: one of `ends`.
            ridge: relative to the mean variance of an entry of X.
            gain: a regression predicts less variance than there is, while the layers above expect states that are
                spread as they know them; a little more than 1 brings them closer to full depth.
        """
        sums = (self._sum_x, self._sum_y[end], self._xx, self._xy[end])
        weight, bias = ridge_map(self.count, *sums, ridge, gain)
        return Bridge.affine(Block(Unit.at(self.start), Unit.at(end - 1)), rounded(weight), rounded(bias))


def relative(states: Tensor) -> Tensor:
    """Weights [n] of tokens by their states [n, hidden] after a bridge: one over the mean square.

    The layers above see states after an RMS norm: an error counts in relation to the state's size.
    """
    return 1 / states.double().square().mean(-1)


def ridge_map(
    count: float, sum_x: Tensor, sum_y: Tensor, xx: Tensor, xy: Tensor, ridge: float, gain: float = 1.0
) -> tuple[Tensor, Tensor]:
    """W [d, e] and b [e] of the formula in `Moments.fit`, from sums over `count` tokens.

    Args:
        count: tokens, or the sum of their weights.
        sum_x, sum_y: [d], [e].
        xx, xy: X'X [d, d], X'Y [d, e].
        ridge, gain: as there.
    """
    mean_x, mean_y = sum_x / count, sum_y / count
    covariance = xx - count * torch.outer(mean_x, mean_x)
    cross = xy - count * torch.outer(mean_x, mean_y)
    penalty = ridge * covariance.trace() / len(mean_x)
    factor = torch.linalg.cholesky(covariance + penalty * torch.eye(len(mean_x), device=mean_x.device))
    weight = gain * torch.cholesky_solve(cross, factor)
    return weight, mean_y - mean_x @ weight
