"""Prompts through the layers: several laid end to end in one pass, no padding, what they share computed once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.forward.compiled_parts import BridgeMap, PromptMaps
from engine.forward.operations import Compiled, Observe, run_units
from engine.kernels import Kernels, attended_alone
from engine.models.decoder import Attend, Decoder, Rotations
from engine.parts.unit import Block, Unit, all_units
from engine.schedules.schedule import PromptPlan

FULL_DEPTH = PromptPlan()
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


NO_PREFIX = Prefix((), ())


def shared_tokens(prefix: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens a prompt takes from a prefix: all or none, and never the prompt's last one."""
    length = len(prefix)
    return length if len(prompt) > length and tuple(prompt[:length]) == tuple(prefix) else 0


class PromptPass:
    """Passes over prompts, on one device."""

    def __init__(self, decoder: Decoder, kernels: Kernels, device: torch.device) -> None:
        self.decoder, self.kernels, self.device = decoder, kernels, device
        self.prefix = NO_PREFIX

    def share(self, tokens: Sequence[int]) -> bool:
        """Compute a prefix for the prompts to come; none forgets the last.

        Returns False where there is none, it fills the context, or its keys would depend on what follows it; and where
        it has tokens that the model has not: each prompt that begins with it is refused then.
        """
        self.prefix = NO_PREFIX
        context, vocab = self.decoder.shape.context, self.decoder.shape.vocab
        if not 0 < len(tokens) < context or not 0 <= min(tokens) <= max(tokens) < vocab:
            return False
        positions = torch.arange(len(tokens), device=self.device)
        alone = self.decoder.rotations(positions, torch.full_like(positions, len(tokens)))
        longest = self.decoder.rotations(positions, torch.full_like(positions, context))
        if not all(torch.equal(*pair) for pair in zip(alone, longest, strict=True)):
            return False
        layers: list[tuple[Tensor, Tensor]] = []
        # Copies: a view of the fused projection would keep the queries too.
        self.run([tokens], lambda _layer, _, k, v: layers.append((k.clone(), v.clone())))
        self.prefix = Prefix(tuple(tokens), tuple(layers))
        return True

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        keep: Keep,
        plan: PromptPlan = FULL_DEPTH,
        compiled: Compiled | None = None,
        observe: Observe | None = None,
    ) -> Tensor:
        """Hidden states [P, hidden] of the last token of each of P prompts. Gradients flow to what is compiled.

        Args:
            prompts: token ids. Those that begin with the prefix compute only their other tokens.
            keep: told of every layer's keys and values, views of what the pass computes.
            plan, compiled: what they run.
            observe: without a prompt bridge, told of the hidden states [N, hidden] before each unit, of the N tokens
                computed, prompt after prompt.
        """
        compiled = compiled or Compiled()
        ours = _Pass(self, prompts, keep, compiled.model(plan.adapter, self.decoder))
        if plan.bridge is None:
            return ours.run(observe)
        skips, maps = plan.bridge.skips, compiled.prompt_maps[plan.bridge]
        skipped = None if skips is None else (skips.block, compiled.bridges[skips])
        return ours.above(ours.stop(plan.bridge.first, skipped, maps), maps)

    def stop(
        self,
        prompts: Sequence[Sequence[int]],
        first: int,
        skipped: tuple[Block, BridgeMap] | None = None,
        observe: Observe | None = None,
    ) -> "StoppedPrompts":
        """Run the layers below `first` alone, but for a block with what stands in for it; prompt bridges take it from
        there. Other arguments as for `run`. No keys and values are kept.
        """
        ours = _Pass(self, prompts, lambda *_: None, self.decoder)
        return StoppedPrompts(ours.stop(first, skipped, observe=observe)[ours.others], ours.others)


class StoppedPrompts(NamedTuple):
    """Prompts that have run the layers below a prompt bridge."""

    states: Tensor  # [n, hidden] of the tokens that go no further
    others: Tensor  # [n]: which of the N computed these are


