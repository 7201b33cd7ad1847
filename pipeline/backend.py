"""Where tokenizers and engines come from. Tests of the pipeline at scale put a double here."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import engine
from engine import Engine, ModelShape, Tokenizer
from pipeline.config import GenerationConfig
from pipeline.row_generator import Generator
from pipeline.template import PromptTokenizer


class Backend(Protocol):
    """Builds what a job's processes need; is pickled to them."""

    def shape(self, config: GenerationConfig) -> ModelShape:
        """The model's sizes, from its config alone."""

    def identity(self, config: GenerationConfig) -> str:
        """Changes when the model does."""

    def tokenizer(self, config: GenerationConfig) -> PromptTokenizer:
        """Called in read tasks; worth caching per process."""

    def engine(self, config: GenerationConfig, threads: int | None) -> Generator:
        """Called once per replica."""


class SkipDecodeBackend:
    """The real engine."""

    def shape(self, config: GenerationConfig) -> ModelShape:
        return engine.describe(config.model)

    def identity(self, config: GenerationConfig) -> str:
        return engine.model_identity(config.model)

    def tokenizer(self, config: GenerationConfig) -> Tokenizer:
        return _tokenizer(config.model)

    def engine(self, config: GenerationConfig, threads: int | None) -> Engine:
        return Engine.load(config.model, device=config.device, dtype=config.dtype, threads=threads)


@lru_cache(maxsize=1)
def _tokenizer(model: str) -> Tokenizer:
    return Tokenizer.load(model)
