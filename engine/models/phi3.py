"""Phi-3 and Phi-4: Llama with a sliding window in every layer or none, and with fused projections in its checkpoints.

Positions turn a part of each head in Phi-4-mini.
"""

from dataclasses import replace
from typing import Any

import torch

from engine.checkpoints.weight_files import Weights
from engine.errors import ModelError
from engine.kernels import Kernels
from engine.models import llama
from engine.models.llama import LlamaDecoder
from engine.shape import ModelShape


def shape(config: Any) -> ModelShape:
    """Sizes from a Phi3Config; raises ModelError for an unknown activation, or a part of heads that is not of pairs.

    Under longrope the context is the original one: rows that outgrow it get all their keys anew in transformers.
    """
    plain, rope = llama.mistral_shape(config), config.rope_parameters
    share = rope["partial_rotary_factor"]
    rotary_dim = int(plain.head_dim * share)
    if rotary_dim % 2 or not 0 < rotary_dim <= plain.head_dim:
        raise ModelError(
            f"partial_rotary_factor {share} turns no even part of the {plain.head_dim} dimensions of a head"
        )
    context = rope["original_max_position_embeddings"] if rope["rope_type"] == "longrope" else plain.context
    return replace(plain, context=min(context, plain.context), rotary_dim=rotary_dim)


class Phi3Decoder(LlamaDecoder):
    """Weights of a Phi-3 on one device."""

    def __init__(
        self, config: Any, shape: ModelShape, weights: Weights, kernels: Kernels, device: torch.device
    ) -> None:
        keys, inner = shape.kv_heads * shape.head_dim, config.intermediate_size
        for layer in range(shape.layers):
            where = f"{self.prefix}.layers.{layer}"
            weights.divide(f"{where}.self_attn.{{}}_proj.weight", "qkv", {"q": shape.query_width, "k": keys, "v": keys})
            weights.divide(f"{where}.mlp.{{}}_proj.weight", "gate_up", {"gate": inner, "up": inner})
        super().__init__(config, shape, weights, kernels, device)
