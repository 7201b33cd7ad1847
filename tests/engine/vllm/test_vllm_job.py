"""The job with --engine vllm on a real Ray: the rows that our own engine makes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from engine import Schedule

pytest.importorskip("vllm.config", exc_type=ImportError)

ROOT = Path(__file__).parents[3]
ROWS = 6


def job(output: Path, schedule: Path, engine: str) -> list[dict[str, object]]:
    command = [
        sys.executable, "jobs/summarize_corpus.py", "--input", "infra/demo/package_descriptions.parquet",
        "--output", str(output), "--id-column", "id", "--limit", str(ROWS), "--rows-per-unit", "3", "--batch-size", "2",
        "--prompt", "Summarize this in one short sentence.\n\n{text}", "--max-new-tokens", "12", "--device", "cpu",
        "--schedule", str(schedule), "--engine", engine, "--ray-address", "local",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [row for file in sorted((output / "data").glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    return sorted(rows, key=lambda row: str(row["id"]))


@pytest.mark.timeout(3600)
def test_a_jobs_rows_are_our_own_engines(tmp_path: Path) -> None:
    demo = Schedule.read(ROOT / "infra" / "demo" / "calibrated" / "1.45x")
    replace(demo, head_preview=None).write(tmp_path / "schedule")  # vLLM has none
    found = job(tmp_path / "vllm", tmp_path / "schedule", "vllm")
    wanted = job(tmp_path / "torch", tmp_path / "schedule", "torch")
    assert len(found) == ROWS
    # Prompts are charged whole: vLLM finds what they share by itself.
    own = ("shared_prefix_tokens", "flops_prompt", "flops_full_depth")
    assert [{k: v for k, v in row.items() if k not in own} for row in found] == [
        {k: v for k, v in row.items() if k not in own} for row in wanted
    ]
