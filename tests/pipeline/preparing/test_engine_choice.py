"""Which engine generates: vLLM only where it is named, or where there is a GPU that has it."""

from __future__ import annotations

import pytest

from engine import ModelError
from pipeline.config import GenerationConfig
from pipeline.preparing import backend
from pipeline.preparing.backend import SkipDecodeBackend, runs_in_vllm


@pytest.mark.parametrize(
    ("engine", "device", "installed", "expected"),
    [
        ("auto", "cpu", True, False),
        ("auto", "cuda", True, True),
        ("auto", "cuda", False, False),
        ("vllm", "cpu", True, True),
        ("torch", "cuda", True, False),
    ],
)
def test_the_choice(engine: str, device: str, installed: bool, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_has_vllm", lambda: installed)
    config = GenerationConfig(engine=engine, device=device)  # type: ignore[arg-type]
    assert runs_in_vllm(config) == expected


@pytest.mark.skipif(backend._has_vllm(), reason="vLLM is installed here")
def test_a_vllm_that_is_not_installed_is_said() -> None:
    with pytest.raises(ModelError, match=r"pip install 'skipdecode\[vllm\]'"):
        SkipDecodeBackend().engine(GenerationConfig(engine="vllm", device="cpu"), None)
