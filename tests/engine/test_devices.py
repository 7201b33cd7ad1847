"""What the engine chooses for a device."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.engine import Engine, default_dtype, resolve_dtype
from engine.errors import ModelError


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), "float16"), ((8, 0), "bfloat16"), ((8, 9), "bfloat16"), ((9, 0), "bfloat16")]
)
def test_the_default_dtype_is_one_the_device_computes_in(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert default_dtype(torch.device("cuda")) == dtype
    assert default_dtype(torch.device("cpu")) == "float32"


@pytest.mark.parametrize(("device", "gpus"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2)])
def test_a_gpu_that_is_not_there_is_said_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    said = rf"device '{device}' is not there \(this process sees {gpus} GPUs\): use --device cpu or auto"
    with pytest.raises(ModelError, match=said):
        Engine.load("no/such/model", device)
    with pytest.raises(ModelError, match=said):
        resolve_dtype(device, "auto")


@pytest.mark.parametrize("device", ["gpu", "mps", "meta"])
def test_what_names_no_device_is_said(device: str) -> None:
    with pytest.raises(ModelError, match=f"device '{device}' is not known: use auto, cpu, cuda or cuda:N"):
        Engine.load("no/such/model", device)


@pytest.mark.parametrize("half", [False, True])
def test_where_a_cpu_multiplies_bfloat16_numbers_hidden_states_are_none_of_these(
    half: bool, make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if half and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this CPU does not multiply bfloat16 numbers")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: half)
    directory = str(make_checkpoint(family="qwen2"))  # which has biases
    exact, engine = (Engine.load(directory, "cpu", dtype).decoder for dtype in ("float32", "bfloat16"))
    tokens, positions = torch.arange(1, 60), torch.arange(59)
    wanted = exact.mlp(1, exact.embed(tokens, positions))
    found = engine.mlp(1, engine.embed(tokens, positions))
    assert found.dtype == (torch.float32 if half else torch.bfloat16)
    assert 1e-5 < (found.float() - wanted).norm() / wanted.norm() < 1e-2
    keys, _ = engine.keys_and_values(1, found)
    assert keys.dtype == torch.bfloat16
    assert engine.logits(found).dtype == found.dtype
    assert (keys.float() - exact.keys_and_values(1, wanted)[0]).norm() < 2e-2 * keys.norm()


def test_a_gemma_in_float16_is_refused_with_the_way_out(make_checkpoint: Callable[..., Path]) -> None:
    """Its states overflow there: vLLM refuses it too."""
    directory = str(make_checkpoint(family="gemma2", head_dim=16, query_pre_attn_scalar=20, sliding_window=16))
    with pytest.raises(ModelError, match="overflows in float16: use --dtype float32, or bfloat16"):
        Engine.load(directory, "cpu", "float16")
