"""Text to tokens and back, chat template included, by the checkpoint's own tokenizer."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from jinja2 import TemplateError

from engine.checkpoints import checkpoint
from engine.checkpoints.control_tokens import ControlTokens, is_marked
from engine.errors import ModelError, PromptError
from engine.json_text import read_json

GENERATION_CONFIG, CONFIG, TOKENIZER_FILE = "generation_config.json", "config.json", "tokenizer.json"
PROBE = "Is this text kept, with its\n2 lines?"


class Tokenizer:
    """A checkpoint's tokenizer and the ids that end its generations."""

    def __init__(self, directory: Path, now: datetime | None = None) -> None:
        """Raises ModelError. Chat templates that write the date are told `now`, by default the time of each call."""
        self._now = now
        try:
            self._tokenizer = _read(directory)
        except Exception as error:  # libraries raise much at a damaged file
            raise ModelError(f"the tokenizer in {str(directory)!r} cannot be read: {error}") from error

        # Tokens that end a generation: the generation config's, else the config's and the tokenizer's. Read now, with
        # all else.
        self.eos_ids = self._read_eos_ids(directory)

    @classmethod
    def load(cls, model: str, now: datetime | None = None) -> Self:
        """The tokenizer of a model named as for `Engine.load`. Raises ModelError."""
        return cls(checkpoint.prepare(model), now)

    def _read_eos_ids(self, directory: Path) -> tuple[int, ...]:
        file = directory / GENERATION_CONFIG
        if file.is_file():
            from transformers import GenerationConfig

            try:
                ids = GenerationConfig.from_pretrained(directory).eos_token_id
            except (OSError, ValueError, TypeError) as error:
                raise ModelError(f"the generation config in {str(directory)!r} cannot be read: {error}") from error
            if ids is not None:
                return _token_ids(ids, file)
        # Fine-tunes that lack it end with what the one says or with what the other does.
        config, own = directory / CONFIG, self._tokenizer.eos_token_id
        try:
            ids = read_json(config)["eos_token_id"]
        except (OSError, ValueError, TypeError, KeyError):  # a damaged one is refused as a config
            ids = None
        return tuple(dict.fromkeys([*_token_ids(ids, config), *_token_ids(own, directory)]))

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Of special tokens, which no text holds, by name."""
        return {str(token): id_ for id_, token in self._tokenizer.added_tokens_decoder.items() if token.special}

    def as_text(self, text: str) -> str:
        """A text for use in prompts and messages whose control tokens, such as <|im_end|>, are to be plain text."""
        return self._control_tokens.mark(text)

    def encode(self, text: str) -> list[int]:
        """Raw text with the special tokens that the tokenizer itself adds."""
        if not is_marked(text):
            return list(self._tokenizer(text)["input_ids"])
        before, after = self._added
        return [*before, *self._control_tokens.encode(text), *after]

    def encode_chat(self, user: str, system: str | None = None) -> list[int]:
        """A chat of one user turn, ready for the assistant's. Raises as `encode_messages`."""
        messages = [{"role": "system", "content": system}] if system is not None else []
        return self.encode_messages([*messages, {"role": "user", "content": user}])

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """A chat of messages with role and content, ready for the assistant's next.

        Raises ModelError without a chat template; PromptError if the template refuses the chat, as some do a system
        message.
        """
        if self._tokenizer.chat_template is None:
            raise ModelError("the model has no chat template: use raw prompts, or an instruction-tuned model")
        try:
            rendered = self._rendered(messages)
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise PromptError(f"the model's chat template refuses a chat of {roles} ({error})") from None
        return self.encode_plain(rendered)

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(self._tokenizer)

    @cached_property
    def _added(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and after a text."""
        whole, bare = self._tokenizer("a")["input_ids"], self._tokenizer("a", add_special_tokens=False)["input_ids"]
        starts = [at for at in range(len(whole)) if whole[at : at + len(bare)] == bare]
        at = starts[0] if starts else 0
        return list(whole[:at]), list(whole[at + len(bare) :])

    def _rendered(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A chat as text, control tokens written out."""
        template = self._tokenizer.get_chat_template()
        if self._now is None or "strftime_now" not in template:
            return str(self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False))
        # Through the public way no function can be given, only data.
        from transformers.utils.chat_template_utils import _compile_jinja_template

        return str(
            _compile_jinja_template(template).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                strftime_now=self._now.strftime,
                **self._tokenizer.special_tokens_map,
            )
        )

    def encode_plain(self, text: str) -> list[int]:
        """Text alone, without the special tokens that the tokenizer itself adds."""
        if is_marked(text):
            return self._control_tokens.encode(text)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int], keep_special: bool = False) -> str:
        """Text of tokens; special ones are left out, unless they are to be kept."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=not keep_special))


def _read(directory: Path) -> Any:
    """Raises whatever libraries do at a damaged file."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # Where mistral-common is installed, it would take the place of what the checkpoint itself says.
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, mistral_format=False)
    if not _keeps(tokenizer, PROBE) and (directory / TOKENIZER_FILE).is_file():
        # Some versions make another tokenizer of the file than it holds, by the class that the checkpoint names.
        as_stored = PreTrainedTokenizerFast.from_pretrained(directory)
        if _keeps(as_stored, PROBE):
            return as_stored
    return tokenizer


def _keeps(tokenizer: Any, text: str) -> bool:
    """Whether a text comes back from its tokens."""
    return bool(tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text)


def _token_ids(said: Any, file: Path) -> tuple[int, ...]:
    """Raises ModelError for what is no token's number, nor a list of them."""
    several = said if isinstance(said, list) else [] if said is None else [said]
    if not all(type(each) is int and each >= 0 for each in several):
        raise ModelError(f"{str(file)!r} names {said!r} as eos_token_id: a token's number belongs there, or a list")
    return tuple(several)
