"""Decoding that the host only starts: what a pass reads and writes stays on the device, at fixed addresses.

A pass is one function of a plan and a number of rows. On CUDA it is captured as a graph, logits and sampling inside;
elsewhere it runs eagerly, the same code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.profiler import record_function

from engine.captured.graphs import Graphs
from engine.decoding.batch import BatchContext
from engine.decoding.cache import GROWTH, KVCache
from engine.decoding.sampling import Sampler, Sampling
from engine.forward.compiled_parts import Head
from engine.forward.operations import Compiled, Operation, run_plan
from engine.kernels.base import Kernels
from engine.models.decoder import Decoder


def padded_rows(rows: int) -> int:
    """The batch size that so many rows run in: 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ... Few sizes are few graphs."""
    power = 1 << max(0, rows - 1).bit_length()
    between = power * 3 // 4
    return between if power >= 32 and rows <= between else power


class Workspace:
    """State of up to R rows between passes.

    Each row has its newest token, how many tokens its cache holds, how many it may generate, and whether the device has
    seen it end. What only the host can see, a stop string, changes nothing here: the row runs on for nobody.
    """

    def __init__(
        self, decoder: Decoder, kernels: Kernels, cache: KVCache, rows: int, sampling: Sampling, eos_ids: Sequence[int]
    ) -> None:
        """`cache`: of R = `rows` rows."""
        self._decoder, self._kernels, self._cache = decoder, kernels, cache
        self.rows, self.sampling, self._eos_ids = rows, sampling, eos_ids
        device = cache.lengths.device
        self._lengths = torch.zeros(rows, dtype=torch.long, device=device)  # before a pass, the new token's slot
        self._limits = torch.zeros(rows, dtype=torch.long, device=device)
        self._finished = torch.zeros(rows, dtype=torch.bool, device=device)
        self._step = torch.zeros(1, dtype=torch.long, device=device)  # tokens generated so far
        self.tokens = torch.zeros(rows, dtype=torch.long, device=device)  # each row's newest
        self._eos = torch.tensor(eos_ids, dtype=torch.long, device=device)
        nobody: list[list[int]] = [[0]] * rows
        self._sampler = Sampler(sampling, eos_ids, decoder.shape.vocab, nobody, [""] * rows, device)
        self._graphs = Graphs(device)

    def twin(self, cache: KVCache) -> Workspace:
        """A workspace like this one for another cache of as many rows."""
        return Workspace(self._decoder, self._kernels, cache, self.rows, self.sampling, self._eos_ids)

    def holds(self, layers: set[int], rows: int, capacity: int) -> bool:
        """Whether it has room for a batch."""
        fits = rows <= self.rows and capacity <= self._cache.capacity
        return fits and all(layer in self._cache for layer in layers)

    @property
    def bytes(self) -> int:
        """Memory of its cache."""
        return self._cache.bytes

    def empty_cache(self, rows: int, layers: set[int]) -> KVCache:
        """The cache for a batch of so many rows that decodes with these layers. Ends the one before."""
        return self._cache.of_first_rows(rows, layers)

    def start(self, lengths: Tensor, limits: Sequence[int], sampler: Sampler, logits: Tensor) -> None:
        """Rows from their prompts to their first tokens.

        Args:
            lengths: [B], tokens of each prompt, all in the cache.
            limits: most tokens that each row may generate.
            sampler: of the B rows.
            logits: [B, vocab] of their last prompt tokens; overwritten.
        """
        rows = len(lengths)
        for state in (self._lengths, self._limits, self.tokens, self._step):
            state.zero_()
        self._lengths[:rows] = lengths
        self._limits[:rows] = torch.tensor(limits)
        self._finished.fill_(True)  # rows that are only there to fill up the batch
        self._finished[:rows] = False
        self._sampler.load(sampler)
        self._take(logits)

    def run_pass(self, plan: tuple[Operation, ...], head: Head, compiled: Compiled, rows: int) -> None:
        """Feed the newest tokens of the first rows through a plan and a head, and choose their next ones."""
        # The parts are in the key: a graph reads their matrices where they were, and the key keeps them there.
        self._graphs.run((plan, head, compiled.parts(plan), rows), lambda: self._pass(plan, head, compiled, rows))

    def move_rows(self, rows: Sequence[int], cache: KVCache) -> None:
        """Put these rows first, in this order. `cache`: the part of the cache that is still in use."""
        index = torch.tensor(rows, pin_memory=self._lengths.is_cuda).to(self._lengths.device, non_blocking=True)
        cache.move_rows(index)
        self._sampler.move_rows(index)
        for state in (self._lengths, self._limits, self._finished, self.tokens):
            state[: len(rows)] = state[index]

    def _pass(self, plan: Sequence[Operation], head: Head, compiled: Compiled, rows: int) -> None:
        decoder, lengths = self._decoder, self._lengths[:rows]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kind = decoder.shape.attention_kind(layer)
            return self._kernels.append_and_attend(q, k, v, self._cache.pair(layer), lengths, kind)

        rotations = decoder.rotations(lengths, lengths + 1)
        x = decoder.embed(self.tokens[:rows], lengths)
        with record_function("layers"):
            x = run_plan(decoder, plan, compiled, x, rotations, attend)
        # A finished row stays where it is, lest it outgrow the cache or the context.
        lengths += ~self._finished[:rows]
        with record_function("head"):
            logits = head(x)
        self._take(logits)

    def _take(self, logits: Tensor) -> None:
        """Choose the next token of the first B rows from logits [B, vocab], and note which of them it ends."""
        rows = len(logits)
        with record_function("sampling"):
            tokens = self._sampler.choose(logits, self._step)
        self._step += 1
        self.tokens[:rows] = tokens
        self._finished[:rows] |= (tokens[:, None] == self._eos).any(-1) | (self._step >= self._limits[:rows])


class Workspaces:
    """Keeps the workspace of one batch for the next: its graphs stay valid as long as its memory stays put.

    So a layer that retires leaves its part of the cache to the next batch and not to other uses.
    """

    def __init__(self) -> None:
        self._kept: Workspace | None = None

    @property
    def bytes(self) -> int:
        """Memory kept."""
        return self._kept.bytes if self._kept else 0

    def keep(self, workspace: Workspace) -> None:
        """To be called when a batch is done; one that failed, for lack of memory say, leaves nothing behind."""
        self._kept = workspace

    def take(self, context: BatchContext, layers: set[int], rows: int, capacity: int) -> Workspace:
        """A workspace for `rows` rows of `capacity` tokens in the cache of `layers`: the one kept if it will do."""
        rows = padded_rows(rows)
        workspace, self._kept = self._kept, None
        if workspace is not None and workspace.sampling == context.sampling and workspace.holds(layers, rows, capacity):
            return workspace
        del workspace  # before its successor takes memory
        capacity = -(-capacity // GROWTH) * GROWTH  # a little more, so that it is not too small for the next batch
        decoder, stopping = context.decoder, context.stopping
        cache = KVCache(decoder.shape, layers, rows, capacity, context.dtype, context.device)
        return Workspace(decoder, context.kernels, cache, rows, stopping.sampling, stopping.eos_ids)
