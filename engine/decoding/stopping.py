"""When a generation ends: end-of-sequence, a stop string, or no room left."""

from collections.abc import Sequence

from engine.checkpoints.tokenizer import Tokenizer
from engine.decoding.sampling import Sampling


class Stopping:
    """Decides for one sample after each token, and cuts its text."""

    def __init__(self, sampling: Sampling, tokenizer: Tokenizer) -> None:
        self.sampling = sampling
        # Special tokens are in no text: one that is named as a stop string ends a generation as the model's own do.
        special = tokenizer.special_ids if sampling.stop else {}
        named = (special[stop] for stop in sampling.stop if stop in special)
        self.eos_ids = tuple(dict.fromkeys([*tokenizer.eos_ids, *named]))
        self._tokenizer = tokenizer
        # Every token holds a byte or more, so a stop string that the newest token completes lies within its last bytes
        # (and a few tokens before, lest the window starts inside a character).
        self._window = max((len(stop.encode()) for stop in sampling.stop), default=0) + 8

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether the newest of a sample's generated tokens ends it."""
        if tokens[-1] in self.eos_ids:
            return True
        if not self.sampling.stop or len(tokens) < self.sampling.min_new_tokens:
            return False
        tail = tokens[-self._window :]
        return self._cut(self._tokenizer.decode(tail), tail[:-1]) is not None

    def text(self, tokens: Sequence[int]) -> str:
        """Generated text, without the end-of-sequence token and from the first stop string on."""
        if tokens and tokens[-1] in self.eos_ids:
            tokens = tokens[:-1]
        text = self._tokenizer.decode(tokens)
        # Stop strings complete before min_new_tokens were held back: they are text like any other.
        return text[: self._cut(text, tokens[: max(0, self.sampling.min_new_tokens - 1)])]

    def _cut(self, text: str, before: Sequence[int]) -> int | None:
        """Where the first stop string starts that is not complete within the tokens `before`; None if there is none."""
        complete = len(self._tokenizer.decode(before).rstrip("\ufffd"))  # which marks a character cut in two
        starts = [text.find(stop, max(0, complete - len(stop) + 1)) for stop in self.sampling.stop]
        return min((start for start in starts if start >= 0), default=None)
