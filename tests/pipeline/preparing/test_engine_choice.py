"""Which engine generates: vLLM only where it is named, or where there is a GPU that has it."""

from __future__ import annotations

import pytest
import torch

from engine import ModelError, Plateau, Schedule
from engine.parts.prompt_bridge import PromptBridge
from pipeline.config import GenerationConfig
from pipeline.errors import JobError
from pipeline.preparing import backend
from pipeline.preparing.backend import SkipDecodeBackend, runs_in_vllm
from pipeline.preparing.fit import with_fitting_engine


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


def early_stop(**made: object) -> Schedule:
    maps = {"weight": torch.zeros(8, 8), "bias": torch.zeros(8)}
    return Schedule(2, (), (Plateau(0, 0),), provenance={"calibrated_on": made}, prompt_bridge=PromptBridge(1, maps))


def test_prompts_that_stop_early_stand_behind_what_the_schedule_was_made_behind() -> None:
    """Never in vLLM, which would bridge the instruction too: noise."""
    tokenizer = SkipDecodeBackend().tokenizer
    behind, bare = early_stop(shared_prefix_tokens=35), early_stop(shared_prefix_tokens=0)
    config = GenerationConfig(prompt="Summarize: {text}")
    chosen = with_fitting_engine(config, behind, tokenizer)
    assert (config.engine, chosen.engine) == ("auto", "torch")
    for schedule in (bare, Schedule.full_depth(2), early_stop()):
        assert with_fitting_engine(config, schedule, tokenizer) is config
    with pytest.raises(JobError, match="which vLLM does not do"):
        with_fitting_engine(config.model_copy(update={"engine": "vllm"}), behind, tokenizer)
    for unlike in ({"prompt": "{text}", "prompt_format": "raw"}, {"prompt": "{text}", "prompt_format": "messages"}):
        with pytest.raises(JobError, match="have none in common"):
            with_fitting_engine(GenerationConfig(**unlike), behind, tokenizer)  # type: ignore[arg-type]
