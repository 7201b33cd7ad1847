"""Keeps a text that only looks like a control token, such as <|im_end|>, a text.

A text of unknown origin is marked before it is put into a chat or a prompt: noncharacters of Unicode stand around every
control token in it, and at its ends where these could make one with what stands beside them. What is marked so becomes
tokens piece by piece. A text without anything of the kind has no marks and becomes the tokens that it always did.
"""

import re
from itertools import accumulate, pairwise
from typing import Any

_START, _END, _CUT = "\ufdd0", "\ufdd1", "\ufdd2"
_MARK = re.compile(f"[{_START}{_END}{_CUT}]")


class ControlTokens:
    """Those of a tokenizer of transformers: its special tokens, and what else its chat template writes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.chat_template or ""
        written = template if isinstance(template, str) else "\n".join(map(str, template.values()))
        added = [
            token
            for token in tokenizer.added_tokens_decoder.values()
            if token.content.strip() and (token.special or token.content in written)
        ]
        self._texts = sorted({token.content for token in added}, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, self._texts)) or "(?!)")  # of several the longest
        self._longest = max(map(len, self._texts), default=0)
        self._heads = {text[:3] for text in self._texts}  # a quick look tells of nearly all texts that none is in them
        self._prefixes = {text[:end] for text in self._texts for end in range(1, len(text))}
        self._suffixes = {text[start:] for text in self._texts for start in range(1, len(text))}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._normalizer = backend.normalizer if backend and any(token.normalized for token in added) else None
        self._newline = self._plain("\n")

    def mark(self, text: str) -> str:
        """The text, marked where it could become control tokens; marks that it brings are taken out."""
        text = _MARK.sub("", text)
        if self._normalizer is not None and self._has_some(normal := self._normalizer.normalize_str(text)):
            text = normal  # the tokenizer would do the same, and then find control tokens in it
        could_join = self._could_join(text.strip())
        if self._has_some(text):
            text = self._any.sub(f"{_START}\\g<0>{_END}", text)
        if could_join:
            core = text.strip()
            text = text.replace(core, f"{_CUT}{core}{_CUT}", 1)
        return text

    def encode(self, text: str) -> list[int]:
        """Tokens of a text with marks in it, without those that the tokenizer adds at the ends."""
        tokens: list[int] = []
        for piece in self._pieces(text):
            if _START in piece:
                tokens += self._as_text(_MARK.sub("", piece), first=not tokens)
            elif piece := _MARK.sub("", piece):
                tokens += self._plain(piece) if not tokens else self._continued(piece)
        return tokens

    def _has_some(self, text: str) -> bool:
        return any(head in text for head in self._heads) and self._any.search(text) is not None

    def _could_join(self, core: str) -> bool:
        """Whether a text makes a control token with what may stand before or after it."""
        lengths = range(1, min(self._longest, len(core) + 1))
        if any(core[:count] in self._suffixes or core[-count:] in self._prefixes for count in lengths):
            return True
        return 0 < len(core) < self._longest and any(core in text for text in self._texts)

    def _pieces(self, text: str) -> list[str]:
        """A marked text, cut where it must be; a piece with `_START` is a control token that is to be text."""
        parts = text.split(_CUT)
        plain, cuts = "".join(parts), accumulate(map(len, parts[:-1]))
        needed = [0, *(at for at in cuts if self._crossed(plain, at)), len(plain)]
        spans = [plain[start:end] for start, end in pairwise(needed)]
        token = f"({_START}(?:{self._any.pattern}){_END})|[{_START}{_END}]"  # a template may have parted a pair
        return [piece for span in spans for piece in re.split(token, span) if piece]

    def _crossed(self, plain: str, at: int) -> bool:
        """Whether a control token begins before a place and ends after it."""
        starts = range(max(0, at - self._longest + 1), at)
        found = (self._any.match(plain, start) for start in starts)
        return any(match is not None and match.end() > at for match in found)

    def _as_text(self, token: str, first: bool) -> list[int]:
        """A control token, spelled out."""
        own = self._tokenizer.convert_tokens_to_ids(token)
        tokens = self._plain(token, split=True) if first else self._continued(token, split=True)
        if own in tokens:  # no special one, or in the vocabulary as a word
            tokens = [spelled for letter in token for spelled in self._continued(letter)]
        return tokens

    def _continued(self, piece: str, split: bool = False) -> list[int]:
        """Tokens of what does not begin a text: after a newline there is no space that some tokenizers begin with."""
        tokens = self._plain("\n" + piece, split)
        count = len(self._newline)
        return tokens[count:] if tokens[:count] == self._newline else self._plain(piece, split)

    def _plain(self, text: str, split: bool = False) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=split)
        return list(encoded["input_ids"])


def is_marked(text: str) -> bool:
    """Whether `ControlTokens.encode` has to see to it."""
    return _MARK.search(text) is not None
