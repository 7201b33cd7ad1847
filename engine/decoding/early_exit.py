"""Token-level early exit: each token of each sample leaves at a layer of its own. Rivals to schedules, for comparison.

CALM (Schuster et al., arXiv 2207.07061), in the decoder-only form that SkipDecode (arXiv 2307.02628) compares with as
CALM-DEC, and SkipDecode's multi-layer exit. Samples leave at different depths, so on a device their batch would wait
for the deepest. Here a batch runs every layer and masks those that have left: the outputs and FLOPs are those of
running sample by sample, the time is not, and no speed is claimed from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.decoding.batch import Batch, BatchContext, Sample
from engine.forward.ledger import Ledger
from engine.forward.operations import Operation
from engine.models.decoder import Attend, Rotations
from engine.schedules.schedule import Schedule
from engine.shape import ModelShape

Kind = Literal["CALM-DEC", "multi-layer exit"]


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """A token leaves at the first check whose confidence reaches the threshold.

    The confidence is CALM's softmax response: the difference between the two largest probabilities that the final norm
    and the vocabulary head make of the hidden state. Later tokens attend to keys and values of every layer. For a layer
    above the exit they come from the state that left ("CALM-DEC": hidden-state propagation, only the two projections
    are computed), or from running the attention blocks on, without the MLP blocks ("multi-layer exit").
    """

    kind: Kind
    checks: tuple[int, ...]  # layers that have run when confidence is looked at; each check costs a vocabulary head
    threshold: float  # from 0, leave at the first check, to above 1, never

    def __post_init__(self) -> None:
        if not self.checks or list(self.checks) != sorted(set(self.checks)) or self.checks[0] < 1:
            raise ValueError(f"checks must be increasing numbers of layers from 1 on, got {self.checks}")

    def token_flops(self, shape: ModelShape, depth: int, context: int) -> int:
        """FLOPs of a decode token that left after `depth` layers and attends to `context` tokens, itself included."""
        checked = sum(check <= depth for check in self.checks)
        # The head of the check that lets a token go is also its output; one that stays to the end needs its own.
        heads = checked if depth < shape.layers else checked + 1
        above = shape.layers - depth
        if self.kind == "CALM-DEC":
            attending, filled = depth, above * 2 * shape.hidden * shape.kv_heads * shape.head_dim
        else:
            attending, filled = shape.layers, above * shape.attention_parameters
        parameters = shape.input_parameters + depth * shape.layer_parameters + filled + heads * shape.head_parameters
        seen = sum(min(context, shape.attention_kind(i).window or context) for i in range(attending))
        return 2 * parameters + 4 * shape.query_width * seen


class EarlyExitBatch(Batch):
    """A batch that decodes under an exit rule."""

    def __init__(self, rule: EarlyExit, context: BatchContext, ledger: Ledger, samples: Sequence[Sample]) -> None:
        """`ledger` must be of full depth."""
        super().__init__(context, ledger, samples)
        self._rule = rule
        self._depths: dict[int, list[int]] = {id(sample): [] for sample in self.samples}  # layers run, step by step
        self.confidences: list[float] = []  # of running rows at the first check

    def decode_flops(self, sample: Sample) -> int:
        """What a sample's decode passes cost."""
        shape, prompt = self._decoder.shape, len(sample.prompt)
        depths = self._depths[id(sample)][: max(0, len(sample.tokens) - 1)]
        return sum(self._rule.token_flops(shape, depth, prompt + t + 1) for t, depth in enumerate(depths))

    def mean_active_layers(self, sample: Sample) -> float:
        """As the ledger's: the first token ran every layer."""
        depths = self._depths[id(sample)][: max(0, len(sample.tokens) - 1)]
        return (self._decoder.shape.layers + sum(depths)) / (len(depths) + 1)

    def _run_plan(self, plan: Sequence[Operation], x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """Hidden states [B, hidden] that each row left with."""
        running = torch.tensor([not sample.finished for sample in self._rows], device=self._device)
        layers = self._decoder.shape.layers
        depth = torch.full((len(x),), layers, device=self._device)
        inside = torch.ones(len(x), 1, dtype=torch.bool, device=self._device)  # rows that have not left
        left_with = x
        for layer in range(layers):
            attended = self._decoder.attention(layer, x, rotations, attend)
            above = x if self._rule.kind == "CALM-DEC" else attended
            x = torch.where(inside, self._decoder.mlp(layer, attended), above)
            left_with = torch.where(inside, x, left_with)
            if layer + 1 in self._rule.checks:
                confidence = self._confidence(left_with)
                if layer + 1 == self._rule.checks[0]:
                    self.confidences += confidence[running].tolist()
                leaving = inside & (confidence >= self._rule.threshold)[:, None]
                depth[leaving[:, 0]] = layer + 1
                inside = inside & ~leaving
        for sample, layers_run in zip(self._rows, depth.tolist(), strict=True):
            self._depths[id(sample)].append(layers_run)
        return left_with

    def _confidence(self, x: Tensor) -> Tensor:
        """Difference of the two largest probabilities, [B]."""
        top = self._decoder.logits(x).float().softmax(-1).topk(2).values
        return top[:, 0] - top[:, 1]


def cheapest_check(shape: ModelShape, kind: Kind, target: float, context: int, share: float = 0.75) -> int:
    """Deepest layer at which one check meets a decode FLOP speed-up if this share of the tokens leaves there.

    A check after every layer, as in CALM, costs more than it saves where the vocabulary head weighs several layers.
    Returns 1 where no layer meets it.
    """
    full = Ledger(shape, Schedule.full_depth(shape.layers)).plateaus[0].tokens(context, context)
    for layer in range(shape.layers - 1, 0, -1):
        rule = EarlyExit(kind, (layer,), 0.0)
        mean = share * rule.token_flops(shape, layer, context)
        mean += (1 - share) * rule.token_flops(shape, shape.layers, context)
        if full >= target * mean:
            return layer
    return 1
