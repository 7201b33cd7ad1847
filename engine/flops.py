"""The FLOP ledger: what each sample costs, exactly, on its own true lengths.

One multiply-add counts 2; norms, softmax, rotary and embedding look-ups are not counted; attention is causal.

    decode token    2 (sum active Pa + sum active Pm + H) + 4 c q (active attention units)
    prompt of n     2 n L P + 2 H + 2 L n (n + 1) q

with Pa, Pm, P, H, q as in `ModelShape` and c the context a token attends to, itself included.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from engine.schedule import Schedule
from engine.shape import ModelShape


@dataclass(frozen=True)
class PlateauCost:
    """What one decode token costs on a plateau: `weights + per_context * context` FLOPs."""

    first_step: int
    weights: int
    per_context: int
    active_units: int


@dataclass(frozen=True)
class Ledger:
    """Costs of samples under one schedule. A sample of g generated tokens has g - 1 decode passes."""

    shape: ModelShape
    schedule: Schedule

    @cached_property
    def plateaus(self) -> tuple[PlateauCost, ...]:
        costs = []
        for index, plateau in enumerate(self.schedule.plateaus):
            units = self.schedule.active_units(index)
            attention = sum(unit.kind == "a" for unit in units)
            parameters = (
                attention * self.shape.attention_parameters
                + (len(units) - attention) * self.shape.mlp_parameters
                + self.shape.head_parameters
            )
            costs.append(
                PlateauCost(plateau.first_step, 2 * parameters, 4 * self.shape.query_width * attention, len(units))
            )
        return tuple(costs)

    @cached_property
    def full_depth(self) -> Ledger:
        """The ledger of the same model with nothing skipped."""
        return Ledger(self.shape, Schedule.full_depth(self.shape.layers))

    def prompt(self, tokens: int) -> int:
        """FLOPs of a prompt of n tokens: all layers on all tokens, the head on the last one."""
        s = self.shape
        return (
            2 * tokens * s.layers * s.layer_parameters
            + 2 * s.head_parameters
            + 2 * s.layers * tokens * (tokens + 1) * s.query_width
        )

    def decode(self, prompt_tokens: int, generated_tokens: int) -> int:
        """FLOPs of the g - 1 decode passes; pass t attends to n + t + 1 tokens."""
        total = 0
        for cost, first, last in self._spans(generated_tokens - 1):
            steps = last - first
            contexts = steps * (prompt_tokens + 1) + (first + last - 1) * steps // 2
            total += steps * cost.weights + cost.per_context * contexts
        return total

    def mean_active_layers(self, generated_tokens: int) -> float:
        """Mean depth over the tokens really generated; the first comes from the prompt pass at full depth."""
        if generated_tokens == 0:
            return 0.0
        units = 2 * self.shape.layers + sum(
            (last - first) * cost.active_units for cost, first, last in self._spans(generated_tokens - 1)
        )
        return units / 2 / generated_tokens

    def _spans(self, passes: int) -> list[tuple[PlateauCost, int, int]]:
        """(plateau, first step, step after its last) for the plateaus that `passes` decode passes touch."""
        ends = [cost.first_step for cost in self.plateaus[1:]] + [passes]
        return [
            (cost, cost.first_step, min(end, passes))
            for cost, end in zip(self.plateaus, ends, strict=True)
            if cost.first_step < passes
        ]
