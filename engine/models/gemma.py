"""Gemma 2 and Gemma 3 (text only).

Gemma 2: Llama with norms before and after each block, scaled embeddings, soft caps, alternating sliding windows.
Gemma 3: Gemma 2 with normed queries and keys instead of soft caps, and a rotary base for each window.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.models import llama
from engine.models.decoder import Rotations
from engine.models.llama import LlamaDecoder, Qwen3Decoder
from engine.shape import ModelShape


def gemma2_shape(config: Any) -> ModelShape:
    """Sizes from a Gemma2Config; raises ModelError."""
    scale = config.query_pre_attn_scalar**-0.5
    kinds = llama.attention_kinds(config, scale, config.attn_logit_softcapping)
    return replace(llama.shape(config), attention_kinds=kinds)


class Gemma2Decoder(LlamaDecoder):
    """Weights of a Gemma 2 on one device."""

    mlp_norm_name = "pre_feedforward_layernorm"

    def _read(self, config: Any) -> None:
        super()._read(config)
        post_norms = {"a": "post_attention_layernorm", "m": "post_feedforward_layernorm"}
        self._post_norms = {kind: self._norms(name) for kind, name in post_norms.items()}
        self._embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=self._weights.dtype, device=self._device)
        self._logit_softcap: float | None = config.final_logit_softcapping

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return super().embed(tokens, positions) * self._embedding_scale

    def _add(self, x: Tensor, block: Tensor, kind: str, layer: int) -> Tensor:
        return x + self._norm(block, self._post_norms[kind][layer])

    def capped(self, products: Tensor) -> Tensor:
        if self._logit_softcap is None:
            return products
        return (products / self._logit_softcap).tanh_() * self._logit_softcap  # a gradient needs what tanh gave

    def _norm_weight(self, name: str) -> Tensor:
        """A checkpoint holds how far each weight is from 1: a sum that 16 bits would round."""
        return super()._norm_weight(name).float() + 1

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return super()._norm(x.float(), weight).to(x.dtype)


def gemma3_shape(config: Any) -> ModelShape:
    """Sizes from a Gemma3TextConfig; raises ModelError."""
    kinds = llama.attention_kinds(config, config.query_pre_attn_scalar**-0.5)
    return replace(llama.shape(config), attention_kinds=kinds)


class Gemma3Decoder(Qwen3Decoder, Gemma2Decoder):
    """Weights of a Gemma 3 on one device."""

    layer_types = ("full_attention", "sliding_attention")

    def _unit_norm(self, qk: Tensor) -> Tensor:
        """In float32, to be rounded once, behind the weights."""
        return super()._unit_norm(qk.float())

    def place_keys(self, layer: int, k: Tensor, rotations: Rotations) -> Tensor:
        windowed = self.shape.attention_kind(layer).window is not None
        return super().place_keys(layer, k, (rotations[windowed],))
