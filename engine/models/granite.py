"""Granite: Llama with a factor on the embeddings, the attention scores, what each block adds, and the logits."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from engine.models import llama
from engine.models.llama import LlamaDecoder
from engine.shape import AttentionKind, ModelShape


def shape(config: Any) -> ModelShape:
    """Sizes from a GraniteConfig; raises ModelError for an unknown activation."""
    plain = llama.shape(config)
    return replace(plain, attention_kinds=(AttentionKind(config.attention_multiplier),) * plain.layers)


class GraniteDecoder(LlamaDecoder):
    """Weights of a Granite on one device."""

    def _read(self, config: Any) -> None:
        super()._read(config)
        self._embedding_factor: float = config.embedding_multiplier
        self._block_factor: float = config.residual_multiplier
        self._logit_divisor: float = config.logits_scaling

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return super().embed(tokens, positions) * self._embedding_factor

    def _add(self, x: Tensor, block: Tensor, kind: str, layer: int) -> Tensor:
        return x + block * self._block_factor

    def capped(self, products: Tensor) -> Tensor:
        return products.div_(self._logit_divisor)
