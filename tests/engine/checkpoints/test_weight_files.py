"""Weights are those that the config asks for, whole, in numbers that can be computed with; or they are refused."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Engine, ModelError, describe
from engine.checkpoints import checkpoint
from engine.checkpoints.weight_files import Weights, check_unambiguous
from tests.engine.checkpoints.model_files import edit_config, edit_weights


@pytest.mark.parametrize("name", ["model.layers.3.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_a_missing_tensor_is_refused_by_name(copied: Path, name: str) -> None:
    edit_weights(copied, {name: None})
    with pytest.raises(ModelError, match=f"no tensor '{name}'"):
        Engine.load(str(copied))


def test_a_file_that_may_not_be_read_is_not_fetched_again(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).suffix != ".safetensors")  # as if not by root
    with pytest.raises(ModelError, match=r"safetensors' cannot be read \(.*Permission denied\): let this user read it"):
        Engine.load(str(copied))


def test_a_fused_tensor_that_is_missing_is_refused_by_name(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    directory = shutil.copytree(make_checkpoint(family="phi3"), tmp_path / "copied")
    edit_weights(directory, {"model.layers.2.self_attn.qkv_proj.weight": None})
    with pytest.raises(ModelError, match=r"no tensor 'model.layers.2.self_attn.qkv_proj.weight'"):
        Engine.load(str(directory), device="cpu")


@pytest.mark.parametrize(
    ("family", "missing"),
    [("qwen2", "model.layers.1.self_attn.k_proj.bias"), ("opt", "model.decoder.layers.0.final_layer_norm.weight")],
)
def test_a_part_of_a_biased_module_that_is_missing_is_refused_by_name(
    make_checkpoint: Callable[..., Path], tmp_path: Path, family: str, missing: str
) -> None:
    of_family = {"ffn_dim": 48, "word_embed_proj_dim": 32} if family == "opt" else {}
    directory = shutil.copytree(make_checkpoint(family=family, **of_family), tmp_path / "copied")
    edit_weights(directory, {missing: None})
    with pytest.raises(ModelError, match=f"no tensor {re.escape(repr(missing))}, which config.json asks for"):
        Engine.load(str(directory), device="cpu")


def test_a_bias_that_the_config_has_no_word_of_is_refused_by_name(copied: Path) -> None:
    """Transformers would leave it out, and one of the two would be wrong."""
    edit_weights(copied, {"model.layers.1.self_attn.o_proj.bias": torch.ones(32)})
    with pytest.raises(ModelError, match=r"self_attn\.o_proj\.bias', a bias that config.json says the model has not"):
        Engine.load(str(copied), device="cpu")


def test_a_tensor_of_another_shape_is_refused_by_name(copied: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(copied, {name: torch.zeros(32, 48)})
    with pytest.raises(ModelError, match=rf"'{name}' .* has shape \[32, 48\], config\.json asks for \[48, 32\]"):
        Engine.load(str(copied))


def test_a_truncated_weight_file_is_refused_by_name(copied: Path) -> None:
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        Engine.load(str(copied))


def test_a_missing_shard_is_refused_by_name(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(make_checkpoint(max_shard_size="20KB"), tmp_path / "shards"))
    shard = sorted(directory.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        Engine.load(str(directory))


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 1}', '{"weight_map": {"a": "../../x.safetensors"}}'])
def test_a_damaged_index_is_refused_by_name(copied: Path, content: str) -> None:
    (copied / "model.safetensors").rename(copied / "model-00001-of-00001.safetensors")
    (copied / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json' is damaged"):
        Engine.load(str(copied))


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


def test_weights_come_in_the_dtype_asked_for(whole: Path) -> None:
    weights = Weights(whole, torch.bfloat16)
    assert weights.take("model.norm.weight").dtype == torch.bfloat16
    assert "model.norm.weight" in weights
    assert "model.norm.bias" not in weights


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
    edit_weights(copied, {name: tensor})
    for read in (Engine.load, checkpoint.check_weights):
        with pytest.raises(ModelError, match=rf"'{name}' of .* {said}, the model is quantised"):
            read(str(copied))
