"""GGUF files: what they are converted to, once, and which are refused, by name."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerFast

from engine import Engine, ModelError, describe
from engine.checkpoints import checkpoint
from engine.checkpoints import gguf_file as gguf_header
from tests.engine.checkpoints.model_files import tokens_of


def test_a_gguf_file_generates_what_the_checkpoint_it_was_made_from_generates(
    gguf_file: Callable[..., Path], original: Path
) -> None:
    assert tokens_of(str(gguf_file("tiny.gguf"))) == tokens_of(str(original))


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
    gguf_file: Callable[..., Path], more: Callable[[gguf.GGUFWriter], None], lost: str
) -> None:
    file = gguf_file("more.gguf", more)
    for asked in (describe, checkpoint.prepare):
        with pytest.raises(ModelError, match=rf"more.gguf' would lose its {lost} .* name the safetensors model"):
            asked(str(file))


def test_a_gguf_file_whose_attention_would_get_another_scale_is_refused(
    gguf_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gguf_header.OF_ANOTHER_SCALE, "llama", 5)  # the layers of this model
    file = gguf_file("27b.gguf")
    with pytest.raises(ModelError, match=r"27b.gguf' would lose its attention's scale .* name the safetensors model"):
        describe(str(file))


def test_a_gguf_file_of_a_phi3_is_refused(gguf_file: Callable[..., Path]) -> None:
    of_phi3 = {"general.architecture": gguf.GGUFValue("phi3", gguf.GGUFValueType.STRING)}
    file = gguf_file("phi3.gguf", lambda writer: writer.kv_data[0].update(of_phi3))
    with pytest.raises(ModelError, match=r"phi3.gguf' would lose a Phi-3's sliding window, .* name the safetensors"):
        describe(str(file))


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_a_rope_scaling_factor_of_nothing_is_none(
    gguf_file: Callable[..., Path], original: Path, factor: float
) -> None:
    file = gguf_file("scaled.gguf", lambda writer: writer.add_rope_scaling_factor(factor))
    assert describe(str(file)) == describe(str(original))


def test_a_gguf_file_is_converted_once(gguf_file: Callable[..., Path], original: Path, cache: Path) -> None:
    file = gguf_file("tiny.gguf")
    assert describe(str(file)) == describe(str(original))
    assert not cache.exists(), "a description converts nothing"
    converted = checkpoint.prepare(str(file))
    assert converted.is_relative_to(cache)
    before = {path: path.stat().st_mtime_ns for path in converted.iterdir()}
    assert any(path.suffix == ".safetensors" for path in before)
    assert checkpoint.prepare(str(file)) == converted
    assert {path: path.stat().st_mtime_ns for path in converted.iterdir()} == before
    assert describe(str(file)) == describe(str(original))


def test_another_file_of_the_same_name_is_converted_anew(gguf_file: Callable[..., Path]) -> None:
    file = gguf_file("tiny.gguf")
    first = checkpoint.prepare(str(file))
    file.write_bytes(file.read_bytes() + b"\0")
    assert checkpoint.prepare(str(file)) != first


@pytest.mark.parametrize("package", ["transformers", "tokenizers"])
def test_each_version_of_what_reads_a_gguf_file_has_a_conversion_of_its_own(
    gguf_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    file = gguf_file("tiny.gguf")
    first = checkpoint.prepare(str(file))
    versions = {name: checkpoint.version(name) for name in ("transformers", "tokenizers")} | {package: "9.9.9"}
    monkeypatch.setattr(checkpoint, "version", versions.__getitem__)
    assert checkpoint.prepare(str(file)) != first


def test_a_conversion_that_died_halfway_is_done_again(
    gguf_file: Callable[..., Path], original: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = gguf_file("tiny.gguf")

    def die(_tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        assert (folder / "model.safetensors").is_file()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(PreTrainedTokenizerFast, "save_pretrained", die)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.prepare(str(file))
    assert [path.suffix for path in (cache / checkpoint.CONVERTED).iterdir()] == [".lock"]
    assert tokens_of(str(file)) == tokens_of(str(original))


def test_what_a_killed_conversion_left_is_gone_with_the_next(gguf_file: Callable[..., Path], cache: Path) -> None:
    file = gguf_file("tiny.gguf")
    target = checkpoint._converted_directory(file)
    left = target.with_name(f".{target.name}.part")
    (left / "model").mkdir(parents=True)
    (left / "model" / "model.safetensors").write_bytes(b"half")
    assert checkpoint.prepare(str(file)) == target
    assert {path.name for path in target.parent.iterdir()} == {target.name, f"{target.name}.lock"}


def test_a_cache_that_has_no_room_or_cannot_be_made_is_named(
    gguf_file: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = gguf_file("tiny.gguf")

    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
        with pytest.raises(ModelError, match=r"tiny.gguf' cannot be converted into .*No space left.* SKIPDECODE_CACHE"):
            checkpoint.prepare(str(file))
    assert [path.suffix for path in (cache / checkpoint.CONVERTED).iterdir()] == [".lock"]
    monkeypatch.setenv("SKIPDECODE_CACHE", str(file))
    with pytest.raises(ModelError, match=r"cannot be converted into .*SKIPDECODE_CACHE"):
        checkpoint.prepare(str(file))


def test_the_suffix_of_a_gguf_file_may_be_in_capitals(gguf_file: Callable[..., Path], original: Path) -> None:
    assert tokens_of(str(gguf_file("TINY.GGUF"))) == tokens_of(str(original))


def test_code_beside_a_gguf_file_is_never_run_nor_asked_about(
    gguf_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run it"))
    file, trace = gguf_file("tiny.gguf"), tmp_path / "trace"
    (file.parent / "custom.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        f"open({str(trace)!r}, 'w')\n"
        "class Custom(PreTrainedTokenizerFast):\n    pass\n"
    )
    said = {"tokenizer_class": "Custom", "auto_map": {"AutoTokenizer": [None, "custom.Custom"]}}
    (file.parent / "tokenizer_config.json").write_text(json.dumps(said))
    checkpoint.prepare(str(file))
    assert not trace.exists()


def test_a_part_of_a_gguf_file_is_not_called_damaged(gguf_file: Callable[..., Path], original: Path) -> None:
    file = gguf_file("m-00001-of-00003.gguf", lambda writer: writer.add_uint16("split.count", 3))
    said = (
        r"of-00003\.gguf' is one of the 3 parts of a model: name the whole file, which llama-gguf-split --merge makes"
    )
    for read in (describe, checkpoint.check_weights):
        with pytest.raises(ModelError, match=said):
            read(str(file))
    whole = gguf_file("whole.gguf", lambda writer: writer.add_uint16("split.count", 1))
    assert describe(str(whole)) == describe(str(original))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_gguf_file_is_refused_by_name(gguf_file: Callable[..., Path], share: float) -> None:
    file = gguf_file("tiny.gguf")
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    for read in (Engine.load, describe, checkpoint.check_weights):
        with pytest.raises(ModelError, match=r"tiny\.gguf' is damaged \(.*\): fetch it again"):
            read(str(file))


def test_a_gguf_file_that_lacks_a_tensor_is_refused_by_name(gguf_file: Callable[..., Path]) -> None:
    file = gguf_file("tiny.gguf")
    file.write_bytes(file.read_bytes().replace(b"blk.2.ffn_gate.weight", b"blk.2.ffn_gaXe.weight"))
    with pytest.raises(ModelError, match=r"tiny\.gguf' is damaged \(it has no tensor for 'model\.layers\.2\.mlp\.gate"):
        Engine.load(str(file))


def test_a_file_that_is_not_gguf_is_refused_by_name(copied: Path) -> None:
    file = copied / "model.safetensors"
    with pytest.raises(ModelError, match=r"model\.safetensors' is a file but not GGUF"):
        Engine.load(str(file))


def test_a_file_that_only_calls_itself_gguf_is_refused_by_name(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUH" + bytes(100))
    for read in (Engine.load, describe):
        with pytest.raises(ModelError, match=r"model\.gguf"):
            read(str(file))
    assert not [path for path in cache.rglob("*") if path.suffix != ".lock" and path.is_file()]
