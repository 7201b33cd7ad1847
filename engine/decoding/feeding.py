"""Prompts in as room for them comes near, generations out as rows end: a call over rows that come and go."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import count
from typing import Protocol

from engine.decoding.generation import Generation
from engine.decoding.stats import BatchStats

ALIVE_S = 1.0  # between two signs that passes are made, where no row ends

Named = Iterator[tuple[int, str, Sequence[int]]]  # index, sample id, tokens


class Decoding(Protocol):
    """Rows under one sampling and one schedule, that come and go. Engines differ in how they make a pass."""

    @property
    def unfinished(self) -> int:
        """Rows queued or running."""

    def add(self, prompt: Sequence[int], sample_id: str, index: int) -> None:
        """Queue a prompt, all its samples; `index` is what its generations will name it by.

        Raises PromptError where it is empty or does not fit the context; nothing is queued then.
        """

    def step(self) -> list[Generation]:
        """One pass; the generations that ended in it. `Generation.index` says whose they are."""

    def take_stats(self) -> BatchStats:
        """What passes have cost since this was last asked."""

    def close(self) -> None:
        """End it, whatever is unfinished."""


def named(
    prompts: Iterable[str | Sequence[int]], sample_ids: Iterable[str] | None, encode: Callable[[str], Sequence[int]]
) -> Named:
    """Prompts with what names their random streams, by default their positions, text as `encode` gives its tokens.

    Raises ValueError where there are not as many ids as prompts, at once where both have a length; and for one prompt
    in place of several.
    """
    if isinstance(prompts, str):
        raise ValueError(f"prompts must be a list of prompts, got one: {prompts[:40]!r}")
    if isinstance(prompts, Sequence) and isinstance(sample_ids, Sequence) and len(prompts) != len(sample_ids):
        raise ValueError(f"{len(prompts)} prompts need as many sample_ids, got {len(sample_ids)}")
    ids = map(str, count()) if sample_ids is None else sample_ids
    pairs = enumerate(zip(prompts, ids, strict=sample_ids is not None))
    return ((i, name, encode(prompt) if isinstance(prompt, str) else prompt) for i, (prompt, name) in pairs)


def feed(
    decoding: Decoding, prompts: Named, ahead: int, on_batch: Callable[[BatchStats], None] | None
) -> Iterator[Generation]:
    """All generations of an empty decoding, which is closed then, or when they are not wanted any more.

    The next prompt is taken when fewer than `ahead` rows are unfinished, and no pass is made meanwhile; raises
    PromptError when it is a bad one.
    """
    told = time.monotonic()
    with closing(decoding):
        while True:
            while decoding.unfinished < ahead and (taken := next(prompts, None)) is not None:
                index, name, tokens = taken
                decoding.add(tokens, name, index)
            if not decoding.unfinished:
                return
            done = decoding.step()
            if done or time.monotonic() - told >= ALIVE_S:
                told = time.monotonic()
                stats = decoding.take_stats()  # whoever listens: a stream without end is not to gather them
                if on_batch is not None:
                    on_batch(stats)
            yield from done
