"""Models of real shapes with random weights, made where they run: for speed, the numbers in a matrix do not matter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from engine import Engine, Tokenizer
from engine.checkpoints.weight_files import Weights
from engine.kernels.base import kernels_for
from engine.models.families import family_of

# Sizes as published; the context is cut to what the benchmark needs.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": {
        **{"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28},
        **{"num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
        "max_position_embeddings": 4096,
    },
    "llama-3.1-8b": {
        **{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False},
        "max_position_embeddings": 4096,
    },
    "opt-1.3b": {
        **{"model_type": "opt", "hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "vocab_size": 50272},
        **{"num_attention_heads": 32, "word_embed_proj_dim": 2048, "max_position_embeddings": 2048},
    },
    "smollm2-135m": {
        **{"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
        **{"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True},
        "max_position_embeddings": 4096,
    },
    "tiny": {  # to try the benchmark itself
        **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 24},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 4096},
    },
}


def config_of(shape: str) -> PreTrainedConfig:
    """The transformers config of one of SHAPES."""
    sizes = dict(SHAPES[shape])
    return AutoConfig.for_model(sizes.pop("model_type"), **sizes)


class RandomWeights(Weights):
    """The tensors that a checkpoint of a config would have, drawn instead of read."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        """`device`: where they are drawn; weights that are to be the same on two devices are drawn on one."""
        self.dtype = dtype
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        self._sizes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._draw = torch.Generator(device).manual_seed(seed)

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def take(self, name: str) -> Tensor:
        """One tensor: matrices are normal, norms 1, biases 0."""
        size, device = self._sizes[name], self._draw.device
        if len(size) == 1:
            return torch.full(size, float(name.endswith("weight")), dtype=self.dtype, device=device)
        return torch.empty(size, dtype=self.dtype, device=device).normal_(0, 0.02, generator=self._draw)


class NoTokenizer(Tokenizer):
    """For prompts and generations that are token ids only: nothing ends a generation, texts are empty."""

    eos_ids = ()

    def __init__(self) -> None: ...

    def decode(self, tokens: Sequence[int]) -> str:
        return ""


def random_engine(config: PreTrainedConfig, weights: Weights, device: torch.device) -> Engine:
    """An engine that decodes as it does on a GPU, on whatever device."""
    kernels: Any = kernels_for(device, weights.dtype)
    kernels.static_passes = True
    family = family_of(config)
    with torch.no_grad():
        decoder = family.decoder(config, family.shape(config), weights, kernels, device)
    return Engine(decoder, NoTokenizer(), kernels, weights.dtype, device)


def random_prompts(rows: int, tokens: int, vocab: int, seed: int = 0) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = torch.randint(vocab, (rows, tokens), generator=draw).tolist()
    return prompts
