"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.families import llama
from engine.families.llama import LlamaDecoder as MistralDecoder
from engine.shape import AttentionKind, ModelShape

__all__ = ["MistralDecoder", "shape"]


def shape(config: Any) -> ModelShape:
    """Sizes from a MistralConfig; raises ModelError."""
    plain = llama.shape(config)
    kind = AttentionKind(plain.head_dim**-0.5, config.sliding_window)
    return replace(plain, attention_kinds=(kind,) * plain.layers)
