"""The prompt template: a row's columns become prompt tokens, or an error that says why not."""

import string
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Literal, NamedTuple

from engine import ModelError, PromptError, Tokenizer, parse_json
from pipeline.errors import JobError

_PROBES = ("a", "The", "7", "é", "\u4e2d", "(", '"', "#", "\n", "")  # beginnings of texts
# A template may make a control token of a role: of these names it does so rightly.
ROLES = {"system", "developer", "user", "assistant", "model", "tool", "function", "ipython"}


class RowError(ValueError):
    """A row that no prompt can be made of; the text goes into its `error` column."""


class EncodedPrompt(NamedTuple):
    tokens: list[int]
    truncated: bool = False


@dataclass(frozen=True)
class PromptTemplate:
    """System and user text; {text} is the text column, {name} any other column (null renders as nothing)."""

    user: str = "{text}"
    system: str | None = None
    format: Literal["chat", "raw", "messages"] = "chat"
    overlong: Literal["truncate", "reject"] = "truncate"
    parse_control_tokens: bool = False  # those in rows; those of the template itself always are what they say

    def __post_init__(self) -> None:
        if "text" not in self.fields:
            raise JobError(
                f"the prompt {self.user!r} has no {{text}} field: say where the text column goes, for which {{text}} "
                "stands whatever its name (--text-column)"
            )
        if self.format != "messages":
            return
        if self.system is not None:
            raise JobError("messages bring their own system text: leave system out")
        begins = next(iter(string.Formatter().parse(self.user.lstrip())))[0]
        if begins and not begins.startswith("["):
            raise JobError(
                f"a prompt of messages is a JSON list; this one begins with {begins[:40]!r}: name --prompt '{{text}}'"
            )

    @cached_property
    def fields(self) -> frozenset[str]:
        """Names in braces; raises JobError for anything but plain names."""
        names = set()
        try:
            for text in filter(None, (self.user, self.system)):
                for _, field, spec, conversion in string.Formatter().parse(text):
                    if field is None:
                        continue
                    # Attributes and indices would let a template reach into Python objects.
                    if spec or conversion or not field:
                        raise ValueError(f"{{{field}}} has to be a column's name and no more")
                    if any(mark in field for mark in ".["):
                        raise ValueError(f"{{{field}}} is not a column name, and nothing within a column can be named")
                    if field.isdecimal():  # to Python a position among arguments, of which there are none
                        raise ValueError(f"{{{field}}} is a number, which cannot name a column: rename the column")
                    names.add(field)
        except ValueError as error:
            raise JobError(
                f"the prompt template is malformed ({error}): write {{{{ and }}}} for plain braces"
            ) from None
        return frozenset(names)

    def check_columns(self, columns: set[str]) -> None:
        """Raises JobError if a field names no column."""
        missing = sorted(self.fields - {"text"} - columns)
        if missing:
            raise JobError(f"the prompt names column {missing[0]!r}, the input has {', '.join(sorted(columns))}")

    def encode(self, row: Mapping[str, object], tokenizer: Tokenizer, longest: int) -> EncodedPrompt:
        """Prompt tokens of a row, by field, where "text" is the text column's; one of more than `longest` tokens is
        rejected, or its text cut at the end until it fits. Raises RowError.
        """
        text = row["text"]
        if not isinstance(text, str):
            raise RowError("text is null" if text is None else f"text is {type(text).__name__}, not a string")
        if not text or text.isspace():
            raise RowError("text is empty")
        values = {name: "" if (value := row.get(name)) is None else str(value) for name in self.fields}
        tokens = self._render(values, tokenizer)
        excess = len(tokens) - longest
        if excess <= 0:
            return EncodedPrompt(tokens)
        if self.overlong == "reject" or self.format == "messages":  # there is no telling what of a chat to cut
            raise RowError(f"prompt has {len(tokens)} tokens, the limit is {longest}")
        text_tokens = tokenizer.encode_plain(text if self.parse_control_tokens else tokenizer.as_text(text))
        while excess > 0:
            # Cut pieces may tokenise into a few more tokens than were kept, so this can take another round.
            text_tokens = text_tokens[: max(0, len(text_tokens) - excess)]
            kept = tokenizer.decode(text_tokens, keep_special=self.parse_control_tokens)
            kept = kept.rstrip("\ufffd")  # the first bytes of a character that is cut
            if not kept:
                raise RowError(f"prompt has more than {longest} tokens even without its text")
            tokens = self._render(values | {"text": kept}, tokenizer)
            excess = len(tokens) - longest
        return EncodedPrompt(tokens, truncated=True)

    def shared_prefix(self, tokenizer: Tokenizer) -> list[int]:
        """Tokens that the prompts of nearly all rows begin with: the instruction before the first field.

        A text that a tokenizer would melt with the instruction's end makes a prompt that begins otherwise. Raises
        ModelError for a model that no prompt of this template can be rendered for.
        """
        if self.format == "messages":
            return []
        try:
            renders = [self._render(dict.fromkeys(self.fields, text), tokenizer) for text in _PROBES]
        except PromptError as error:
            without = "" if self.system is None else "leave out --system, or "
            raise ModelError(f"{error}: {without}use --prompt-format raw") from None
        in_step = zip(*renders, strict=False)
        return [tokens[0] for tokens in takewhile(lambda tokens: len(set(tokens)) == 1, in_step)]

    def _render(self, values: Mapping[str, str], tokenizer: Tokenizer) -> list[int]:
        if self.format == "messages":
            messages = _messages(self.user.format_map(values))
            if not self.parse_control_tokens:
                for message in messages:
                    role = message["role"]
                    message["role"] = role if role in ROLES else tokenizer.as_text(role)
                    message["content"] = tokenizer.as_text(message["content"])
            return tokenizer.encode_messages(messages)
        if not self.parse_control_tokens:
            values = {name: tokenizer.as_text(text) for name, text in values.items()}
        user, system = self.user.format_map(values), self.system and self.system.format_map(values)
        return tokenizer.encode((system or "") + user) if self.format == "raw" else tokenizer.encode_chat(user, system)


def _messages(text: str) -> list[dict[str, str]]:
    """A chat's messages from JSON. Raises RowError."""
    try:
        messages = parse_json(text)
    except ValueError as error:
        raise RowError(f"messages are no JSON: {error}") from None
    if not isinstance(messages, list) or not messages:
        raise RowError("messages are no list of role and content")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise RowError("a message is no object with a role and a content, both strings")
    return [{"role": message["role"], "content": message["content"]} for message in messages]
