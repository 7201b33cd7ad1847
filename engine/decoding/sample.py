"""One generation from its place in the queue to its last token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Sample:
    """One generation under way."""

    index: int  # of the prompt, as its caller counts
    copy: int  # which of the prompt's samples
    sample_id: str
    prompt: Sequence[int]
    limit: int  # most tokens it may generate
    seat: int = -1  # while it runs, whose state it has in cache and sampler
    shares_prompt: bool = False  # another sample has computed this prompt in the same pass
    shared_prefix: int = 0  # tokens of the prompt that a prefix has computed for all
    tokens: list[int] = field(default_factory=list)
    ended: bool = False  # by end-of-sequence or a stop string

    @property
    def prompt_computed(self) -> int:
        """Prompt tokens that are computed for this sample."""
        return 0 if self.shares_prompt else len(self.prompt) - self.shared_prefix

    @property
    def step(self) -> int:
        """The decode step of its next pass."""
        return len(self.tokens) - 1

    @property
    def length(self) -> int:
        """Tokens so far, prompt and generation."""
        return len(self.prompt) + len(self.tokens)

    @property
    def longest(self) -> int:
        """Tokens at its end, should it get there."""
        return len(self.prompt) + self.limit

    @property
    def finished(self) -> bool:
        return self.ended or len(self.tokens) >= self.limit
