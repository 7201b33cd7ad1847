"""Fit head previews: the decomposition of the head's matrix that matters for the states it sees."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.models.decoder import Decoder
from engine.parts.head_preview import ROLES, HeadPreview
from engine.parts.part import rounded
from engine.shape import ModelShape

CANDIDATES = 256  # at most, and an eighth of the vocabulary: more take longer than they save on a CPU
RANKS = (1 / 8, 1 / 6, 1 / 4, 1 / 3)  # shares of the head's width that are tried
FLOOR = 1e-6  # added to the second moments, relative to their mean: some directions are hardly ever seen


class HeadStates:
    """Sums over tokens of h'h, h being what the head's matrix multiplies at full depth, in float64."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._weight = decoder.head_weight()
        self._count = 0
        self._hh = torch.zeros(2 * self._weight.shape[1:], dtype=torch.float64, device=self._weight.device)

    @property
    def width(self) -> int:
        """w of `HeadPreview`."""
        return len(self._hh)

    @property
    def ranks(self) -> list[int]:
        """Those worth trying."""
        return ranks_of(self.width)

    def add(self, x: Tensor) -> None:
        """Count in hidden states [N, hidden] after the last layer."""
        h = self._decoder.head_input(x).double()
        self._count += len(h)
        self._hh += h.T @ h

    def fit(self, ranks: Sequence[int]) -> list[HeadPreview]:
        """For each rank the preview with the least mean square error of all logits over the tokens.

        With C = mean(h'h) = L L', of all matrices A of a rank A = down up minimises |(h - h A) W'|^2 for V the
        leading eigenvectors of L' W'W L, as the truncated singular value decomposition of W L: A = L'^-1 V V' L'.

        What rough logits leave out is about normal, with a variance s^2 by token: the mean of exp(logit) is that of the
        rough one times exp(s^2 / 2), so s^2 / 2 is the bias that gives tokens outside the candidates their probability.
        Where logits are c times the products (`Decoder.capped`), the bias among these is c times their variance / 2.
        """
        eye = torch.eye(self.width, dtype=torch.float64, device=self._hh.device)
        moments = self._hh / self._count
        moments += FLOOR * moments.trace() / self.width * eye
        lower, weight = torch.linalg.cholesky(moments), self._weight.float()
        leading = torch.linalg.eigh(lower.T @ (weight.T @ weight).double() @ lower).eigenvectors  # least first
        all_down, all_up = torch.linalg.solve_triangular(lower.T, leading, upper=True), leading.T @ lower.T
        slope = float(self._decoder.capped(weight.new_ones(1)))
        scale = all_down.square().sum(0).sqrt()  # of each direction: both matrices then have entries of one order
        all_down, all_up = all_down / scale, scale[:, None] * all_up
        previews = []
        for rank in ranks:
            down, up = all_down[:, -rank:], all_up[-rank:]
            left_out = (eye - down @ up).T @ moments @ (eye - down @ up)
            bias = slope * (weight @ left_out.float() * weight).sum(-1) / 2
            tensors = zip(ROLES, (down, up, bias), strict=True)
            previews.append(
                HeadPreview(_candidates(len(weight)), {role: rounded(tensor).cpu() for role, tensor in tensors})
            )
        return previews


def ranks_of(width: int) -> list[int]:
    """Of previews worth trying for a head of some width."""
    return sorted({max(1, round(share * width)) for share in RANKS})


def counted_preview(rank: int, shape: ModelShape, width: int) -> HeadPreview:
    """A preview that is only good for counting FLOPs."""
    zeros = torch.zeros(width, rank), torch.zeros(rank, width), torch.zeros(shape.vocab)
    return HeadPreview(_candidates(shape.vocab), dict(zip(ROLES, zeros, strict=True)))


def _candidates(vocab: int) -> int:
    return max(1, min(CANDIDATES, vocab // 8))
