"""Prompts for tiny random models."""

from collections.abc import Sequence

import torch


def random_prompts(lengths: Sequence[int], seed: int = 0, vocab: int = 96) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab, (length,), generator=draw).tolist() for length in lengths]
