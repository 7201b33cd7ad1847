"""Prompts through the layers: several laid end to end in one pass, no padding, what they share computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from engine.forward.compiled_parts import PromptMaps, compile_prompt_bridge
from engine.forward.operations import Compiled, Observe, RunUnit, run_plan
from engine.kernels.base import Kernels
from engine.models.decoder import Attend, Decoder, Rotations
from engine.parts.prompt_bridge import PromptBridge
from engine.parts.unit import all_units

PROMPT_TOKENS = 2048  # of prompts in one pass: bounds its activations, and is enough to fill a GEMM

Keep = Callable[[int, int, Tensor, Tensor], None]  # layer, which prompt, its keys and values [n, kv_heads, head_dim]


@dataclass(frozen=True)
class Prefix:
    """Tokens that many prompts begin with, and what every layer keeps of them."""

    tokens: tuple[int, ...]
    layers: tuple[tuple[Tensor, Tensor], ...]  # keys and values [p, kv_heads, head_dim]

    def shared(self, prompt: Sequence[int]) -> int:
        """How many of a prompt's tokens need not be computed."""
        return shared_tokens(self.tokens, prompt)


def shared_tokens(prefix: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens a prompt takes from a prefix: all or none, and never the prompt's last one."""
    length = len(prefix)
    return length if len(prompt) > length and tuple(prompt[:length]) == tuple(prefix) else 0


class PromptPass:
    """Passes over prompts, on one device."""

    def __init__(self, decoder: Decoder, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        self._decoder, self._kernels, self._dtype, self._device = decoder, kernels, dtype, device
        self.prefix: Prefix | None = None
        self._bridge: tuple[PromptBridge, PromptMaps] | None = None  # the last one

    def share(self, tokens: Sequence[int]) -> bool:
        """Compute a prefix for the prompts to come; none forgets the last.

        Returns False where there is none, it fills the context, or its keys would depend on what follows it.
        """
        self.prefix = None
        context = self._decoder.shape.context
        if not 0 < len(tokens) < context:
            return False
        positions = torch.arange(len(tokens), device=self._device)
        alone = self._decoder.rotations(positions, torch.full_like(positions, len(tokens)))
        longest = self._decoder.rotations(positions, torch.full_like(positions, context))
        if not all(torch.equal(*pair) for pair in zip(alone, longest, strict=True)):
            return False
        layers: list[tuple[Tensor, Tensor]] = []
        # Copies: a view of the fused projection would keep the queries too.
        self.run([tokens], lambda _layer, _, k, v: layers.append((k.clone(), v.clone())))
        self.prefix = Prefix(tuple(tokens), tuple(layers))
        return True

    def shared(self, prompt: Sequence[int]) -> int:
        """How many of a prompt's tokens the prefix has computed."""
        return self.prefix.shared(prompt) if self.prefix else 0

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        keep: Keep,
        bridge: PromptBridge | None = None,
        observe: Observe | None = None,
    ) -> Tensor:
        """Hidden states [P, hidden] of the last token of each of P prompts.

        Args:
            prompts: token ids. Those that begin with the prefix compute only their other tokens.
            keep: told of every layer's keys and values, views of what the pass computes.
            bridge: default full depth.
            observe: called with the place of each unit that all tokens run and the hidden states [N, hidden] before
                it, of the N tokens computed, prompt after prompt. It must not change them.
        """
        one = _Pass(self._decoder, self._kernels, self._device, prompts, keep, self.prefix)
        if bridge is None:
            return one.run(observe)
        return one.stop(bridge.first, observe).finish(self.maps(bridge))

    def stop(self, prompts: Sequence[Sequence[int]], keep: Keep, first: int) -> StoppedPrompts:
        """Run the layers below `first` alone; prompt bridges take it from there. Arguments as for `run`."""
        return _Pass(self._decoder, self._kernels, self._device, prompts, keep, self.prefix).stop(first)

    def maps(self, bridge: PromptBridge) -> PromptMaps:
        """A prompt bridge on this device."""
        if self._bridge is None or self._bridge[0] != bridge:
            maps = compile_prompt_bridge(bridge, self._decoder.shape, self._kernels, self._dtype, self._device)
            self._bridge = bridge, maps
        return self._bridge[1]


@dataclass(frozen=True)
class StoppedPrompts:
    """Prompts that have run the layers below a prompt bridge, and may be taken on by several."""

    _pass: _Pass
    first: int  # layer that they have stopped before
    _states: Tensor  # [N, hidden]

    def finish(self, maps: PromptMaps | None) -> Tensor:
        """Hidden states [P, hidden] of the last tokens after all layers; `keep` is told of the layers above.

        Without maps all tokens go on at full depth. Gradients flow to the maps.
        """
        if maps is None:
            return self._pass.onwards(self._states, self.first)
        if maps.first != self.first:
            raise ValueError(f"prompts have stopped before layer {self.first}, the bridge is for layer {maps.first}")
        return self._pass.above(self._states, maps)


class _Pass:
    """One pass: where each prompt's tokens lie among the N computed, and what they attend to."""

    def __init__(
        self,
        decoder: Decoder,
        kernels: Kernels,
        device: torch.device,
        prompts: Sequence[Sequence[int]],
        keep: Keep,
        prefix: Prefix | None,
    ) -> None:
        self._decoder, self._kernels, self._keep, self._prefix = decoder, kernels, keep, prefix
        self._shared = [prefix.shared(prompt) if prefix else 0 for prompt in prompts]
        starts = list(zip(prompts, self._shared, strict=True))
        lengths = torch.tensor([len(prompt) - start for prompt, start in starts])
        self._spans = list(pairwise([0, *lengths.cumsum(0).tolist()]))
        positions = torch.cat([torch.arange(start, len(prompt)) for prompt, start in starts]).to(device)
        whole = torch.tensor([len(prompt) for prompt in prompts]).repeat_interleave(lengths)
        self._rotations = decoder.rotations(positions, whole.to(device))
        computed = torch.tensor([token for prompt, start in starts for token in prompt[start:]], device=device)
        self._embedded = decoder.embed(computed, positions)
        is_last = torch.zeros(len(computed), dtype=torch.bool)
        is_last[lengths.cumsum(0) - 1] = True
        self._plan = [RunUnit(unit) for unit in all_units(decoder.shape.layers)]
        self._last, self._others = (rows.nonzero()[:, 0].to(device) for rows in (is_last, ~is_last))

    def run(self, observe: Observe | None) -> Tensor:
        """Hidden states [P, hidden] of the last tokens, all running all layers."""
        return self.onwards(self._embedded, 0, observe)

    def stop(self, first: int, observe: Observe | None = None) -> StoppedPrompts:
        """All tokens as they are before layer `first`."""
        plan = self._plan[: 2 * first]
        x = run_plan(self._decoder, plan, Compiled(), self._embedded, self._rotations, self._attend, observe)
        return StoppedPrompts(self, first, x)

    def onwards(self, x: Tensor, first: int, observe: Observe | None = None) -> Tensor:
        """Hidden states [P, hidden] of the last tokens, all going on from states [N, hidden] before layer `first`."""
        plan = self._plan[2 * first :]
        return run_plan(self._decoder, plan, Compiled(), x, self._rotations, self._attend, observe)[self._last]

    def above(self, x: Tensor, maps: PromptMaps) -> Tensor:
        """Hidden states [P, hidden] of the last tokens after all layers, from states [N, hidden] where all stopped."""
        rotations, attend = self._rotations_of(self._last), self._attend_alone(x[self._others], maps)
        plan = self._plan[2 * maps.first :]
        return run_plan(self._decoder, plan, Compiled(), x[self._last], rotations, attend)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Of all N tokens."""
        kind = self._decoder.shape.attention_kind(layer)
        return self._kernels.packed_attention(q, self._spans, self._whole(layer, k, v), kind)

    def _attend_alone(self, stopped: Tensor, maps: PromptMaps) -> Attend:
        """Of each prompt's last token, the other tokens having stopped below with states [N - P, hidden]."""
        rotations = self._rotations_of(self._others)
        spans = list(pairwise(range(len(self._last) + 1)))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = (x.new_empty(len(self._embedded), *x.shape[1:]) for x in (k, v))
            keys[self._last], values[self._last] = k, v
            if len(stopped):
                above, values[self._others] = maps.keys_and_values(layer, stopped)
                keys[self._others] = self._decoder.place_keys(layer, above, rotations)
            kind = self._decoder.shape.attention_kind(layer)
            return self._kernels.packed_attention(q, spans, self._whole(layer, keys, values), kind)

        return attend

    def _whole(self, layer: int, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of all tokens of each prompt, those it shares included, of the N computed ones."""
        whole = []
        for index, (start, end) in enumerate(self._spans):
            keys, values = k[start:end], v[start:end]
            if self._prefix and self._shared[index]:
                before, ours = self._prefix.layers[layer], (keys, values)
                keys, values = (torch.cat(pair) for pair in zip(before, ours, strict=True))
            self._keep(layer, index, keys, values)
            whole.append((keys, values))
        return whole

    def _rotations_of(self, rows: Tensor) -> Rotations:
        return tuple(factors[rows] for factors in self._rotations)
