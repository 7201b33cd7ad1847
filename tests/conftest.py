"""What every test package shares: the packaged model, its reference in transformers, and real texts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Before torch: threads that spin while they wait would starve the clusters and servers that tests start beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import settings
from servers import S3Server
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine import Engine, checkpoint

PACKAGED = "smollm2-135m-instruct"
CORPUS = Path(__file__).parent.parent / "infra" / "demo" / "package_descriptions.parquet"

# The same examples on every run: a red test is red for everybody.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server; tests may kill it if they start it again."""
    server = S3Server(tmp_path_factory.mktemp("s3") / "data")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def packaged() -> Engine:
    """SmolLM2-135M-Instruct in float32 on the CPU."""
    return Engine.load(PACKAGED, device="cpu", threads=2)


@pytest.fixture(scope="session")
def packaged_reference() -> PreTrainedModel:
    """The same checkpoint in transformers."""
    torch.set_num_threads(2)
    return AutoModelForCausalLM.from_pretrained(checkpoint.prepare(PACKAGED), dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """100 descriptions of software packages, 224 to 986 characters long."""
    return pq.read_table(CORPUS, columns=["text"])["text"].to_pylist()


@pytest.fixture(scope="session")
def chats(packaged: Engine, texts: list[str]) -> list[list[int]]:
    """The texts as chat prompts of the packaged model."""
    return [packaged.tokenizer.encode_chat(f"Summarise this text in one sentence.\n\n{text}") for text in texts]
