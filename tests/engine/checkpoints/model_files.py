"""Checkpoints that are changed, a tiny model as llama.cpp stores it, and what a model says."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from engine import Engine, Sampling


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_weights(directory: Path, changes: Mapping[str, Tensor | None]) -> None:
    """None takes a tensor out."""
    file = directory / "model.safetensors"
    tensors = load_file(file) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file, {"format": "pt"})


def tokens_of(model: str) -> list[tuple[int, ...]]:
    generations = Engine.load(model, device="cpu").generate([[5, 60, 7], [20, 90]], Sampling(max_new_tokens=20))
    return [generation.tokens for generation in sorted(generations, key=lambda g: g.index)]


def write_gguf(
    directory: Path,
    byte_tokenizer: PreTrainedTokenizerFast,
    file: Path,
    more: Callable[[gguf.GGUFWriter], object] = lambda _: None,
    word: str | None = None,
    kind: gguf.TokenType = gguf.TokenType.NORMAL,
    merges: Sequence[str] = ("a b",),
) -> Path:
    """Token 256 is that word, of that kind, if any, in place of a byte; 257 is "ab"."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(5)
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(258)
    vocab = byte_tokenizer.get_vocab() | {"ab": 257}
    words = sorted(vocab, key=vocab.__getitem__)
    words[256] = word or words[256]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * 255 + [kind, gguf.TokenType.NORMAL])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)
    for name, tensor in load_file(directory / "model.safetensors").items():
        writer.add_tensor(*as_llama_cpp(name, tensor.numpy()))
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def as_llama_cpp(name: str, weight: np.ndarray) -> tuple[str, np.ndarray]:
    """llama.cpp's name of a tensor; the rows of its query and key projections pair neighbours for RoPE."""
    heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
    if heads:
        weight = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
    for ours, theirs in {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
        "self_attn.": "attn_",
        "mlp.": "ffn_",
        "_proj": "",
    }.items():
        name = name.replace(ours, theirs)
    return name, np.ascontiguousarray(weight)
