"""When a generation ends: end-of-sequence, a stop string, or no room left."""

from __future__ import annotations

from collections.abc import Sequence

from engine.sampling import Sampling
from engine.tokenizer import Tokenizer


class Stopping:
    """Decides for one sample after each token, and cuts its text."""

    def __init__(self, sampling: Sampling, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> None:
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_ids)
        # Every token holds a byte or more, so a stop string that the newest token completes lies within its last bytes
        # (and a few tokens before, lest the window starts inside a character).
        self._window = max((len(stop.encode()) for stop in sampling.stop), default=0) + 8

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether the newest of a sample's generated tokens ends it."""
        if tokens[-1] in self._eos:
            return True
        if not self._sampling.stop or len(tokens) < self._sampling.min_new_tokens:
            return False
        tail = self._tokenizer.decode(tokens[-self._window :])
        return any(stop in tail for stop in self._sampling.stop)

    def text(self, tokens: Sequence[int]) -> str:
        """Generated text, without the end-of-sequence token and from the first stop string on."""
        if tokens and tokens[-1] in self._eos:
            tokens = tokens[:-1]
        text = self._tokenizer.decode(tokens)
        cuts = [text.find(stop) for stop in self._sampling.stop if stop in text]
        return text[: min(cuts)] if cuts else text
