"""A damaged Parquet file is read right or fails by itself in one sentence, whatever is wrong with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("parquet_files.py")
ROOT = SCRIPT.parents[2]
MOST_MIB = 1024
AT_ONCE = 2


def results(first: int, end: int) -> list[dict[str, Any]]:
    """Of each seed; where a process crashes or hangs, the next goes on behind the seed that did it."""
    found: list[dict[str, Any]] = []
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/pipeline")))
    while first < end:
        job = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(first), str(end)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert job.stdout is not None
        last: dict[str, Any] = {"seed": first, "kind": "none yet"}
        for line in job.stdout:
            last = json.loads(line)
            if "s" in last:
                found.append(last)
        if job.wait() != 0:
            found.append({**last, "said": "", "wrong": f"ended with {job.returncode}", "s": 0.0, "mib": 0.0})
        first = last["seed"] + 1
    return found


def check(found: list[dict[str, Any]], how_many: int) -> None:
    wrong = [result for result in found if result["wrong"] or result["mib"] > MOST_MIB]
    said = sum(bool(result["said"]) for result in found)
    seconds, memory = (max(result[key] for result in found) for key in ("s", "mib"))
    print(f"{len(found)} files: {said} said to be damaged, the longest {seconds:.1f} s, all in {memory:.0f} MiB")
    assert wrong == []
    assert len(found) == how_many
    assert said > how_many / 2


def test_a_damaged_file_ends_in_one_sentence_and_the_others_are_done() -> None:
    check(results(0, 40), 40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_damaged_files_end_in_one_sentence_each() -> None:
    edges = range(0, 2001, 500)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        parts = pool.map(results, edges, edges[1:])
        check([result for part in parts for result in part], 2000)
