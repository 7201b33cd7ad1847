"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and sliding windows in some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.families import llama
from engine.families.llama import LlamaDecoder as Qwen2Decoder
from engine.shape import ModelShape

__all__ = ["Qwen2Decoder", "shape"]


def shape(config: Any) -> ModelShape:
    """Sizes from a Qwen2Config; raises ModelError."""
    plain = llama.shape(config)
    return replace(plain, attention_kinds=llama.attention_kinds(config, plain.head_dim**-0.5))
