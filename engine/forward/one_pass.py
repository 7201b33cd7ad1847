"""One pass for every token: prompts that enter and the newest tokens of rows at any step, laid side by side.

A pass's tokens are sorted: prompts without their last tokens, then those first ones that run every layer under a prompt
bridge, then the last ones, then decode tokens, those on the earliest plateau first. Active sets only shrink, so the
tokens that run a unit are one slice of them: a layer that prompts do not reach leaves out the first part, a skipped
unit leaves out the tail. (Two, where prompts skip a unit that decode tokens run.) What all prompts share, and known
answers, go through `PromptPass`.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from engine.forward.cache import KVCache, RowBlock
from engine.forward.compiled_parts import PromptMaps
from engine.forward.operations import Compiled, Operation, RunUnit, unit_plans
from engine.forward.prompt_pass import Prefix, PromptPass
from engine.kernels import KeptRows, attended_alone
from engine.models.decoder import Attend, Rotations
from engine.parts.bridge import Bridge
from engine.schedules.schedule import Schedule


class EnteringPrompt(NamedTuple):
    """A prompt whose row enters."""

    tokens: Sequence[int]
    shared: int  # of them, that the prefix has computed
    seat: int


class NewestToken(NamedTuple):
    """The token that a running row goes on from."""

    token: int
    position: int
    plateau: int
    seat: int


class Slice(NamedTuple):
    """Tokens of a pass that run an operation."""

    operation: Operation
    start: int
    end: int


class Attending(NamedTuple):
    """Rows of a block whose single tokens attend together."""

    block: RowBlock
    rows: slice  # of the block
    kept: dict[int | None, KeptRows]  # by window


class Plans:
    """What tokens run under a schedule, in order, ready to be cut into slices."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        bridge = schedule.prompt_bridge
        self.stop = schedule.layers if bridge is None else bridge.first  # layer before which prompts stop
        self.skips = None if bridge is None else bridge.skips  # what they skip a block by
        self._skipped = frozenset(() if bridge is None else bridge.skipped_units)
        self.plateaus = len(schedule.plateaus)
        self._units = unit_plans(schedule)
        attended = {run.unit.layer: count for run, count, _ in self._units if run.unit.kind == "a"}
        self.retirements = sorted(set(attended.values()))  # by span, the plateau that attends there no more
        self.spans = [[layer for layer, count in attended.items() if count == last] for last in self.retirements]

    def slices(self, bulk: int, whole: int, last: int, decoding: Sequence[int]) -> Iterator[Slice]:
        """What a pass does, in order: over so many last tokens of prompts, `whole` first ones that run every layer,
        `bulk` others, and decode tokens of each plateau.
        """
        first = bulk + whole + last
        ends = list(accumulate(decoding, initial=first))  # [p]: where the tokens of plateaus before p end
        for run, count, before in self._units:
            unit = run.unit
            for _, found in groupby(range(self.plateaus), key=before.__getitem__):
                same = list(found)
                bridge, span = before[same[0]], (ends[same[0]], ends[same[-1] + 1])
                if bridge is not None and span[0] < span[1]:
                    yield Slice(bridge, *span)
            if self.skips is not None and unit == self.skips.block.first:
                yield Slice(self.skips, 0, bulk)
                yield Slice(self.skips, bulk + whole, first)
            if unit in self._skipped:
                parts = [(bulk, bulk + whole), (first, ends[count])]
            else:
                parts = [(bulk if unit.layer >= self.stop else 0, ends[count])]
            for start, end in parts:
                if run.adapter is None or run.adapter.changes_prompts:
                    yield Slice(run, start, end)
                else:  # prompts run the model as it is
                    yield Slice(RunUnit(unit), start, min(end, first))
                    yield Slice(run, max(start, first), end)


