"""Which engine generates: vLLM only where it is named, or where there is a GPU that has it. And in which precision."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from engine import Engine, HeadPreview, ModelError, Schedule
from pipeline.config import GenerationConfig, JobConfig
from pipeline.preparing import backend
from pipeline.preparing.backend import Backend, as_it_runs, runs_in_vllm


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
    with pytest.raises(ModelError, match=r"pip install '\.\[vllm\]'"):
        Backend().engine(GenerationConfig(engine="vllm", device="cpu"), None)


@pytest.mark.parametrize("options", [{"quantization": "fp8"}, {"cache_dtype": "fp8"}, {"gpus_per_replica": 2}])
def test_options_of_vllm_are_refused_where_the_choice_falls_on_our_own_engine(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_has_vllm", lambda: False)
    monkeypatch.setattr(Engine, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    [name] = options
    with pytest.raises(ModelError, match=f"{name}.* is an option of vLLM alone, .*add --engine vllm"):
        Backend().engine(JobConfig(input="in", output="out", **options), None)
    with pytest.raises(ValidationError, match=f"{name}.* is an option of vLLM alone: add --engine vllm"):
        JobConfig(input="in", output="out", engine="torch", **options)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"device": "auto"}, "auto"),
        ({"device": "cuda"}, "auto"),
        ({"device": "cuda", "gpus_per_replica": 1}, "auto"),
        ({"device": "cuda", "dtype": "float16"}, "float16"),
        ({"device": "cpu"}, "float32"),
        ({"device": "auto", "gpus_per_replica": 0}, "float32"),
    ],
)
def test_a_machine_without_a_gpu_leaves_the_precision_to_replicas_that_have_one(
    options: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = JobConfig(input="in", output="out", **options)
    assert Backend().identity(config).dtype == dtype


def test_a_gpu_by_number_is_refused_as_ray_hands_them_out() -> None:
    with pytest.raises(ValidationError, match="device 'cuda:1' names one of several GPUs, and Ray gives each replica"):
        JobConfig(input="in", output="out", device="cuda:1")


def test_one_gpu_and_a_half_is_refused() -> None:
    for gpus in (0.5, 1.0, 2.0):
        JobConfig(input="in", output="out", gpus_per_replica=gpus)
    with pytest.raises(
        ValidationError, match=r"gpus_per_replica 1\.5 is neither a share of one GPU nor a whole number"
    ):
        JobConfig(input="in", output="out", gpus_per_replica=1.5)


@pytest.mark.parametrize(("gpus", "expected"), [(None, 0.8), (0.5, 0.4), (2.0, 0.8)])
def test_replicas_that_share_a_gpu_share_its_memory(
    gpus: float | None, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(backend, "VllmEngine", lambda *_, **options: asked.append(options["gpu_memory_utilization"]))
    monkeypatch.setattr(backend, "runs_in_vllm", lambda _: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options: dict[str, Any] = {"device": "cuda", "gpu_memory_share": 0.8, "gpus_per_replica": gpus}
    Backend().engine(JobConfig(input="in", output="out", **options), None)
    assert asked == [pytest.approx(expected)]
    if gpus == 2.0:  # our own engine has no use for the second
        return

    monkeypatch.setattr(backend, "runs_in_vllm", lambda _: False)
    monkeypatch.setattr(backend, "check_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", asked.append)
    monkeypatch.setattr(Engine, "load", lambda *_, **__: None)
    Backend().engine(JobConfig(input="in", output="out", **options), None)
    assert asked[1:] == ([gpus] if gpus == 0.5 else [])


@pytest.mark.parametrize(("limit", "longest"), [(None, None), (100, 164), (10**6, 8192)])
def test_vllm_has_room_for_the_longest_row_that_there_may_be(
    limit: int | None, longest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []
    monkeypatch.setattr(backend, "VllmEngine", lambda *_, **options: asked.append(options.get("max_model_len")))
    config = JobConfig(input="in", output="out", engine="vllm", max_prompt_tokens=limit, max_new_tokens=64)
    Backend().engine(config, None)
    assert asked == [longest]


def test_what_vllm_leaves_out_is_neither_counted_nor_judged() -> None:
    preview = HeadPreview(2, {"down": torch.ones(8, 3), "up": torch.ones(3, 8), "bias": torch.ones(50)})
    schedule = Schedule(4, head_preview=preview)
    assert as_it_runs(GenerationConfig(engine="vllm"), schedule) == Schedule(4)
    assert as_it_runs(GenerationConfig(engine="torch"), schedule) == schedule
