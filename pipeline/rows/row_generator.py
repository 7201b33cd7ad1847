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
        self.engine, self.sampling, self.schedule = engine, sampling, schedule
        self._auto = batch_size == "auto"
        # Halved for good when memory runs out: the size, or where that is "auto" the share that is taken of what fits.
        self.batch_size = MOST_ROWS if batch_size == "auto" else batch_size
        self.room = 1.0
        self.samples = sampling.samples_per_prompt
        self._joined = 0  # rows of the stream that calls share: what "fits" is then what it was opened with
        self.failed = 0  # rows of calls in which all of them failed, since any row has not

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
        return _RowsOfCall(self, prompts, sample_ids, on_batch).run()

    def size_for(self, prompts: Sequence[Sequence[int]]) -> int:
        """Rows of a batch, of a call's prompts."""
        if not self._auto or not prompts:
            return self.batch_size
        longest = max(map(len, prompts))
        size = min(self.batch_size, self.engine.fitting_batch_size(longest, self.sampling, self.schedule))
        if size != self._joined:
            self._joined = size = max(1, int(size * self.room))
        return size

    def shrink(self, size: int, room: float) -> None:
        """Memory has run out for a call, that goes on with batches of this size; it had begun with so much room."""
        if self._auto:
            self.room = min(self.room, room / 2)  # once, where calls run out together
            self._joined = 0
        else:
            self.batch_size = max(size, self.batch_size // 2)
        then = f"{self.room:.0%} of what should fit" if self._auto else f"{self.batch_size} rows"
        log.warning("out of memory: going on with batches of %d rows, then of %s", size, then)

    def answers(self, prompt: Sequence[int], sample_id: str, size: int) -> bool:
        """Whether the engine gives anything, if only for a prompt's first token: else it is not the rows that fail."""
        try:
            return any(self.engine.generate([prompt[:1]], self.sampling, self.schedule, size, [sample_id]))
        except Exception as error:
            log.warning("a prompt of one token fails too: %s", described(error))
            return False


class _RowsOfCall:
    """The rows of one call, and what has become of them so far."""

    def __init__(
        self,
        generator: RowGenerator,
        prompts: Sequence[Sequence[int]],
        sample_ids: Sequence[str],
        on_batch: Callable[[BatchStats], None] | None,
    ) -> None:
        self._generator, self._prompts, self._ids, self._on_batch = generator, prompts, sample_ids, on_batch
        self._samples = generator.samples
        self._found: dict[int, Generation | str] = {}  # by row and sample: a row is a prompt here
        self._untold: list[int] = []  # tokens of each sample that has ended since `on_batch` was called
        self._quarantined = self._streak = 0  # rows that have failed: in all, and since one has not
        self._room, self._size = generator.room, generator.size_for(prompts)

    def run(self) -> list[Generation | str]:
        """As `RowGenerator.generate`."""
        spans = [list(range(len(self._prompts)))] if self._prompts else []  # still to do, the next one last
        while spans:
            rows = spans.pop()
            error = self._try(rows)
            if error is None:
                continue
            if is_out_of_memory(error):
                gc.collect()
            left = [row for row in rows if any(place not in self._found for place in self._places(row))]
            together = min(self._size, self._samples * len(left))
            if is_out_of_memory(error) and together > 1:
                self._size = together // 2
                self._generator.shrink(self._size, self._room)
                self._room = self._generator.room
                spans.append(left)
            elif len(left) > 1:
                middle = len(left) // 2
                spans += [left[middle:], left[:middle]]
            elif left:
                self._quarantine(left[0], error)
        if self._untold:
            self._tell(BatchStats())
        return [self._found[place] for place in range(self._samples * len(self._prompts))]

    def _places(self, row: int) -> range:
        """Of its samples."""
        return range(row * self._samples, (row + 1) * self._samples)

    def _try(self, rows: Sequence[int]) -> Exception | None:
        """Generate for these rows, and return what ended it early. Raises DeviceBroken, ModelError, ScheduleError."""
        prompts, ids = [self._prompts[row] for row in rows], [self._ids[row] for row in rows]
        sampling, schedule = self._generator.sampling, self._generator.schedule
        try:
            for generation in self._generator.engine.generate(prompts, sampling, schedule, self._size, ids, self._tell):
                place = self._places(rows[generation.index])[generation.sample]
                if place not in self._found:  # else its row is done again for other samples
                    self._found[place] = generation
                    self._untold.append(generation.generated_tokens)
                    self._streak = self._generator.failed = 0
        except (ModelError, ScheduleError):
            raise  # of the engine, not of any row
        except Exception as error:
            if is_device_broken(error):
                raise DeviceBroken(described(error)) from error
            # The traceback holds the failed batch's tensors, the memory that the next try needs.
            return error.with_traceback(None)
        return None

    def _tell(self, stats: BatchStats) -> None:
        if self._on_batch is not None:
            self._on_batch(replace(stats, samples=len(self._untold), generated_tokens=sum(self._untold)))
        self._untold.clear()

    def _quarantine(self, row: int, error: Exception) -> None:
        """Take down the error of a row that fails alone. Raises TooManyRowsFailed."""
        generator, found = self._generator, self._found
        self._quarantined, self._streak = self._quarantined + 1, self._streak + 1
        none = self._quarantined == len(self._prompts) and all(isinstance(each, str) for each in found.values())
        if none:
            self._streak = generator.failed = generator.failed + self._quarantined
        share = SHARE_QUARANTINED * len(found) / self._samples
        many = self._streak > MOST_QUARANTINED or self._quarantined > max(MOST_QUARANTINED, share)
        if many or (none and not generator.answers(self._prompts[row], self._ids[row], self._size)):
            if len(self._prompts) > 1:
                generator.failed = 0  # whoever narrows it down asks for them again, one by one
            count = max(self._quarantined, self._streak)
            raise TooManyRowsFailed(f"{count} rows fail, the last of them with {described(error)}")
        for place in self._places(row):
            found.setdefault(place, described(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Memory ran out, the host's or the device's (torch.OutOfMemoryError, or a RuntimeError that says so)."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or _says(error, _OUT_OF_MEMORY)


def is_device_broken(error: BaseException) -> bool:
    """Later calls would fail too, whatever their rows: a CUDA context does not survive an assert or a bad access."""
    return not is_out_of_memory(error) and _says(error, _BROKEN_DEVICE)


def _says(error: BaseException, texts: Sequence[str]) -> bool:
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in texts)
