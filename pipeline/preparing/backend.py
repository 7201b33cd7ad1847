"""Where tokenizers and engines come from."""

import hashlib
import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Self

import torch

import engine
from engine import Engine, ModelError, ModelShape, Schedule, Tokenizer
from engine.engine import check_device
from engine.vllm.engine import VllmEngine  # which needs no vLLM before there is one
from pipeline.config import GenerationConfig
from pipeline.rows.shared_engine import Streaming


@dataclass(frozen=True)
class ModelIdentity:
    """What a model is, wherever it lies."""

    files: Mapping[str, str]  # SHA-256 of each that decides a token, by name
    dtype: str  # in which it is computed; "auto" where only a replica's machine can tell

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(dict(self.files), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Backend:
    """Builds what a job's processes need; is pickled to them. Tests of the pipeline put a double in its place."""

    held: ModelIdentity | None = None  # the model that a run began with: no other is loaded
    began: str | None = None  # when that was (ISO 8601): chat templates see that date

    def pinned(self, model: str) -> str:
        """A name of the model that means the same one on every node and tomorrow."""
        return engine.pinned_model(model)

    def shape(self, config: GenerationConfig) -> ModelShape:
        """The model's sizes, from its config alone."""
        return engine.describe(config.model)

    def identity(self, config: GenerationConfig) -> ModelIdentity:
        """Changes when the model does."""
        engine.check_model_weights(config.model)
        return ModelIdentity(engine.model_files(config.model), _dtype(config))

    def held_to(self, identity: ModelIdentity, began: str) -> Self:
        return replace(self, held=identity, began=began)

    def tokenizer(self, config: GenerationConfig) -> Tokenizer:
        """Cached in each process. Raises ModelError if the model is not the one that the run began with."""
        files = engine.model_files(config.model, weights=False) if self.held is None else self.held.files
        return _tokenizer(config.model, tuple(files.items()), self.began)

    def engine(self, config: GenerationConfig, threads: int | None) -> Streaming:
        """A replica's. Raises ModelError, also for options of vLLM alone, and a model that is replaced meanwhile."""
        in_vllm = runs_in_vllm(config)
        if config.vllm_options and not in_vllm:
            raise ModelError(
                f"{config.vllm_options[0]} is an option of vLLM alone, and here our own engine runs: "
                "add --engine vllm, or leave it out"
            )
        files = engine.model_files(config.model) if self.held is None else self.held.files
        engine.check_model_files(config.model, files)
        dtype = config.dtype if self.held is None else self.held.dtype
        if in_vllm:
            return _vllm_engine(config, dtype, threads)
        share = _gpus(config)
        if 0 < share < 1 and engine.resolve_device(config.device).type == "cuda":  # others are on the same card
            check_device(config.device)  # torch would say less of one that is not there
            torch.cuda.set_per_process_memory_fraction(share)
        loaded = Engine.load(config.model, device=config.device, dtype=dtype, threads=threads)
        engine.check_model_files(config.model, files)
        return loaded


def runs_in_vllm(config: GenerationConfig) -> bool:
    """Whether vLLM generates, asked where it would."""
    if config.engine != "auto":
        return config.engine == "vllm"
    return engine.resolve_device(config.device).type == "cuda" and _has_vllm()


def as_it_runs(config: GenerationConfig, schedule: Schedule) -> Schedule:
    """Asked where it would: vLLM leaves a head preview out."""
    return schedule.with_whole_head if runs_in_vllm(config) else schedule


def _has_vllm() -> bool:
    spec = find_spec("vllm")
    return spec is not None and spec.origin is not None  # any folder of that name would have a spec


def _vllm_engine(config: GenerationConfig, dtype: str, threads: int | None) -> VllmEngine:
    """All GPUs of a replica share one model. Raises ModelError if vLLM is not installed."""
    gpus = _gpus(config)
    # On CPUs vLLM takes it for a share of their memory.
    share = config.gpu_memory_share * min(1.0, gpus or 1.0)
    options: dict[str, Any] = {"kv_cache_dtype": config.cache_dtype, "gpu_memory_utilization": share}
    if config.max_prompt_tokens is not None:  # vLLM has to have room for the longest row that there may be
        longest = config.max_prompt_tokens + config.max_new_tokens
        options["max_model_len"] = min(engine.describe(config.model).context, longest)
    if config.quantization is not None:
        options["quantization"] = config.quantization
    if gpus > 1:
        # Its workers are children of the replica, which holds the GPUs: Ray need not know of them. SIGTERM ends them,
        # which a replica on a Ray of this machine would have them not hear: see `pipeline.execution.cluster`.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        options |= {"tensor_parallel_size": int(gpus), "distributed_executor_backend": "mp"}
    return VllmEngine(config.model, dtype, config.device, threads, **options)


def _gpus(config: GenerationConfig) -> float:
    """Of a replica, as far as the options say; 0 where they say nothing."""
    return getattr(config, "gpus_per_replica", None) or 0.0


def _dtype(config: GenerationConfig) -> str:
    """What "auto" means to all replicas; itself where they may have GPUs and this process has none to ask."""
    on_gpus = config.device != "cpu" and getattr(config, "gpus_per_replica", 0) != 0
    if config.dtype == "auto" and on_gpus and engine.resolve_device("auto").type != "cuda":
        return "auto"
    return engine.resolve_dtype(config.device, config.dtype)


@lru_cache(maxsize=2)
def _tokenizer(model: str, files: tuple[tuple[str, str], ...], began: str | None) -> Tokenizer:
    engine.check_model_files(model, dict(files), weights=False)
    loaded = Tokenizer.load(model, None if began is None else datetime.fromisoformat(began))
    engine.check_model_files(model, dict(files), weights=False)
    return loaded
