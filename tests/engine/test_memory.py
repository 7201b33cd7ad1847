"""A replica's memory: weights, cache and a bounded rest, and how well a batch's share of it is predicted."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import BatchStats, Engine, Sampling, Schedule, memory
from engine.forward.prompt_pass import PROMPT_TOKENS
from engine.memory import SHARE


@pytest.fixture(scope="module")
def tiny_engine(make_checkpoint: Callable[..., Path]) -> Engine:
    return Engine.load(str(make_checkpoint()), device="cpu")


ROOT = Path(__file__).parents[2]

# A process of its own: this one's peak holds every other test's memory.
PROGRAM = """
import json, re, sys, threading
from pathlib import Path
import pyarrow.parquet as pq
from engine import Engine, Sampling, Schedule, memory

def kilobytes(name):
    return int(re.search(name + r":\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])

engine = Engine.load("smollm2-135m-instruct", device="cpu", threads=2)
texts = pq.read_table(sys.argv[1], columns=["text"])["text"].to_pylist()[:32]
batches, done = [], threading.Event()
prompts = [engine.tokenizer.encode_chat(text) for text in texts]
list(engine.generate(prompts[:1], Sampling(max_new_tokens=2)))
before = most = kilobytes("RssAnon") * 1024  # what is allocated; pages of files come and go as the system likes

def watch():
    global most
    while not done.wait(0.002):
        most = max(most, kilobytes("RssAnon") * 1024)

watcher = threading.Thread(target=watch)
watcher.start()
list(engine.generate(prompts, Sampling(max_new_tokens=4, min_new_tokens=4), on_batch=batches.append))
done.set()
watcher.join()
shape = engine.shape
parameters = shape.layers * shape.layer_parameters + shape.head_parameters
# Not getrusage: its peak starts at the size of the process that started this one.
peak = kilobytes("VmHWM") * 1024
longest = max(map(len, prompts))
predicted = memory.batch_bytes(shape, Schedule.full_depth(shape.layers), len(prompts), longest, 4, 4)
print(json.dumps({"weights": 4 * parameters, "cache": max(b.cache_bytes for b in batches), "peak": peak,
                  "grown": most - before, "predicted": predicted}))
"""


@pytest.mark.slow
def test_a_replica_needs_its_weights_its_cache_and_a_gigabyte() -> None:
    corpus = ROOT / "infra" / "demo" / "package_descriptions.parquet"
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(corpus)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    memory = json.loads(done.stdout.splitlines()[-1])

    assert memory["peak"] <= 1.3 * memory["weights"] + memory["cache"] + (1 << 30), memory
    room = memory["predicted"] / SHARE  # the least in which so many rows are let in
    assert memory["grown"] <= room, memory
    assert memory["predicted"] <= 1.5 * memory["grown"], memory


@given(data=st.data(), rows=st.integers(1, 3), prompt=st.integers(1, 40), new_tokens=st.integers(1, 300))
@settings(max_examples=12)
def test_the_cache_takes_what_is_predicted(
    tiny_engine: Engine,
    schedules: Callable[[int], st.SearchStrategy[Schedule]],
    data: st.DataObject,
    rows: int,
    prompt: int,
    new_tokens: int,
) -> None:
    schedule = data.draw(schedules(tiny_engine.shape.layers))
    sampling = Sampling(max_new_tokens=new_tokens, min_new_tokens=new_tokens)
    batches: list[BatchStats] = []
    list(tiny_engine.generate([[5] * prompt] * rows, sampling, schedule, on_batch=batches.append))
    stats = sum(batches, BatchStats())
    predicted = memory.cache_peak(tiny_engine.shape, rows, prompt, new_tokens, 4)
    assert predicted == stats.cache_course[0] == stats.cache_bytes


def test_a_batch_is_as_large_as_the_memory_allows(tiny_engine: Engine) -> None:
    shape = tiny_engine.shape
    schedule = Schedule.full_depth(shape.layers)

    def rows(free: int) -> int:
        return memory.rows_that_fit(free, "cuda", shape, schedule, 100, 50, 4)

    assert rows(0) == 1
    assert rows(1 << 50) == memory.GPU_ROWS
    needed = memory.batch_bytes(shape, schedule, 40, 100, 50, 4)
    assert rows(int(needed / memory.SHARE) + 1) == 40
    assert rows(int(needed / memory.SHARE) - 1000) == 39


@pytest.mark.parametrize(("cores", "most"), [(1, 64), (2, 128), (6, 384), (64, memory.GPU_ROWS)])
def test_a_batch_on_a_cpu_has_rows_for_each_core(
    cores: int, most: int, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    full = Schedule.full_depth(tiny_engine.shape.layers)
    assert memory.rows_that_fit(1 << 50, "cpu", tiny_engine.shape, full, 100, 50, 4) == most
    assert memory.rows_that_fit(1 << 50, "cpu", tiny_engine.shape, full, 100, 50, 4, most=7) == 7


def test_a_containers_limits_count_and_files_that_it_has_read_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {
        "memory.max": f"{3 << 30}\n",
        "memory.current": f"{2 << 30}\n",
        "memory.stat": f"anon {1 << 30}\nactive_file {256 << 20}\ninactive_file {768 << 20}\n",
        "cpu.max": "200000 100000\n",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_available", lambda: 1 << 40)
    monkeypatch.setattr(memory, "_kept_bytes", lambda: 5)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    torch.set_num_threads(1)
    assert memory.free_bytes(torch.device("cpu")) == (1 << 30) + 5  # half of two cores' share
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert memory.free_bytes(torch.device("cpu")) == (2 << 30) // 64 + 5
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes(torch.device("cpu")) == (1 << 40) // 64 + 5


@pytest.mark.parametrize(("fraction", "expected"), [(1.0, 30 + 4), (0.5, 22 + 4)])
def test_of_a_gpu_its_free_memory_counts_and_at_most_the_share_of_this_process(
    monkeypatch: pytest.MonkeyPatch, fraction: float, expected: int
) -> None:
    """Of 80 with 30 free, this process holds 18 and uses 14. Torch itself looks at how the device is named."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 18)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 14)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 80))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.memory._lazy_init", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getMemoryFraction", lambda device: fraction, raising=False)
    assert memory.free_bytes(torch.device("cuda")) == memory.free_bytes(torch.device("cuda:0")) == expected


def test_memory_that_the_process_keeps_is_free_to_it() -> None:
    blocks = [b"1" * ((1 << 16) - count % 8) for count in range(2000)]
    last = bytearray(1 << 16)  # above them, so that they cannot go back to the system
    before = memory._kept_bytes()
    del blocks
    assert memory._kept_bytes() >= before + (100 << 20)
    resident = memory._resident()
    memory.release_freed_memory()
    assert memory._resident() <= resident - (100 << 20)
    del last


def test_free_memory_of_a_cpu_is_a_cores_share_of_what_the_system_calls_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no container limits it; where the system does not say, of half of its memory."""
    said = tmp_path / "meminfo"
    said.write_text("MemTotal: 800 kB\nMemFree: 100 kB\nMemAvailable: 400 kB\nCached: 300 kB\n")
    monkeypatch.setattr(memory, "Path", {"/proc/meminfo": said}.__getitem__)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_kept_bytes", lambda: 5)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    torch.set_num_threads(1)
    assert memory.free_bytes(torch.device("cpu")) == (100 << 10) + 5
    said.unlink()
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 200, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert memory.free_bytes(torch.device("cpu")) == (100 << 10) + 5


def test_each_lane_may_run_a_long_prompt(tiny_engine: Engine) -> None:
    shape = tiny_engine.shape
    schedule = Schedule.full_depth(shape.layers)
    for prompt, passes in ((100, 0), (PROMPT_TOKENS, 3)):
        one, four = (memory.batch_bytes(shape, schedule, 64, prompt, 50, 4, lanes) for lanes in (1, 4))
        per_token = 8 * shape.hidden + 2 * shape.query_width + shape.mlp_parameters // shape.hidden
        assert four - one == passes * PROMPT_TOKENS * per_token * 4
