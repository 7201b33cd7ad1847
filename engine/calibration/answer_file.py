"""Answers in a safetensors file, so that they need not be drawn again."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from engine.forward.teacher_forcing import Answer
from engine.json_text import check_is_file


def write_answers(path: Path, answers: Sequence[Answer], drawn_as: str) -> None:
    """Replace the file at once; `drawn_as` stands for all that decides the answers."""
    texts = [text for answer in answers for text in (answer.prompt, answer.tokens)]
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int64)
    tokens = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.write_bytes(save({"lengths": lengths, "tokens": tokens}, {"of": _identity(lengths, tokens, drawn_as)}))
    os.replace(unfinished, path)


def read_answers(path: Path, drawn_as: str) -> list[Answer] | None:
    """Those of a file; None if there is none, it is damaged, or they were drawn in another way."""
    try:
        check_is_file(path)
        with safe_open(path, "pt") as file:
            of, lengths, tokens = (file.metadata() or {}).get("of"), *map(file.get_tensor, ("lengths", "tokens"))
    except (OSError, SafetensorError):
        return None
    if of != _identity(lengths, tokens, drawn_as):
        return None
    texts = [text.tolist() for text in tokens.split(lengths.tolist())]
    return [Answer(prompt, text) for prompt, text in zip(texts[::2], texts[1::2], strict=True)]


def _identity(lengths: Tensor, tokens: Tensor, drawn_as: str) -> str:
    return hashlib.sha256(repr((drawn_as, lengths.tolist(), tokens.tolist())).encode()).hexdigest()
