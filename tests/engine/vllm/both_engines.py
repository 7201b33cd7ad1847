"""A tiny checkpoint of each family, in our own engine and in vLLM, and schedules with all that these bring."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import Block, Bridge, Engine, Generation, Plateau, Schedule
from engine.parts.unit import Unit
from tests.engine.adapters import random_adapter
from tests.engine.conftest import random_prompt_bridge

pytest.importorskip("vllm.config", exc_type=ImportError)

from engine.vllm.engine import VllmEngine

LAYERS, WIDTH = 5, 64
# The widths of heads that vLLM's attention has on CPUs start at 32.
SIZES: dict[str, Any] = {"hidden_size": WIDTH, "num_attention_heads": 2, "num_key_value_heads": 1}
GROUPED: dict[str, Any] = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
GEMMA: dict[str, Any] = {**GROUPED, "query_pre_attn_scalar": 20, "sliding_window": 16}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
FACTORS = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 2.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + part / 8 for part in range(12)], "long_factor": [2.0 + part for part in range(12)],
}  # fmt: skip
OPT: dict[str, Any] = {"hidden_size": WIDTH, "num_attention_heads": 2, "ffn_dim": 48}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", **GROUPED},
    "mistral, sliding window": {"family": "mistral", "sliding_window": 16, **GROUPED},
    "qwen2": {"family": "qwen2", **SIZES},
    "qwen3": {"family": "qwen3", **GROUPED},
    "gemma2": {"family": "gemma2", **GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3": {"family": "gemma3_text", **GEMMA, "layer_types": ALTERNATING},
    "granite": {"family": "granite", **GROUPED, **FACTORS},
    "phi3, sliding window": {"family": "phi3", **SIZES, "sliding_window": 16},
    "phi3, longrope, heads turned in part": {
        "family": "phi3", **SIZES, "rope_parameters": LONGROPE, "original_max_position_embeddings": 160,
    },
    "opt": {"family": "opt", **OPT, "word_embed_proj_dim": WIDTH, "tie_word_embeddings": False},
    "opt, norm after, narrow embeddings": {
        "family": "opt", **OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False, "tie_word_embeddings": False,
    },
}  # fmt: skip
LENGTHS = (3, 60, 17, 33, 8, 41, 25, 1, 2, 64, 12)  # one more than a pass takes, so that prompts come in chunks


def tensors(seed: int, *roles: str) -> dict[str, Tensor]:
    """Of a bridge: low-rank where it has no weight, gated where it has gates."""
    shapes = {
        "weight": (WIDTH, WIDTH), "bias": (WIDTH,), "down": (WIDTH, 5), "up": (5, WIDTH),
        "gate": (WIDTH, 7), "gate_up": (WIDTH, 7), "gate_down": (7, WIDTH),
    }  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    return {role: torch.randn(shapes[role], generator=draw) * WIDTH**-0.5 for role in roles}


def schedule() -> Schedule:
    """Steps 0 and 1 skip layer 1, the next four layer 2 too, the others an MLP block more; bridges of all kinds."""
    gates = ("gate", "gate_up", "gate_down")
    bridges = {
        "short": Bridge(Block.of_layers(1, 2), tensors(0, "weight", "bias", *gates)),
        "long": Bridge(Block.of_layers(1, 3), tensors(1, "down", "up", "bias", *gates)),
        "correction": Bridge(Block.before(Unit("a", 3)), tensors(2, "weight", "bias")),
    }
    order = tuple(map(Unit.parse, ("a1", "m1", "a2", "m2", "m3")))
    plateaus = (Plateau(0, 2, ("short",)), Plateau(2, 4, ("long", "correction")), Plateau(6, 5, ("long", "correction")))
    return Schedule(LAYERS, order, plateaus, bridges=bridges)


def whole(engine: Engine) -> Schedule:
    """With an adapter and a prompt bridge that skips a block as well."""
    adapter = random_adapter(engine.decoder, [Unit("a", 3), Unit("m", 4), Unit("a", 4), Unit("m", 0)])
    skips = Bridge(Block.of_layers(1, 2), tensors(3, "weight", "bias"))
    prompts = replace(random_prompt_bridge(engine.shape, 3), skips=skips)
    return replace(schedule(), adapter=adapter, prompt_bridge=prompts)


def generations(engine: Engine | VllmEngine, prompts: Sequence[Sequence[int]], *how: Any) -> list[Generation]:
    """In order; four rows at a time, so that the others enter as these end."""
    found = engine.generate(prompts, *how, batch_size=4)
    return sorted(found, key=lambda each: (each.index, each.sample))


def in_vllm(directory: Path, **options: Any) -> VllmEngine:
    # Room for a hundred rows: caches of a GB each would add up where what is compiled outlives its test.
    sizes = {"max_model_len": 160, "max_num_batched_tokens": 48, "block_size": 32, "num_gpu_blocks_override": 512}
    return VllmEngine(str(directory), "float32", "cpu", **(sizes | options))


Pair = tuple[Engine, VllmEngine]


def pair(directory: Path, **options: Any) -> Pair:
    return Engine.load(str(directory), device="cpu"), in_vllm(directory, **options)
