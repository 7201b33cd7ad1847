"""Answers in a safetensors file, so that they need not be drawn again."""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from engine.forward.teacher_forcing import Answer
from engine.json_text import check_is_file


class Drawn(NamedTuple):
    """Answers to the first prompts of some, in their order; those without a decode pass are left out."""

    answers: list[Answer]
    prompts: int | None  # how many of them are answered; None for all


def write_answers(path: Path, drawn: Drawn, drawn_as: str) -> None:
    """Replace the file at once; `drawn_as` stands for all that decides the answers."""
    texts = [text for answer in drawn.answers for text in (answer.prompt, answer.tokens)]
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int64)
    tokens = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
    unfinished = path.with_name(f".{path.name}.part")
    told = {"of": _identity(lengths, tokens, drawn_as, drawn.prompts)}
    if drawn.prompts is not None:
        told["prompts"] = str(drawn.prompts)
    unfinished.write_bytes(save({"lengths": lengths, "tokens": tokens}, told))
    os.replace(unfinished, path)


def read_answers(path: Path, drawn_as: str) -> Drawn | None:
    """Those of a file; None if there is none, it is damaged, or they were drawn in another way."""
    try:
        check_is_file(path)
        with safe_open(path, "pt") as file:
            told, lengths, tokens = file.metadata() or {}, *map(file.get_tensor, ("lengths", "tokens"))
        prompts = int(told["prompts"]) if "prompts" in told else None
    except (OSError, SafetensorError, ValueError):
        return None
    if told.get("of") != _identity(lengths, tokens, drawn_as, prompts):
        return None
    texts = [text.tolist() for text in tokens.split(lengths.tolist())]
    return Drawn([Answer(prompt, text) for prompt, text in zip(texts[::2], texts[1::2], strict=True)], prompts)


def _identity(lengths: Tensor, tokens: Tensor, drawn_as: str, prompts: int | None) -> str:
    decided = drawn_as if prompts is None else (drawn_as, prompts)
    return hashlib.sha256(repr((decided, lengths.tolist(), tokens.tolist())).encode()).hexdigest()