class OnePass:
    """The tokens of a pass, and where they attend."""

    def __init__(
        self,
        model: PromptPass,
        compiled: Compiled,
        plans: Plans,
        cache: KVCache,
        entering: Sequence[EnteringPrompt],
        newest: Sequence[NewestToken],
        prefix: Prefix,
    ) -> None:
        """Rows have their places in the cache, in the layers that they still attend in.

        Args:
            model, compiled, plans: the model, and what the schedule brings along.
            cache: of all rows of the pass and no others; changed.
            entering: prompts to compute, some of which begin with the prefix.
            newest: tokens of the others, by plateau.
        """
        self._decoder, self._kernels, self._device = model.decoder, model.kernels, model.device
        self._compiled, self._plans, self._cache = compiled, plans, cache
        bridge = plans.schedule.prompt_bridge
        self._prompts, self._maps = entering, None if bridge is None else compiled.prompt_maps[bridge]
        # By prompt, whether its first token runs every layer, in a place of its own.
        whole = [bridge is not None and not prompt.shared and len(prompt.tokens) > 1 for prompt in entering]
        self._begins = [prompt.shared + alone for prompt, alone in zip(entering, whole, strict=True)]
        counts = [len(prompt.tokens) - 1 - begin for prompt, begin in zip(entering, self._begins, strict=True)]
        spans = list(pairwise(accumulate(counts, initial=0)))
        self._spans = spans  # of each prompt's tokens but the last, and the first where that has its own place
        self._longer = [index for index, (start, end) in enumerate(spans) if start < end]
        self._whole = [prompt for prompt, alone in zip(entering, whole, strict=True) if alone]
        self.bulk, self.whole, self.last = sum(counts), len(self._whole), len(entering)
        self._seats = [prompt.seat for prompt in entering] + [row.seat for row in newest]  # of single tokens
        self._lengths = [len(prompt.tokens) for prompt in entering] + [row.position + 1 for row in newest]
        begins = zip(entering, self._begins, strict=True)
        laid = [(prompt, place) for prompt, begin in begins for place in range(begin, len(prompt.tokens) - 1)]
        laid += [(prompt, 0) for prompt in self._whole] + [(prompt, len(prompt.tokens) - 1) for prompt in entering]
        tokens = [prompt.tokens[place] for prompt, place in laid] + [row.token for row in newest]
        places = [place for _, place in laid] + [row.position for row in newest]
        lengths = [len(prompt.tokens) for prompt, _ in laid] + [row.position + 1 for row in newest]
        positions, ends = torch.tensor(places, device=self._device), torch.tensor(lengths, device=self._device)
        self._rotations = self._decoder.rotations(positions, ends)
        self.embedded = self._decoder.embed(torch.tensor(tokens, device=self._device), positions)
        decoding = [0] * plans.plateaus
        for row in newest:
            decoding[row.plateau] += 1
        self.slices = list(plans.slices(self.bulk, self.whole, self.last, decoding))
        self.padding = 0  # FLOPs computed for nobody: rows that attend together read on to the longest of them
        self._attending: dict[tuple[int, int, int], list[Attending]] = {}
        self._stopped: Tensor | None = None
        for prompt in entering:
            if prompt.shared:
                for layer, pair in enumerate(prefix.layers):
                    for row, kept in zip(cache.row(prompt.seat, layer), pair, strict=True):
                        row[:, : prompt.shared] = kept.transpose(0, 1)
        # Now, not in mid-pass: what goes to a GPU from here waits for all that was asked of it before.
        for operation, start, end in self.slices:
            if isinstance(operation, RunUnit) and operation.unit.kind == "a" and end > max(start, self._single):
                self._attending_between(operation.unit.layer, *self._singles(start, end))

    @property
    def _single(self) -> int:
        """Where single tokens begin."""
        return self.bulk + self.whole

    def _singles(self, start: int, end: int) -> tuple[int, int]:
        """Those among the tokens from `start` to `end`, by place among single tokens."""
        return max(0, start - self._single), end - self._single

    def run(self) -> Tensor:
        """Hidden states [last + decoding, hidden] after all layers, of the prompts' last tokens and the newest ones."""
        x = self.embedded
        for operation, start, end in self.slices:
            if start >= end:
                continue
            if isinstance(operation, RunUnit) and self._stopped is None:
                self._stopped = x[: self.bulk] if operation.unit.layer >= self._plans.stop else None
            ours = x[start:end]
            done = self.apply(operation, ours, start, end)
            if len(done) == len(x):
                x = done
            else:
                x[start:end] = done
        return x[self._single :]

    def apply(self, operation: Operation, x: Tensor, start: int, end: int) -> Tensor:
        """An operation on the tokens from `start` to `end`, with hidden states x [end - start, hidden]."""
        if isinstance(operation, Bridge):
            if self._maps is not None and start < self.bulk + self.whole + self.last:  # of prompts
                self._keep_skipped(x, start, end, self._maps)
            return self._compiled.bridges[operation](x)
        model, layer = self._compiled.model(operation.adapter, self._decoder), operation.unit.layer
        if operation.unit.kind == "m":
            return model.mlp(layer, x)
        return model.attention(layer, x, self._rotated(start, end), self._attend_between(start, end))

    def _rotated(self, start: int, end: int) -> Rotations:
        return tuple(factors[start:end] for factors in self._rotations)

    def _attend_between(self, start: int, end: int) -> Attend:
        """Of the tokens from `start` to `end`: those of prompts, or the single ones, or both."""
        bulk = max(0, self.bulk - start)
        whole = self.whole if start <= self.bulk else 0

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            attended = []
            if bulk:
                self._keep_prompts(layer, k[:bulk], v[:bulk])
            elif self._stopped is not None and len(self._stopped) and start == self.bulk:
                assert self._maps is not None
                above, values = self._maps.keys_and_values(layer, self._stopped)
                keys = self._decoder.place_keys(layer, above, self._rotated(0, self.bulk))
                self._keep_prompts(layer, keys, values)
            first = bulk + whole
            if whole:
                self._keep_single(layer, self._whole, [0] * whole, k[bulk:first], v[bulk:first])
            if bulk:
                attended += [self._attend_prompt(layer, q, index) for index in self._longer]
            if whole:
                attended.append(attended_alone(v[bulk:first], q.shape[1]))
            if end > self._single:
                singles = self._singles(start, end)
                attended.append(self._attend_alone(layer, q[first:], k[first:], v[first:], *singles))
            return torch.cat(attended) if len(attended) > 1 else attended[0]

        return attend

    def _keep_prompts(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keys and values [bulk, kv_heads, head_dim] of the prompts' tokens but those that stand elsewhere."""
        for prompt, begin, (start, end) in zip(self._prompts, self._begins, self._spans, strict=True):
            row = self._cache.row(prompt.seat, layer)[:, :, begin : len(prompt.tokens) - 1]
            row[0] = k[start:end].transpose(0, 1)
            row[1] = v[start:end].transpose(0, 1)

    def _keep_skipped(self, x: Tensor, start: int, end: int, maps: PromptMaps) -> None:
        """Keys and values of the prompts' tokens from `start` to `end` in a block that they skip, from states x before
        it: of all but the last tokens, or of these.
        """
        lasts = [len(prompt.tokens) - 1 for prompt in self._prompts]
        for layer in maps.within:
            k, values = maps.keys_and_values(layer, x)
            keys = self._decoder.place_keys(layer, k, self._rotated(start, end))
            if start < self.bulk:
                self._keep_prompts(layer, keys, values)
            else:
                self._keep_single(layer, self._prompts, lasts, keys, values)

    def _keep_single(
        self, layer: int, prompts: Sequence[EnteringPrompt], places: Sequence[int], k: Tensor, v: Tensor
    ) -> None:
        """Keys and values [prompts, kv_heads, head_dim] of a token of each prompt, at its place there."""
        for prompt, place, *pair in zip(prompts, places, k, v, strict=True):
            for row, kept in zip(self._cache.row(prompt.seat, layer), pair, strict=True):
                row[:, place] = kept

    def _attend_prompt(self, layer: int, q: Tensor, index: int) -> Tensor:
        """Of the tokens of a prompt but the last, [n, heads * head_dim]."""
        kind, (start, end) = self._decoder.shape.attention_kind(layer), self._spans[index]
        n = len(self._prompts[index].tokens) - 1
        k, v = self._cache.row(self._prompts[index].seat, layer)[:, :, :n].transpose(1, 2)
        return self._kernels.prompt_attention(q[start:end], k, v, kind)

    def _attend_alone(self, layer: int, q: Tensor, k: Tensor, v: Tensor, first: int, last: int) -> Tensor:
        """Of the single tokens from `first` to `last`, each to its row's cache, which it joins."""
        within = self._cache.place[layer][1]
        kind = self._decoder.shape.attention_kind(layer)
        blocks = []
        for group in self._attending_between(layer, first, last):
            kept = group.kept[kind.window]
            blocks.append((group.block.layer(within)[:, group.rows], kept))
            if self._kernels.pads(kind):
                self.padding += 4 * self._decoder.shape.query_width * kept.padding
        return self._kernels.decode_attention(q, k, v, blocks, kind)

    def _attending_between(self, layer: int, first: int, last: int) -> list[Attending]:
        """As `_attending_in`, made once."""
        where = (self._cache.place[layer][0], first, last)
        if where not in self._attending:
            self._attending[where] = self._attending_in(*where)
        return self._attending[where]

    def _attending_in(self, span: int, first: int, last: int) -> list[Attending]:
        """The single tokens from `first` to `last` by block."""
        token_of = {seat: token for token, seat in enumerate(self._seats[first:last])}
        windows = {self._decoder.shape.attention_kind(layer).window for layer in self._plans.spans[span]}
        groups = []
        for block in self._cache.blocks(span):
            # Rows that enter stand after the others, so those wanted stand side by side.
            places = [place for place, seat in enumerate(block.seats) if seat in token_of]
            if not places:
                continue
            tokens = [token_of[block.seats[place]] for place in places]
            lengths = [self._lengths[first + token] for token in tokens]
            kept = {window: KeptRows(tokens, lengths, window, self._device) for window in windows}
            groups.append(Attending(block, slice(places[0], places[-1] + 1), kept))
        return groups
