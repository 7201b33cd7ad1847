"""What the tokens of cached decoding are chosen from."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from engine.decoding.sampling import Sampler


@contextmanager
def tapped(told: Mapping[str, Sequence[int]] | None = None) -> Iterator[dict[str, list[Tensor]]]:
    """Logits by sample id and step, [vocab], of all that engines generate inside the block.

    Samples that are told an answer, by their ids, write that whatever their logits say.
    """
    kept: dict[str, list[Tensor]] = {}
    answers = told or {}

    class Tapped(Sampler):
        """The real sampler, which keeps a copy of the logits that it is given."""

        def __init__(self, *how: Any) -> None:
            super().__init__(*how)
            self._ids: dict[int, str] = {}  # by seat

        def enter(self, seat: int, prompt: Sequence[int], sample_id: str) -> None:
            super().enter(seat, prompt, sample_id)
            self._ids[seat] = sample_id

        def choose(self, logits: Tensor, seats: Sequence[int], steps: Sequence[int]) -> Tensor:
            ids = [self._ids[seat] for seat in seats]
            for sample_id, row in zip(ids, logits.clone(), strict=True):
                kept.setdefault(sample_id, []).append(row)
            tokens = super().choose(logits, seats, steps)
            for place, (sample_id, step) in enumerate(zip(ids, steps, strict=True)):
                if sample_id in answers:
                    tokens[place] = answers[sample_id][step]
            return tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.decoding.stream.Sampler", Tapped)
        yield kept
