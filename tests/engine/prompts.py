"""Prompts for tiny random models, and what they share."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from engine import Engine


def random_prompts(lengths: Sequence[int], seed: int = 0, vocab: int = 96) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab, (length,), generator=draw).tolist() for length in lengths]


@contextmanager
def sharing(engine: Engine, prefix: Sequence[int]) -> Iterator[int]:
    """An engine that has computed what prompts begin with, for the FLOPs given; others that use it find no trace."""
    try:
        yield engine.share_prefix(prefix)
    finally:
        engine.share_prefix(())
