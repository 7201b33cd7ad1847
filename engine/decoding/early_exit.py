"""Token-level early exit: each token of each sample leaves at a layer of its own. Rivals to schedules, for comparison.

CALM (Schuster et al., arXiv 2207.07061), in the decoder-only form that SkipDecode (arXiv 2307.02628) compares with as
CALM-DEC, and SkipDecode's multi-layer exit. Samples leave at different depths, so on a device their batch would wait
for the deepest. Here a batch runs every layer and masks those that have left: the outputs and FLOPs are those of
running sample by sample, the time is not, and no speed is claimed from it.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from engine.decoding.generation import Generation, Sample
from engine.decoding.stream import Context, Stream
from engine.forward.ledger import Ledger
from engine.forward.one_pass import OnePass
from engine.forward.operations import RunUnit
from engine.parts.unit import Unit
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


class ExitPass(OnePass):
    """A pass whose decode tokens leave under a rule."""

    def run_until_exit(self, rule: EarlyExit) -> tuple[Tensor, dict[int, int], list[float]]:
        """Hidden states [last + decoding, hidden] that each of these tokens left with; of the decode tokens, the layers
        run, by seat, and the confidences at the first check.
        """
        layers, first = self._plans.schedule.layers, self.bulk + self.last
        confidences: list[float] = []
        x = left_with = self.embedded
        inside = torch.ones(len(x), 1, dtype=torch.bool, device=self._device)  # tokens that have not left
        depths = torch.full((len(x) - first,), layers, device=self._device)  # of decode tokens
        for layer in range(layers):
            attended = self.apply(RunUnit(Unit("a", layer)), x, 0, len(x))
            above = x if rule.kind == "CALM-DEC" else attended
            x = torch.where(inside, self.apply(RunUnit(Unit("m", layer)), attended, 0, len(x)), above)
            left_with = torch.where(inside, x, left_with)
            if layer + 1 in rule.checks and len(depths):
                top = self._decoder.logits(left_with[first:]).float().softmax(-1).topk(2).values
                confidence = top[:, 0] - top[:, 1]
                if layer + 1 == rule.checks[0]:
                    confidences = confidence.tolist()
                leaving = inside[first:, 0] & (confidence >= rule.threshold)
                depths[leaving] = layer + 1
                inside[first:, 0] &= ~leaving
        return left_with[self.bulk :], dict(zip(self._seats[self.last :], depths.tolist(), strict=True)), confidences


class ExitStream(Stream):
    """A stream that decodes under an exit rule; FLOPs and mean depth are those of the layers that tokens really ran."""

    _kind_of_pass = ExitPass

    def __init__(self, rule: EarlyExit, context: Context, ledger: Ledger, batch_size: int) -> None:
        """`ledger` must be of full depth."""
        super().__init__(context, ledger, batch_size)
        self.rule = rule
        self.depths: dict[int, list[int]] = {}  # by seat: layers run, step by step
        self.confidences: list[float] = []  # of decode tokens at the first check

    def _run(self, one: OnePass) -> Tensor:
        assert isinstance(one, ExitPass)
        x, depths, confidences = one.run_until_exit(self.rule)
        for seat, depth in depths.items():
            self.depths.setdefault(seat, []).append(depth)
        self.confidences += confidences
        return x

    def _generation(self, sample: Sample) -> Generation:
        shape, depths = self._decoder.shape, self.depths.pop(sample.seat, [])
        first = len(sample.prompt) + 1
        return replace(
            super()._generation(sample),
            flops_decode=sum(self.rule.token_flops(shape, depth, first + t) for t, depth in enumerate(depths)),
            mean_active_layers=(shape.layers + sum(depths)) / (len(depths) + 1),  # the first token ran every layer
        )


def cheapest_check(shape: ModelShape, kind: Kind, target: float, context: int) -> int:
    """Deepest layer at which one check meets a decode FLOP speed-up if three tokens in four leave there.

    A check after every layer, as in CALM, costs more than it saves where the vocabulary head weighs several layers.
    Returns 1 where no layer meets it.
    """
    full = Ledger(shape, Schedule.full_depth(shape.layers)).plateaus[0].tokens(context, context)
    for layer in range(shape.layers - 1, 0, -1):
        rule = EarlyExit(kind, (layer,), 0.0)
        leave, stay = (rule.token_flops(shape, depth, context) for depth in (layer, shape.layers))
        if full >= target * (3 * leave + stay) / 4:
            return layer
    return 1
