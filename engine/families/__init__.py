"""Model families, one file each. Adding one: write its decoder, name its model types here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from engine.checkpoint import Weights
from engine.decoder import Decoder
from engine.errors import ModelError
from engine.families import llama
from engine.kernels import Kernels
from engine.shape import ModelShape


class Family(NamedTuple):
    """How to read a family's config and weights."""

    shape: Callable[[Any], ModelShape]
    load: Callable[[Any, Weights, Kernels, torch.device], Decoder]


FAMILIES = {"llama": Family(llama.shape, llama.LlamaDecoder)}


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a model; raises ModelError naming those supported."""
    if config.model_type not in FAMILIES:
        raise ModelError(f"models of type {config.model_type!r} are not supported; supported are {', '.join(FAMILIES)}")
    return FAMILIES[config.model_type]
