"""The job with --engine vllm on a real Ray: the rows that our own engine makes."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from engine import Schedule

pytest.importorskip("vllm.config", exc_type=ImportError)

ROOT = Path(__file__).parents[3]
FEW, MANY = 6, 30  # rows


def command(output: Path, schedule: Path, engine: str, rows: int) -> list[str]:
    return [
        sys.executable, "jobs/summarize_corpus.py", "--input", "infra/demo/package_descriptions.parquet",
        "--output", str(output), "--id-column", "id", "--limit", str(rows), "--rows-per-unit", "3", "--batch-size", "2",
        "--prompt", "Summarize this in one short sentence.\n\n{text}", "--max-new-tokens", "12", "--device", "cpu",
        "--schedule", str(schedule), "--engine", engine, "--ray-address", "local",
    ]  # fmt: skip


def rows_of(output: Path) -> list[dict[str, object]]:
    """In order of their ids, without what engines charge in their own ways."""
    # Prompts are charged whole: vLLM finds what they share by itself.
    own = ("shared_prefix_tokens", "flops_prompt", "flops_full_depth")
    rows = [row for file in sorted((output / "data").glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    return [{k: v for k, v in row.items() if k not in own} for row in sorted(rows, key=lambda row: str(row["id"]))]


def run(output: Path, schedule: Path, engine: str, rows: int) -> list[dict[str, object]]:
    done = subprocess.run(
        command(output, schedule, engine, rows), cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return rows_of(output)


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("schedule")
    demo = Schedule.read(ROOT / "infra" / "demo" / "calibrated" / "1.45x")
    replace(demo, head_preview=None).write(directory)  # vLLM has none
    return directory


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory, schedule: Path) -> list[dict[str, object]]:
    """Our own engine's rows."""
    return run(tmp_path_factory.mktemp("torch") / "out", schedule, "torch", MANY)


@pytest.mark.timeout(3600)
def test_a_jobs_rows_are_our_own_engines(tmp_path: Path, schedule: Path, wanted: list[dict[str, object]]) -> None:
    found = run(tmp_path / "vllm", schedule, "vllm", FEW)
    assert len(found) == FEW
    assert found == [row for row in wanted if row["id"] in {each["id"] for each in found}]


@pytest.mark.timeout(3600)
def test_a_killed_replica_costs_no_row(tmp_path: Path, schedule: Path, wanted: list[dict[str, object]]) -> None:
    output = tmp_path / "vllm"
    with (tmp_path / "job.log").open("w") as log:
        driver = subprocess.Popen(
            command(output, schedule, "vllm", MANY), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            while not list(output.glob("_commits/*")):
                assert driver.poll() is None, (tmp_path / "job.log").read_text()[-3000:]
                time.sleep(0.1)
            replicas = [
                process
                for process in psutil.Process(driver.pid).children(recursive=True)
                if "MapBatches(Replica)" in " ".join(process.cmdline())
            ]
            assert len(replicas) == 1
            replicas[0].kill()
            assert driver.wait(1500) == 0, (tmp_path / "job.log").read_text()[-3000:]
        finally:
            driver.kill()
    assert "units were lost with their processes" in (tmp_path / "job.log").read_text()
    assert rows_of(output) == wanted
