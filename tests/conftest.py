"""What every test package shares: the packaged model, its reference in transformers, and real texts."""

import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

# Before torch: threads that spin while they wait would starve the clusters and servers that tests start beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pyarrow.parquet as pq
import pytest
import ray
import torch
from hypothesis import settings
from servers import BUSY_MACHINE, IMPORTS, S3Server
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from engine import Engine
from engine.checkpoints import checkpoint
from pipeline.execution.cluster import EMBEDDED_STORE_BYTES

PACKAGED = "smollm2-135m-instruct"
CORPUS = Path(__file__).parent.parent / "infra" / "demo" / "package_descriptions.parquet"

os.environ.update(BUSY_MACHINE)

# The same examples on every run: a red test is red for everybody.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


CLUSTERS = {"cluster", "ray_head"}
PACKAGED_FIXTURES = {"packaged", "packaged_reference"}
SIGNALS = (signal.SIGINT, signal.SIGTERM)
CORES = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2  # tests side by side share two


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `alone` what asks for a cluster."""
    for item in items:
        if CLUSTERS & set(getattr(item, "fixturenames", ())):
            item.add_marker("alone")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """With the packaged model's threads, for fixtures too; those of a tiny one would mostly wait for each other.

    A job that is started in this process takes its signals until that ends, which is here with the test.
    """
    before, handlers = torch.get_num_threads(), {number: signal.getsignal(number) for number in SIGNALS}
    torch.set_num_threads(CORES if PACKAGED_FIXTURES & set(getattr(item, "fixturenames", ())) else 1)
    try:
        return (yield)
    finally:
        torch.set_num_threads(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def pytest_collection_finish() -> None:
    """Leave what is imported out of every later garbage collection: who frees memory would look through all of it."""
    gc.collect()
    gc.freeze()


ASCII = [chr(code) for code in range(33, 127)] + ["Ġ"]  # the byte-level alphabet writes a space as Ġ


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server; tests may kill it if they start it again."""
    server = S3Server(tmp_path_factory.mktemp("s3") / "data")
    yield server
    server.stop()


@pytest.fixture
def credentials(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has those of the S3 server, and its address."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def cluster(s3: S3Server) -> Iterator[None]:
    """Ray inside this process, on two cores, of this module's own; its workers reach the S3 server."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**s3.environment, "PYTHONPATH": IMPORTS}.items():
            patch.setenv(name, value)
        ray.shutdown()  # what a job before may have left
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=EMBEDDED_STORE_BYTES // 4,
            # A worker takes seconds to import torch: what one job started should serve the next.
            _system_config={"idle_worker_killing_time_threshold_ms": 600_000, "num_workers_soft_limit": 8},
        )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def cores() -> int:
    """Threads of the packaged model."""
    return CORES


@pytest.fixture(scope="session")
def packaged(cores: int) -> Engine:
    """SmolLM2-135M-Instruct in float32 on the CPU."""
    return Engine.load(PACKAGED, device="cpu", threads=cores)


@pytest.fixture(scope="session")
def packaged_reference(cores: int) -> PreTrainedModel:
    """The same checkpoint in transformers."""
    torch.set_num_threads(cores)
    return AutoModelForCausalLM.from_pretrained(checkpoint.prepare(PACKAGED), dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """100 descriptions of software packages, 224 to 986 characters long."""
    return pq.read_table(CORPUS, columns=["text"])["text"].to_pylist()


@pytest.fixture(scope="session")
def chats(packaged: Engine, texts: list[str]) -> list[list[int]]:
    """The texts as chat prompts of the packaged model."""
    return [packaged.tokenizer.encode_chat(f"Summarise this text in one sentence.\n\n{text}") for text in texts]


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte. Id 0 ends a text; ids 1 to 95 are printable ASCII, the other bytes come after."""
    alphabet = ASCII + sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(ASCII))
    vocab = {token: id for id, token in enumerate(["<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@pytest.fixture(scope="session")
def make_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: PreTrainedTokenizerFast
) -> Callable[..., Path]:
    """Save a random model, a Llama unless another family is asked for; keywords override its config.

    Who asks alike shares a directory: copy it before you change a file. Every parameter is drawn, biases and norms too.
    Queries and keys are large enough for attention to look at single tokens, and logits large enough for greedy
    decoding not to hang on rounding.
    """

    made: dict[str, Path] = {}

    def make(
        seed: int = 0,
        eos: int | list[int] = 0,
        max_shard_size: str = "1GB",
        family: str = "llama",
        **overrides: Any,
    ) -> Path:
        asked = repr((seed, eos, max_shard_size, family, sorted(overrides.items())))
        if asked in made:
            return made[asked]
        config = AutoConfig.for_model(
            family, **{**TINY, "eos_token_id": eos, "bos_token_id": None, "pad_token_id": None, **overrides}
        )
        model = AutoModelForCausalLM.from_config(config)
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0, 0.2, generator=draw)
                elif "q_norm" in name or "k_norm" in name:
                    parameter.uniform_(1, 3, generator=draw)
                elif "norm" in name:
                    parameter.uniform_(0.5, 1.5, generator=draw)
                elif "embed" in name:  # small, so that a tied head does not just repeat the last token
                    parameter.normal_(0, 0.3, generator=draw)
                elif "lm_head" in name:
                    parameter.normal_(0, 1, generator=draw)
                else:
                    gain = 2.0 if any(each in name for each in ("q_proj", "k_proj", "qkv_proj")) else 1.0
                    parameter.normal_(0, gain * parameter.shape[1] ** -0.5, generator=draw)
        directory = made[asked] = tmp_path_factory.mktemp(family)
        model.generation_config.eos_token_id = eos
        model.save_pretrained(directory, max_shard_size=max_shard_size)
        byte_tokenizer.save_pretrained(directory)
        return directory

    return make


TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
