"""Generation for a list of prompts whatever some of them do: what fails is narrowed down, the rest is delivered."""

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from engine import BatchStats, Generation, ModelError, Sampling, Schedule, ScheduleError
from pipeline.errors import described
from pipeline.rows.shared_engine import SharedEngine, Streaming

log = logging.getLogger(__name__)

MOST_ROWS = 1 << 16  # of a batch, where memory decides
# Where more rows of a call fail than these, one after the other or of all that are done or have failed such a share, it
# is not the rows' fault.
MOST_QUARANTINED, SHARE_QUARANTINED = 16, 0.25

# What torch says once a device can't be used any more by this process, whoever asks.
_BROKEN_DEVICE = ("cuda error", "cublas_status", "cudnn_status", "device-side assert", "illegal memory access", "nccl")
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")

Generator = Streaming | SharedEngine


class DeviceBroken(RuntimeError):
    """The device serves this process no more: the process has to be replaced."""


class TooManyRowsFailed(RuntimeError):
    """So many rows fail that the cause lies elsewhere."""


class RowGenerator:
    """An engine with its settings, that takes out of memory and bad rows in its stride; several threads may call it."""

    def __init__(
        self, engine: Generator, sampling: Sampling, schedule: Schedule | None, batch_size: int | Literal["auto"]
    ) -> None:
        self._engine, self._sampling, self._schedule = engine, sampling, schedule
        self._auto = batch_size == "auto"
        # Halved for good when memory runs out: the size, or where that is "auto" the share that is taken of what fits.
        self.batch_size = MOST_ROWS if batch_size == "auto" else batch_size
        self._room = 1.0
        self.samples = sampling.samples_per_prompt
        self._joined = 0  # rows of the stream that calls share: what "fits" is then what it was opened with
        self._failed = 0  # rows of calls in which all of them failed, since any row has not

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sample_ids: Sequence[str],
        on_batch: Callable[[BatchStats], None] | None = None,
    ) -> list[Generation | str]:
        """For every prompt all its samples, or the error that it raises when it is alone for those it has not given.

        `on_batch` is told what passes cost and how many samples have ended: each once, however often it is generated.

        Raises:
            DeviceBroken: nothing more can come from this process.
            ModelError, ScheduleError: the engine cannot start again.
            TooManyRowsFailed: more than MOST_QUARANTINED rows fail one after the other, or more than these and than
                SHARE_QUARANTINED of those tried so far. All rows fail, and so do a prompt of one token, or the rows of
                the calls before: more than MOST_QUARANTINED with these.
        """
        samples = self.samples
        found: dict[int, Generation | str] = {}  # by row and sample: a row is a prompt here
        untold: list[int] = []  # tokens of each sample that has ended since `on_batch` was called
        quarantined = streak = 0  # rows that have failed: in all, and since one has not
        size, room = self.batch_size, self._room

        def tell(stats: BatchStats) -> None:
            if on_batch is not None:
                on_batch(replace(stats, samples=len(untold), generated_tokens=sum(untold)))
            untold.clear()

        if self._auto and prompts:
            longest = max(map(len, prompts))
            size = min(size, self._engine.fitting_batch_size(longest, self._sampling, self._schedule))
            if size != self._joined:
                self._joined = size = max(1, int(size * room))
        spans = [list(range(len(prompts)))] if prompts else []  # of rows still to do, the next one last
        while spans:
            rows = spans.pop()
            ids = [sample_ids[row] for row in rows]
            try:
                for generation in self._engine.generate(
                    [prompts[row] for row in rows], self._sampling, self._schedule, size, ids, tell
                ):
                    place = rows[generation.index] * samples + generation.sample
                    if place not in found:  # else its row is done again for other samples
                        found[place] = generation
                        untold.append(generation.generated_tokens)
                        streak = self._failed = 0
                continue
            except (ModelError, ScheduleError):
                raise  # of the engine, not of any row
            except Exception as raised:
                if is_device_broken(raised):
                    raise DeviceBroken(described(raised)) from raised
                # The traceback holds the failed batch's tensors, the memory that the next try needs.
                error = raised.with_traceback(None)
            if is_out_of_memory(error):
                gc.collect()
            left = [row for row in rows if any(row * samples + sample not in found for sample in range(samples))]
            if is_out_of_memory(error) and min(size, samples * len(left)) > 1:
                size = min(size, samples * len(left)) // 2
                if self._auto:
                    room = self._room = min(self._room, room / 2)  # once, where calls run out together
                    self._joined = 0
                else:
                    self.batch_size = max(size, self.batch_size // 2)
                then = f"{self._room:.0%} of what should fit" if self._auto else f"{self.batch_size} rows"
                log.warning("out of memory: going on with batches of %d rows, then of %s", size, then)
                spans.append(left)
            elif len(left) > 1:
                middle = len(left) // 2
                spans += [left[middle:], left[:middle]]
            elif left:
                row, quarantined, streak = left[0], quarantined + 1, streak + 1
                none = quarantined == len(prompts) and all(isinstance(each, str) for each in found.values())
                if none:
                    streak = self._failed = self._failed + quarantined
                share = SHARE_QUARANTINED * len(found) / samples
                many = streak > MOST_QUARANTINED or quarantined > max(MOST_QUARANTINED, share)
                if many or (none and not self._answers(prompts[row], sample_ids[row], size)):
                    if len(prompts) > 1:
                        self._failed = 0  # whoever narrows it down asks for them again, one by one
                    count = max(quarantined, streak)
                    raise TooManyRowsFailed(f"{count} rows fail, the last of them with {described(error)}")
                for sample in range(samples):
                    found.setdefault(row * samples + sample, described(error))
        if untold:
            tell(BatchStats())
        return [found[place] for place in range(samples * len(prompts))]

    def _answers(self, prompt: Sequence[int], sample_id: str, size: int) -> bool:
        """Whether the engine gives anything, if only for a prompt's first token: else it is not the rows that fail."""
        try:
            return any(self._engine.generate([prompt[:1]], self._sampling, self._schedule, size, [sample_id]))
        except Exception as error:
            log.warning("a prompt of one token fails too: %s", described(error))
            return False


def is_out_of_memory(error: BaseException) -> bool:
    """Memory ran out, the host's or the device's (torch.OutOfMemoryError, or a RuntimeError that says so)."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or _says(error, _OUT_OF_MEMORY)


def is_device_broken(error: BaseException) -> bool:
    """Later calls would fail too, whatever their rows: a CUDA context does not survive an assert or a bad access."""
    return not is_out_of_memory(error) and _says(error, _BROKEN_DEVICE)


def _says(error: BaseException, texts: Sequence[str]) -> bool:
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in texts)