class _Pass:
    """One pass: where each prompt's tokens lie among the N computed, and what they attend to."""

    def __init__(self, passes: PromptPass, prompts: Sequence[Sequence[int]], keep: Keep, decoder: Decoder) -> None:
        self._decoder, self._kernels, self._keep, self._prefix = decoder, passes.kernels, keep, passes.prefix
        device = passes.device
        self._shared = [self._prefix.shared(prompt) for prompt in prompts]
        starts = list(zip(prompts, self._shared, strict=True))
        lengths = torch.tensor([len(prompt) - start for prompt, start in starts])
        self._lengths = lengths.tolist()  # of what is computed of each prompt
        positions = torch.cat([torch.arange(start, len(prompt)) for prompt, start in starts]).to(device)
        whole = torch.tensor([len(prompt) for prompt in prompts]).repeat_interleave(lengths)
        self._rotations = decoder.rotations(positions, whole.to(device))
        computed = torch.tensor([token for prompt, start in starts for token in prompt[start:]], device=device)
        self._embedded = decoder.embed(computed, positions)
        is_last, is_whole = torch.zeros(2, len(computed), dtype=torch.bool)
        ends = lengths.cumsum(0)
        is_last[ends - 1] = True
        is_whole[(ends - lengths)[torch.tensor(self._shared) == 0]] = True
        is_whole &= ~is_last
        self._units = all_units(decoder.shape.layers)
        self._last, self._whole = is_last.nonzero()[:, 0].to(device), is_whole.nonzero()[:, 0].to(device)
        self._going = torch.cat([self._whole, self._last])  # tokens that run all layers, under a prompt bridge
        self.others: Tensor = (~(is_last | is_whole)).nonzero()[:, 0].to(device)

    def run(self, observe: Observe | None) -> Tensor:
        """Hidden states [P, hidden] of the last tokens, all running all layers."""
        return self._run(self._units, self._embedded, observe)[self._last]

    def stop(
        self,
        first: int,
        skipped: tuple[Block, BridgeMap] | None,
        maps: PromptMaps | None = None,
        observe: Observe | None = None,
    ) -> Tensor:
        """Hidden states [N, hidden] before layer `first`, having skipped a block, whose keys and values maps may
        give.
        """
        x, start = self._embedded, 0
        if skipped is not None:
            block, bridge = skipped
            start = block.last.place + 1
            x = self._run(self._units[: block.first.place], x, observe)
            own: dict[int, tuple[Tensor, Tensor]] = {}  # by layer, of first tokens
            whole = self._alone(block.units, x[self._whole], own)
            if maps is not None:
                self._keep_skipped(x, maps, own)
            x = bridge(x).index_copy(0, self._whole, whole)
        return self._run(self._units[start : 2 * first], x, observe)

    def _keep_skipped(self, x: Tensor, maps: PromptMaps, own: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Keys and values in a block that is skipped, from states [N, hidden] before it, or a first token's own."""
        for layer in maps.within:
            k, values = maps.keys_and_values(layer, x)
            keys = self._decoder.place_keys(layer, k, self._rotations)
            if len(self._whole):
                pairs = zip((keys, values), own[layer], strict=True)
                keys, values = (mapped.index_copy(0, self._whole, ours) for mapped, ours in pairs)
            self._of_prompts(layer, keys, values)

    def _alone(self, units: Sequence[Unit], x: Tensor, kept: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
        """First tokens, which attend to themselves, through some units; by layer what was kept of them."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kept[layer] = k, v
            return attended_alone(v, q.shape[1])

        return run_units(self._decoder, units, x, self._rotations_of(self._whole), attend) if len(x) else x

    def _run(self, units: Sequence[Unit], x: Tensor, observe: Observe | None) -> Tensor:
        """All N tokens through some units."""
        return run_units(self._decoder, units, x, self._rotations, self._attend, observe)

    def above(self, x: Tensor, maps: PromptMaps) -> Tensor:
        """Hidden states [P, hidden] of the last tokens after all layers, from states [N, hidden] where all stopped."""
        attend = self._attend_alone(x[self.others], maps)
        units, rotations = self._units[2 * maps.first :], self._rotations_of(self._going)
        return run_units(self._decoder, units, x[self._going], rotations, attend)[len(self._whole) :]

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Of all N tokens."""
        kind = self._decoder.shape.attention_kind(layer)
        return self._kernels.packed_attention(q, self._lengths, self._of_prompts(layer, k, v), kind)

    def _attend_alone(self, stopped: Tensor, maps: PromptMaps) -> Attend:
        """Of first tokens and each prompt's last, the others having stopped below with states [n, hidden]."""
        rotations = self._rotations_of(self.others)
        lengths = [1] * len(self._last)
        first = len(self._whole)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = (x.new_empty(len(self._embedded), *x.shape[1:]) for x in (k, v))
            keys[self._going], values[self._going] = k, v
            if len(stopped):
                above, values[self.others] = maps.keys_and_values(layer, stopped)
                keys[self.others] = self._decoder.place_keys(layer, above, rotations)
            kind = self._decoder.shape.attention_kind(layer)
            attended = self._kernels.packed_attention(q[first:], lengths, self._of_prompts(layer, keys, values), kind)
            return torch.cat([attended_alone(v[:first], q.shape[1]), attended])

        return attend

    def _of_prompts(self, layer: int, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of all tokens of each prompt, those it shares included, of the N computed ones."""
        whole = []
        computed = zip(k.split(self._lengths), v.split(self._lengths), strict=True)
        for index, (keys, values) in enumerate(computed):
            if self._shared[index]:
                before, ours = self._prefix.layers[layer], (keys, values)
                keys, values = (torch.cat(pair) for pair in zip(before, ours, strict=True))
            self._keep(layer, index, keys, values)
            whole.append((keys, values))
        return whole

    def _rotations_of(self, rows: Tensor) -> Rotations:
        return tuple(factors[rows] for factors in self._rotations)
