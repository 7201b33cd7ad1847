"""Text to tokens and back, chat template included, by the checkpoint's own tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from engine import checkpoint
from engine.errors import ModelError


class Tokenizer:
    """A checkpoint's tokenizer and the ids that end its generations."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        self.directory = directory
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"the tokenizer in {str(directory)!r} cannot be read: {error}") from error

    @classmethod
    def load(cls, model: str) -> Tokenizer:
        """The tokenizer of a model named as for `Engine.load`. Raises ModelError."""
        return cls(checkpoint.prepare(model))

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation: the generation config's, else the tokenizer's."""
        ids: object = None
        if (self.directory / "generation_config.json").is_file():
            from transformers import GenerationConfig

            ids = GenerationConfig.from_pretrained(self.directory).eos_token_id
        if ids is None:
            ids = self._tokenizer.eos_token_id
        if ids is None:
            return ()
        return (ids,) if isinstance(ids, int) else tuple(ids)  # type: ignore[arg-type]

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """Raw text with the special tokens that the tokenizer itself adds."""
        return list(self._tokenizer(text)["input_ids"])

    def encode_chat(self, user: str, system: str | None = None) -> list[int]:
        """A chat of one user turn, ready for the assistant's. Raises ModelError without a chat template."""
        messages = [{"role": "system", "content": system}] if system is not None else []
        return self.encode_messages([*messages, {"role": "user", "content": user}])

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """A chat of messages with role and content, ready for the assistant's next. Raises as `encode_chat`."""
        if not self.has_chat_template:
            raise ModelError("the model has no chat template: use raw prompts, or an instruction-tuned model")
        return list(
            self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
        )

    def encode_plain(self, text: str) -> list[int]:
        """Text alone, without special tokens."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of generated tokens; special tokens are left out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
