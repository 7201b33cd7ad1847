"""A batch whose decoding never waits for the host: passes of fixed shapes, tokens read while the next pass runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.captured.late_reads import LateReads
from engine.captured.workspace import Workspaces, padded_rows
from engine.decoding.batch import COMPACT_BELOW, Batch, BatchContext, BatchStats, Sample
from engine.decoding.cache import KVCache
from engine.forward.ledger import Ledger
from engine.forward.operations import attention_layers


class StaticBatch(Batch):
    """The same samples, tokens and costs as `Batch`, but for the work done for nobody.

    The host learns that a row has ended one pass late: it drops what the row said after its end.
    """

    def __init__(
        self, workspaces: Workspaces, context: BatchContext, ledger: Ledger, samples: Sequence[Sample]
    ) -> None:
        self._workspaces = workspaces
        super().__init__(context, ledger, samples)
        self._left: list[tuple[Sample | None, int]] = []  # rows, and how many passes each was part of

    def run(self) -> BatchStats:
        """Generate every sample to its end."""
        stats = super().run()
        self._workspaces.keep(self._workspace)
        return stats

    def _make_cache(self) -> KVCache:
        rows, layers = len(self.samples), attention_layers(self._plans[0])
        longest = max(len(sample.prompt) + sample.limit for sample in self.samples)
        self._workspace = self._workspaces.take(self._context, layers, rows, longest)
        return self._workspace.empty_cache(rows, layers)

    def _fork(self, ledger: Ledger) -> Batch:
        fork = super()._fork(ledger)
        assert isinstance(fork, StaticBatch)
        fork._workspace = self._workspace.twin(fork._cache)
        fork._left = []
        return fork

    def _decode_to_the_end(self, logits: Tensor) -> int:
        limits = [sample.limit for sample in self._rows]
        self._workspace.start(self._cache.lengths, limits, self._sampler, logits)
        filling = padded_rows(len(limits)) - len(limits)
        rows: list[Sample | None] = [*self._rows, *[None] * filling]
        reads, readers = LateReads(len(rows), self._device), [rows]
        reads.send(self._workspace.tokens[: len(rows)])
        step, last = 0, max(limits) - 1
        while step < last and not all(sample is None or sample.finished for sample in rows):
            self._start_pass(step, len(rows))
            step += 1
            reads.send(self._workspace.tokens[: len(rows)])
            readers.append(rows)
            self._extend_late(readers.pop(0), reads.receive())
            rows = self._compact_late(rows, step)
        while readers:
            self._extend_late(readers.pop(0), reads.receive())
        self._left += [(sample, step) for sample in rows]
        self._executed = sum(self._cost(sample, passes) for sample, passes in self._left)
        return step

    def _start_pass(self, step: int, rows: int) -> None:
        plan = self._plans[self._ledger.schedule.plateau_at(step)]
        self._cache.keep_layers(attention_layers(plan))
        self._cache_course.append(self._cache.bytes)
        compiled = self._context.compiled
        self._workspace.run_pass(plan, compiled.head(self._ledger.schedule, self._decoder), compiled, rows)

    def _extend_late(self, rows: list[Sample | None], tokens: list[int]) -> None:
        for sample, token in zip(rows, tokens, strict=True):
            if sample is not None and not sample.finished:
                sample.tokens.append(token)
                sample.ended = self._context.stopping.ends(sample.tokens)

    def _compact_late(self, rows: list[Sample | None], passes: int) -> list[Sample | None]:
        """The rows to go on with: the unfinished ones, and as many others as fill up the next smaller batch size."""
        finished = [sample is None or sample.finished for sample in rows]
        live = [row for row, ended in enumerate(finished) if not ended]
        size = padded_rows(len(live))
        if not live or size > COMPACT_BELOW * len(rows):
            return rows
        others = [row for row, ended in enumerate(finished) if ended]
        kept = live + others[: size - len(live)]
        self._workspace.move_rows(kept, self._cache)
        self._left += [(rows[row], passes) for row in others[size - len(live) :]]
        return [rows[row] for row in kept]

    def _cost(self, sample: Sample | None, passes: int) -> int:
        """FLOPs really spent on a row in its passes."""
        schedule, plateaus = self._ledger.schedule, self._ledger.plateaus
        useful, spent, context, longest = 0, 0, 1, 1
        if sample is not None:
            useful = len(sample.tokens) - 1
            spent = self._ledger.decode(len(sample.prompt), len(sample.tokens))
            context = len(sample.prompt) + len(sample.tokens)
            # After a stop string, which the device doesn't see, a row grows on.
            longest = context if self._context.stopping.is_end(sample.tokens[-1]) else len(sample.prompt) + sample.limit
        for step in range(useful, passes):
            spent += plateaus[schedule.plateau_at(step)].tokens(context, context)
            context = min(context + 1, longest)
        return spent
