"""At full depth, greedy, in float32, the engine gives token for token what transformers' `generate` gives."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine import Engine, Sampling
from tests.engine.prompts import random_prompts

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 8.0,
    "short_factor": [1.0, 1.2, 1.5, 1.7],
    "long_factor": [2.0, 4.0, 6.0, 8.0],
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "one key/value head": {"num_key_value_heads": 1},
    "grouped heads": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "a key/value head for every head": {"num_key_value_heads": 4},
    "tied embeddings": {"tie_word_embeddings": True},
    "biases in attention": {"attention_bias": True},
    "biases in the MLP": {"mlp_bias": True},
    "biases everywhere, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "wide heads": {"head_dim": 16},
    "narrow heads": {"head_dim": 4},
    "another epsilon": {"rms_norm_eps": 0.1},
    "one layer": {"num_hidden_layers": 1},
    "rope default": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "rope linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "rope dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    "rope yarn": {"rope_parameters": YARN},
    "rope llama3": {"rope_parameters": LLAMA3},
    "rope longrope": {"rope_parameters": LONGROPE},
}


def generated_by_transformers(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], batch_size: int = 1, **settings: Any
) -> list[tuple[int, ...]]:
    """Greedy tokens up to the end of each sequence; batches are padded on the left, as transformers wants it."""
    outputs: list[tuple[int, ...]] = []
    eos = model.generation_config.eos_token_id
    ends = {eos} if isinstance(eos, int) else set(eos)
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        output = model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **settings)
        for tokens in output[:, width:].tolist():
            length = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
            outputs.append(tuple(tokens[:length]))
    return outputs


def generated_by_engine(
    engine: Engine, prompts: Sequence[Sequence[int]], batch_size: int = 32, **settings: Any
) -> list[tuple[int, ...]]:
    generations = engine.generate(prompts, Sampling(**settings), batch_size=batch_size)
    return [generation.tokens for generation in sorted(generations, key=lambda generation: generation.index)]


def test_the_packaged_model_generates_what_transformers_generates(
    packaged: Engine, packaged_reference: PreTrainedModel, texts: list[str]
) -> None:
    """32 real prompts, of 16 to 512 characters of text each."""
    prompts = [
        packaged.tokenizer.encode_chat(f"Summarise this text in one sentence.\n\n{text[: 16 * (i + 1)]}")
        for i, text in enumerate(sorted(texts, key=len)[-32:])
    ]
    expected = generated_by_transformers(packaged_reference, prompts, batch_size=16, max_new_tokens=12)
    assert generated_by_engine(packaged, prompts, batch_size=16, max_new_tokens=12) == expected


def test_raw_text_is_encoded_as_transformers_encodes_it(
    packaged: Engine, packaged_reference: PreTrainedModel, texts: list[str]
) -> None:
    prompts = [packaged.tokenizer.encode(text) for text in texts[:2]]
    [first, second] = sorted(packaged.generate(texts[:2], Sampling(max_new_tokens=8)), key=lambda g: g.index)
    assert [first.tokens, second.tokens] == generated_by_transformers(packaged_reference, prompts, max_new_tokens=8)
    assert [first.prompt_tokens, second.prompt_tokens] == list(map(len, prompts))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_llama_generates_what_transformers_generates(make_checkpoint: Callable[..., Path], variant: str) -> None:
    directory = make_checkpoint(**VARIANTS[variant])
    # Below, across and above the 64 tokens that the stretched rope types were first trained on.
    prompts = random_prompts([1, 2, 7, 33, 50, 63, 64, 65, 120])
    settings = {"max_new_tokens": 24, "min_new_tokens": 24}
    expected = generated_by_transformers(AutoModelForCausalLM.from_pretrained(directory), prompts, **settings)
    assert len(set(expected)) == len(prompts), "the model says the same to everything: the comparison is worth little"
    assert generated_by_engine(Engine.load(str(directory), device="cpu"), prompts, **settings) == expected


def test_end_of_sequence_ends_a_generation_where_it_ends_in_transformers(make_checkpoint: Callable[..., Path]) -> None:
    directory = make_checkpoint(eos=[5, 9, 17, 40, 60])
    prompts = random_prompts([4, 9, 9, 12, 20, 31, 40, 44])
    expected = generated_by_transformers(AutoModelForCausalLM.from_pretrained(directory), prompts, max_new_tokens=40)
    assert len({len(tokens) for tokens in expected}) > 3
    assert generated_by_engine(Engine.load(str(directory), device="cpu"), prompts, max_new_tokens=40) == expected


def test_long_generations_go_on_as_in_transformers(make_checkpoint: Callable[..., Path]) -> None:
    directory = make_checkpoint(num_hidden_layers=2)
    prompts, settings = [[7, 8, 9, 10, 11], [60, 50, 40]], {"max_new_tokens": 300, "min_new_tokens": 300}
    expected = generated_by_transformers(AutoModelForCausalLM.from_pretrained(directory), prompts, **settings)
    assert generated_by_engine(Engine.load(str(directory), device="cpu"), prompts, **settings) == expected


def test_a_checkpoint_in_shards_loads_like_one_in_a_single_file(make_checkpoint: Callable[..., Path]) -> None:
    whole, shards = make_checkpoint(), make_checkpoint(max_shard_size="20KB")
    assert len(list(shards.glob("*.safetensors"))) > 3
    prompts = random_prompts([3, 11, 40])
    expected = generated_by_engine(Engine.load(str(whole), device="cpu"), prompts, max_new_tokens=16)
    assert generated_by_engine(Engine.load(str(shards), device="cpu"), prompts, max_new_tokens=16) == expected


@pytest.mark.parametrize("kept", ["both", "the head alone"])
def test_a_config_that_says_tied_is_taken_as_transformers_takes_it(
    make_checkpoint: Callable[..., Path], tmp_path: Path, kept: str
) -> None:
    """A head that was trained and merged counts, and one of the two stands for the other."""
    directory = Path(shutil.copytree(make_checkpoint(tie_word_embeddings=True), tmp_path / "tied"))
    tensors = load_file(directory / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    if kept == "both":
        tensors["lm_head.weight"] = embedding.flip(0).contiguous()
    else:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    prompts, settings = random_prompts([3, 11, 40]), {"max_new_tokens": 16, "min_new_tokens": 16}
    expected = generated_by_transformers(AutoModelForCausalLM.from_pretrained(directory), prompts, **settings)
    assert generated_by_engine(Engine.load(str(directory), device="cpu"), prompts, **settings) == expected
    plain = Engine.load(str(make_checkpoint(tie_word_embeddings=True)), device="cpu")
    assert (generated_by_engine(plain, prompts, **settings) == expected) == (kept != "both")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_says_nearly_the_same(make_checkpoint: Callable[..., Path], dtype: str) -> None:
    directory = make_checkpoint()
    prompts = random_prompts([5] * 30 + [40] * 30)
    full = generated_by_engine(Engine.load(str(directory), device="cpu"), prompts, max_new_tokens=2)
    half = generated_by_engine(Engine.load(str(directory), device="cpu", dtype=dtype), prompts, max_new_tokens=2)
    agreeing = sum(a == b for a, b in zip(full, half, strict=True))
    assert agreeing > 0.8 * len(prompts)
