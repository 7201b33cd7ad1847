"""A replica's memory: weights, cache and a bounded rest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# A process of its own: this one's peak holds every other test's memory.
PROGRAM = """
import json, re, sys
from pathlib import Path
import pyarrow.parquet as pq
from engine import Engine, Sampling

engine = Engine.load("smollm2-135m-instruct", device="cpu", threads=2)
texts = pq.read_table(sys.argv[1], columns=["text"])["text"].to_pylist()[:32]
batches = []
prompts = [engine.tokenizer.encode_chat(text) for text in texts]
list(engine.generate(prompts, Sampling(max_new_tokens=4, min_new_tokens=4), on_batch=batches.append))
shape = engine.shape
parameters = shape.layers * shape.layer_parameters + shape.head_parameters
# Not getrusage: its peak starts at the size of the process that started this one.
peak = int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
print(json.dumps({"weights": 4 * parameters, "cache": batches[0].cache_bytes, "peak": peak}))
"""


def test_a_replica_needs_its_weights_its_cache_and_a_gigabyte() -> None:
    corpus = ROOT / "infra" / "demo" / "package_descriptions.parquet"
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(corpus)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    memory = json.loads(done.stdout.splitlines()[-1])

    assert memory["peak"] <= 1.3 * memory["weights"] + memory["cache"] + (1 << 30), memory
