"""Gemma 3, text only: Gemma 2 with normed queries and keys instead of soft caps, and a rotary base for each window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from engine.decoder import Rotations
from engine.families import llama
from engine.families.gemma2 import Gemma2Decoder
from engine.families.qwen3 import Qwen3Decoder
from engine.rotary import Rotary
from engine.shape import ModelShape

LAYER_TYPES = ("full_attention", "sliding_attention")


def shape(config: Any) -> ModelShape:
    """Sizes from a Gemma3TextConfig; raises ModelError."""
    kinds = llama.attention_kinds(config, config.query_pre_attn_scalar**-0.5)
    return replace(llama.shape(config), attention_kinds=kinds)


class Gemma3Decoder(Qwen3Decoder, Gemma2Decoder):
    """Weights of a Gemma 3 on one device."""

    def _place(self, layer: int, qk: Tensor, rotations: Rotations) -> Tensor:
        windowed = self.shape.attention_kind(layer).window is not None
        return super()._place(layer, qk, (rotations[windowed],))

    def _make_rotaries(self, config: Any) -> tuple[Rotary, ...]:
        return tuple(Rotary(config, self.shape, self._device, layer_type) for layer_type in LAYER_TYPES)
