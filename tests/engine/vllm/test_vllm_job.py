"""The job with --engine vllm on a real Ray: the rows that our own engine makes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from servers import RayHead

from engine import Schedule

pytest.importorskip("vllm.config", exc_type=ImportError)

ROOT = Path(__file__).parents[3]
FEW, MANY = 6, 30  # rows


def command(output: Path, schedule: Path, engine: str, rows: int, address: str = "local") -> list[str]:
    return [
        sys.executable, "jobs/summarize_corpus.py", "--input", "infra/demo/package_descriptions.parquet",
        "--output", str(output), "--id-column", "id", "--limit", str(rows), "--rows-per-unit", "3", "--batch-size", "2",
        "--prompt", "Summarize this in one short sentence.\n\n{text}", "--max-new-tokens", "12", "--device", "cpu",
        "--schedule", str(schedule), "--engine", engine, "--ray-address", address,
    ]  # fmt: skip


def rows_of(output: Path) -> list[dict[str, object]]:
    """In order of their ids, without what engines charge in their own ways."""
    # Prompts are charged whole: vLLM finds what they share by itself.
    own = ("shared_prefix_tokens", "flops_prompt", "flops_full_depth")
    rows = [row for file in sorted((output / "data").glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    return [{k: v for k, v in row.items() if k not in own} for row in sorted(rows, key=lambda row: str(row["id"]))]


def finish(command: list[str], environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | (environment or {}), capture_output=True, text=True, timeout=1500,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("schedule")
    demo = Schedule.read(ROOT / "infra" / "demo" / "calibrated" / "1.45x")
    replace(demo, head_preview=None).write(directory)  # vLLM has none
    return directory


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory, schedule: Path) -> list[dict[str, object]]:
    """Our own engine's rows."""
    output = tmp_path_factory.mktemp("torch") / "out"
    finish(command(output, schedule, "torch", MANY))
    return rows_of(output)


@pytest.fixture
def ray_head() -> Iterator[RayHead]:
    head = RayHead({})
    yield head
    head.stop()


@pytest.mark.timeout(3600)
def test_a_submitted_jobs_rows_are_our_own_engines(
    tmp_path: Path, schedule: Path, wanted: list[dict[str, object]], ray_head: RayHead
) -> None:
    job = command(tmp_path / "vllm", schedule, "vllm", FEW, "auto")
    finish(ray_head.submit(job), ray_head.environment)
    found = rows_of(tmp_path / "vllm")
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
