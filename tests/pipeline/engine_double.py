"""Stand-ins for the engine: what the pipeline does with millions of rows can be watched in seconds."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Self

from engine import BatchStats, Decoding, Generation, ModelShape, Sampling, Schedule
from pipeline.config import GenerationConfig
from pipeline.preparing.backend import ModelIdentity

LAYERS = 4
PADDING_PER_BATCH = 7
# Columns that a commit's totals add up; every generation has more than nothing of each.
SUMMED = (
    "prompt_tokens",
    "generated_tokens",
    "flops_prompt",
    "flops_decode",
    "flops_decode_full_depth",
    "flops_full_depth",
)


class ByteTokenizer:
    """One token per byte of UTF-8; a chat is the user text between two marks."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    encode_plain = encode

    def as_text(self, text: str) -> str:
        return text

    def encode_chat(self, user: str, system: str | None = None) -> list[int]:
        return [1, *(system or "").encode(), *user.encode(), 2]

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return [1, *"\n".join(f"{m['role']}: {m['content']}" for m in messages).encode(), 2]

    def decode(self, tokens: Sequence[int], keep_special: bool = False) -> str:
        return bytes(tokens).decode(errors="ignore")


@dataclass(frozen=True)
class Echo:
    """An engine whose generations are the prompts' first bytes, so that a test knows each row's by heart."""

    prefix: str = ""
    signed: bool = False  # generations name the process that made them
    seconds_per_batch: float = 0.0

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: Sampling | None = None,
        schedule: Schedule | None = None,
        batch_size: int = 32,
        sample_ids: Sequence[str] | None = None,
        on_batch: Callable[[BatchStats], None] | None = None,
    ) -> Iterator[Generation]:
        """Batches come last rows first: whoever relies on the order of generations is wrong."""
        assert sampling is not None
        assert sample_ids is not None
        assert len(sample_ids) == len(prompts)
        self.before(prompts)
        prefix = f"{os.getpid()} " if self.signed else self.prefix
        longest = sampling.max_new_tokens
        for end in range(len(prompts), 0, -batch_size):
            time.sleep(self.seconds_per_batch)
            indices = range(max(0, end - batch_size), end)
            generated = 0
            for index, sample in product(indices, reversed(range(sampling.samples_per_prompt))):
                prompt = prompts[index]
                assert not isinstance(prompt, str)
                tokens = tuple(prompt[:longest])
                read, written = len(prompt), len(tokens)
                generated += written
                flops_prompt = 0 if sample else 100 * read  # the first one pays
                yield Generation(
                    index,
                    sample,
                    prefix + bytes(tokens).decode(errors="ignore"),
                    tokens,
                    "stop" if read <= longest else "length",
                    read,
                    0,  # of a shared prefix
                    flops_prompt,
                    30 * written,  # flops_decode
                    60 * written,  # flops_decode_full_depth
                    flops_prompt + 60 * written,  # flops_full_depth
                    LAYERS / 2,
                )
            stats = BatchStats(
                samples=len(indices) * sampling.samples_per_prompt,
                prompt_tokens=sum(len(prompts[index]) for index in indices),
                generated_tokens=generated,
                steps=longest,
                live_rows=len(indices) * longest,
                seats=len(indices) * longest,
                flops_padding=PADDING_PER_BATCH,
                cache_course=(0,),
                prefill_seconds=0.0,
                decode_seconds=0.0,
            )
            self.after(stats)
            if on_batch is not None:
                on_batch(stats)

    def decoding(
        self, sampling: Sampling | None = None, schedule: Schedule | None = None, batch_size: int = 32
    ) -> Decoding:
        return _EchoDecoding(self, sampling, schedule, batch_size)

    def before(self, prompts: Sequence[str | Sequence[int]]) -> None:
        """What a double of another kind does first."""

    def after(self, stats: BatchStats) -> None:
        """What a double of another kind does when a batch is done, before anybody hears of it."""

    def share_prefix(self, tokens: Sequence[int]) -> int:
        return 0

    def fitting_batch_size(
        self, prompt_tokens: int, sampling: Sampling | None = None, schedule: Schedule | None = None
    ) -> int:
        """As if a batch of 10,000 prompt tokens filled the memory."""
        return max(1, 10_000 // prompt_tokens)


@dataclass
class _EchoDecoding:
    """Rows in order of their coming, a batch in each pass."""

    echo: Echo
    sampling: Sampling | None
    schedule: Schedule | None
    batch_size: int
    waiting: list[tuple[Sequence[int], str, int]] = field(default_factory=list)
    stats: BatchStats = field(default_factory=BatchStats)

    @property
    def unfinished(self) -> int:
        return len(self.waiting) * (self.sampling or Sampling()).samples_per_prompt

    def add(self, prompt: Sequence[int], sample_id: str, index: int) -> None:
        self.waiting.append((prompt, sample_id, index))

    def step(self) -> list[Generation]:
        batch, self.waiting = self.waiting[: self.batch_size], self.waiting[self.batch_size :]
        prompts, ids, indices = [list(each) for each in zip(*batch, strict=True)]
        terms = self.sampling, self.schedule, self.batch_size
        done = list(self.echo.generate(prompts, *terms, ids, self._count))
        return [replace(generation, index=indices[generation.index]) for generation in done]

    def take_stats(self) -> BatchStats:
        stats, self.stats = self.stats, BatchStats()
        return stats

    def close(self) -> None:
        self.waiting = []

    def _count(self, stats: BatchStats) -> None:
        self.stats += stats


@dataclass(frozen=True)
class EchoBackend:
    """A model that costs nothing to load."""

    echo: Echo = Echo()
    context: int = 4096
    model: str = "0"  # another is another identity

    def shape(self, config: GenerationConfig) -> ModelShape:
        return ModelShape(
            family="echo",
            layers=LAYERS,
            hidden=8,
            heads=2,
            kv_heads=1,
            head_dim=4,
            vocab=256,
            context=self.context,
            attention_parameters=200,
            mlp_parameters=400,
            head_parameters=256 * 8,
        )

    def pinned(self, model: str) -> str:
        return model

    def identity(self, config: GenerationConfig) -> ModelIdentity:
        return ModelIdentity({"echo": self.model}, config.dtype)

    def held_to(self, identity: ModelIdentity, began: str) -> Self:
        return self

    def tokenizer(self, config: GenerationConfig) -> ByteTokenizer:
        return ByteTokenizer()

    def engine(self, config: GenerationConfig, threads: int | None) -> Echo:
        return self.echo


class NoEngineBackend(EchoBackend):
    """For jobs that have to end, well or badly, without an engine."""

    def engine(self, config: GenerationConfig, threads: int | None) -> Echo:
        raise AssertionError("an engine was loaded")
