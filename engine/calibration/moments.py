"""Streaming sums for the ridge regression of a bridge: their size does not depend on the number of tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.bridge import Bridge
from engine.unit import Block, Unit


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

    def add(self, states: Mapping[int, Tensor], weights: Tensor | None = None) -> None:
        """Count in some tokens.

        Args:
            states: place -> hidden states [n, hidden], for `start` and all `ends`.
            weights: of the tokens, [n]; default 1 each.
        """
        x = states[self.start].double()
        weighted = x if weights is None else x * weights.double()[:, None]
        self.count += len(x) if weights is None else float(weights.sum())
        self._sum_x += weighted.sum(0)
        self._xx += weighted.T @ x
        for end in self.ends:
            y = states[end].double() - x
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

    def fit(self, end: int, ridge: float) -> Bridge:
        """The affine bridge from `start` to `end` with the least ridge loss.

        With Xc, Yc the centred states, C = Xc'Xc: W = (C + ridge trace(C)/d I)^-1 Xc'Yc and b = mean(Y) - mean(X) W.

        Args:
            end: one of `ends`.
            ridge: relative to the mean variance of an entry of X.
        """
        mean_x, mean_y = self._sum_x / self.count, self._sum_y[end] / self.count
        covariance = self._xx - self.count * torch.outer(mean_x, mean_x)
        cross = self._xy[end] - self.count * torch.outer(mean_x, mean_y)
        penalty = ridge * covariance.trace() / len(mean_x)
        factor = torch.linalg.cholesky(covariance + penalty * torch.eye(len(mean_x), device=mean_x.device))
        weight = torch.cholesky_solve(cross, factor)
        bias = mean_y - mean_x @ weight
        return Bridge.affine(Block(Unit.at(self.start), Unit.at(end - 1)), weight.float(), bias.float())
