"""Model families by the type that a config names. Adding one: write its decoder, name its model type here."""

from collections.abc import Callable
from typing import Any, NamedTuple

from engine.errors import ModelError
from engine.models import gemma, granite, llama, opt, phi3
from engine.models.decoder import Decoder
from engine.shape import ModelShape


class Family(NamedTuple):
    """How to read a family's config and weights."""

    shape: Callable[[Any], ModelShape]
    decoder: type[Decoder]


# By the config's model_type.
FAMILIES = {
    "llama": Family(llama.shape, llama.LlamaDecoder),
    "mistral": Family(llama.mistral_shape, llama.LlamaDecoder),
    "qwen2": Family(llama.windowed_shape, llama.LlamaDecoder),
    "qwen3": Family(llama.windowed_shape, llama.Qwen3Decoder),
    "smollm3": Family(llama.windowed_shape, llama.SmolLM3Decoder),
    "gemma2": Family(gemma.gemma2_shape, gemma.Gemma2Decoder),
    "gemma3_text": Family(gemma.gemma3_shape, gemma.Gemma3Decoder),
    "granite": Family(granite.shape, granite.GraniteDecoder),
    "phi3": Family(phi3.shape, phi3.Phi3Decoder),
    "opt": Family(opt.shape, opt.OPTDecoder),
}


def family_of(config: Any) -> Family:
    """The family of a model; raises ModelError naming those supported."""
    if config.model_type not in FAMILIES:
        raise ModelError(f"models of type {config.model_type!r} are not supported; supported are {', '.join(FAMILIES)}")
    return FAMILIES[config.model_type]
