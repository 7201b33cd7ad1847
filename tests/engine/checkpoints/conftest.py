"""Tiny checkpoints, to be damaged, and GGUF files."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.engine.checkpoints.model_files import write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where converted models and digests are kept: the test's own, not there yet."""
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def whole(make_checkpoint: Callable[..., Path]) -> Path:
    """A sound checkpoint, to be left as it is."""
    return make_checkpoint()


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


@pytest.fixture(scope="session")
def original(make_checkpoint: Callable[..., Path]) -> Path:
    """The checkpoint that GGUF files are made from."""
    return make_checkpoint(vocab_size=258, seed=9)


@pytest.fixture
def gguf_file(original: Path, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Callable[..., Path]:
    """Writes one under a name, in float32, else as `write_gguf`."""
    return lambda name, *more, **options: write_gguf(original, byte_tokenizer, tmp_path / name, *more, **options)
