"""Model families, one file each. Adding one: write its decoder, name its model type here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from engine.decoder import Decoder
from engine.errors import ModelError
from engine.families import gemma2, gemma3, llama, mistral, opt, qwen2, qwen3, smollm3
from engine.kernels import Kernels
from engine.shape import ModelShape
from engine.weight_files import Weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Family(NamedTuple):
    """How to read a family's config and weights."""

    shape: Callable[[Any], ModelShape]
    decoder: Callable[[Any, ModelShape, Weights, Kernels, torch.device], Decoder]


# By the config's model_type.
FAMILIES = {
    "llama": Family(llama.shape, llama.LlamaDecoder),
    "mistral": Family(mistral.shape, mistral.MistralDecoder),
    "qwen2": Family(qwen2.shape, qwen2.Qwen2Decoder),
    "qwen3": Family(qwen3.shape, qwen3.Qwen3Decoder),
    "smollm3": Family(smollm3.shape, smollm3.SmolLM3Decoder),
    "gemma2": Family(gemma2.shape, gemma2.Gemma2Decoder),
    "gemma3_text": Family(gemma3.shape, gemma3.Gemma3Decoder),
    "opt": Family(opt.shape, opt.OPTDecoder),
}


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a model; raises ModelError naming those supported."""
    if config.model_type not in FAMILIES:
        raise ModelError(f"models of type {config.model_type!r} are not supported; supported are {', '.join(FAMILIES)}")
    return FAMILIES[config.model_type]
