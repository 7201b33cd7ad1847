"""The FLOP ledger: what each sample costs, exactly, on its own true lengths.

One multiply-add counts 2; norms, softmax, rotary and embedding look-ups are not counted; attention is causal.

    decode token    2 (sum active Pa + sum active Pm + sum Pb + H) + 4 c q (active attention units)
    prompt of n     2 n L P + 2 H + 2 L n (n + 1) q
    ... bridged     2 n l P + 2 l (n (n + 1) - 2) q + 2 (n - 2) Pk + 4 (L - l) P + 4 (L - l) n q + 2 H

with Pa, Pm, P, H, q as in `ModelShape`, Pb the parameters of each bridge applied, Pk those of a prompt bridge from
layer l on, below which all tokens but the first, which attends to nothing but itself, and the last stop (a block of
layers that prompts skip counts for the first alone, what gives its states, keys and values for the others), H of a
decode token smaller where the schedule has a head preview (`HeadPreview.parameters`), and c the context a token attends
to, itself included: in a layer with a sliding window at most its width. Matrices between the embedding and the first
layer add 2 x their parameters to every token.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from engine.schedules.schedule import Schedule
from engine.shape import ModelShape


@dataclass(frozen=True)
class PlateauCost:
    """What decode tokens cost on a plateau."""

    first_step: int
    weights: int  # FLOPs of a token in all matrices
    attention: tuple[tuple[int | None, int], ...]  # (window, FLOPs per token attended to) of the layers of each window
    active_units: int

    def tokens(self, first: int, last: int) -> int:
        """FLOPs of consecutive tokens, the first attending to `first` tokens, the last to `last`."""
        attention = sum(rate * _sum_contexts(first, last, window) for window, rate in self.attention)
        return (last - first + 1) * self.weights + attention


@dataclass(frozen=True)
class Ledger:
    """Costs of samples under one schedule. A sample of g generated tokens has g - 1 decode passes."""

    shape: ModelShape
    schedule: Schedule

    @cached_property
    def plateaus(self) -> tuple[PlateauCost, ...]:
        costs, preview = [], self.schedule.head_preview
        for index, plateau in enumerate(self.schedule.plateaus):
            units = self.schedule.active_units(index)
            layers = [unit.layer for unit in units if unit.kind == "a"]
            parameters = (
                self.shape.input_parameters
                + len(layers) * self.shape.attention_parameters
                + (len(units) - len(layers)) * self.shape.mlp_parameters
                + sum(bridge.parameters for bridge in self.schedule.bridges_on(index))
                + (preview.parameters(self.shape) if preview else self.shape.head_parameters)
            )
            costs.append(PlateauCost(plateau.first_step, 2 * parameters, self._attention(layers), len(units)))
        return tuple(costs)

    @cached_property
    def full_depth(self) -> "Ledger":
        """The ledger of the same model with nothing skipped."""
        return Ledger(self.shape, Schedule.full_depth(self.shape.layers))

    def prompt(self, tokens: int, shared: int = 0) -> int:
        """FLOPs of a prompt of n tokens: its layers on all but the `shared` first, the head on the last one."""
        return self.prompt_layers(tokens, shared) + 2 * self.shape.head_parameters

    def prefix(self, tokens: int) -> int:
        """FLOPs of tokens that prompts share: all layers, no head."""
        return self.full_depth.prompt_layers(tokens)

    def prompt_layers(self, tokens: int, shared: int = 0) -> int:
        """As `prompt`, without the head."""
        layers, bridge, computed = self.shape.layers, self.schedule.prompt_bridge, tokens - shared
        inputs = 2 * computed * self.shape.input_parameters
        if bridge is None:
            return inputs + self._layers(range(layers), shared + 1, tokens)
        whole = int(shared == 0 and tokens > 1)  # the first token runs every layer, and attends to nothing else
        flops = inputs + whole * 2 * layers * self.shape.layer_parameters
        flops += self._layers(bridge.run_layers, shared + whole + 1, tokens)
        flops += self._layers(range(bridge.first, layers), tokens, tokens)
        flops += 2 * (computed - whole) * bridge.skip_parameters
        return flops + 2 * (computed - whole - 1) * bridge.stop_parameters

    def _layers(self, layers: Sequence[int], first: int, last: int) -> int:
        """FLOPs of layers on a prompt's tokens from `first` to `last`, counted from 1."""
        attention = sum(rate * _sum_contexts(first, last, window) for window, rate in self._attention(layers))
        return 2 * (last - first + 1) * len(layers) * self.shape.layer_parameters + attention

    def decode(self, prompt_tokens: int, generated_tokens: int) -> int:
        """FLOPs of the g - 1 decode passes; pass t attends to n + t + 1 tokens."""
        return sum(
            cost.tokens(prompt_tokens + first + 1, prompt_tokens + last)
            for cost, first, last in self._spans(generated_tokens - 1)
        )

    def mean_active_layers(self, generated_tokens: int) -> float:
        """Mean depth over the tokens really generated; the first comes from the prompt's last token, which runs all
        layers but those that prompts skip.
        """
        if generated_tokens == 0:
            return 0.0
        bridge = self.schedule.prompt_bridge
        skipped = 0 if bridge is None else len(bridge.skipped_layers)
        units = 2 * (self.shape.layers - skipped) + sum(
            (last - first) * cost.active_units for cost, first, last in self._spans(generated_tokens - 1)
        )
        return units / 2 / generated_tokens

    def _attention(self, layers: Iterable[int]) -> tuple[tuple[int | None, int], ...]:
        """FLOPs per token attended to, summed over the given layers of each window."""
        windows = Counter(self.shape.attention_kind(layer).window for layer in layers)
        return tuple((window, 4 * self.shape.query_width * count) for window, count in windows.items())

    def _spans(self, passes: int) -> list[tuple[PlateauCost, int, int]]:
        """(plateau, first step, step after its last) for the plateaus that `passes` decode passes touch."""
        ends = [cost.first_step for cost in self.plateaus[1:]] + [passes]
        return [
            (cost, cost.first_step, min(end, passes))
            for cost, end in zip(self.plateaus, ends, strict=True)
            if cost.first_step < passes
        ]


def _sum_contexts(first: int, last: int, window: int | None) -> int:
    """first + ... + last, none counted as more than the window."""
    inside = last if window is None else min(last, window)
    whole = (first + inside) * (inside - first + 1) // 2 if inside >= first else 0
    beyond = 0 if window is None else window * (last - max(inside, first - 1))
    return whole + beyond
