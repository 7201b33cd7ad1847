"""The job with --engine vllm on a real Ray: the rows that our own engine makes."""

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from servers import RayHead

from engine import Schedule
from pipeline.config import JobConfig
from pipeline.generate_text import GenerateText
from pipeline.rows.rows import GENERATED
from pipeline.run import run_job

pytest.importorskip("vllm.config", exc_type=ImportError)

from tests.engine.vllm.faulty_vllm import Faulty

ROOT = Path(__file__).parents[3]
CORPUS = "infra/demo/package_descriptions.parquet"
PROMPT = "Summarize this in one short sentence.\n\n{text}"
ROWS, NEW_TOKENS, LIMIT_S = 18, 12, 1500


def command(output: Path, schedule: Path) -> list[str]:
    return [
        "python", "jobs/summarize_corpus.py", "--input", str(ROOT / CORPUS), "--output", str(output),
        "--id-column", "id", "--limit", str(ROWS), "--rows-per-unit", "3", "--batch-size", "2", "--prompt", PROMPT,
        "--max-new-tokens", str(NEW_TOKENS), "--device", "cpu", "--schedule", str(schedule), "--engine", "vllm",
    ]  # fmt: skip


def by_id(table: pa.Table) -> list[dict[str, Any]]:
    """What was generated."""
    return sorted(table.select(["id", *GENERATED.names]).to_pylist(), key=lambda row: str(row["id"]))


@pytest.fixture
def ray_head() -> Iterator[RayHead]:
    head = RayHead({})
    yield head
    head.stop()


@pytest.mark.timeout(2 * LIMIT_S)
def test_a_submitted_jobs_rows_are_our_own_engines_and_a_killed_replica_costs_none(
    tmp_path: Path, ray_head: RayHead
) -> None:
    demo = Schedule.read(ROOT / "infra" / "demo" / "calibrated" / "1.45x")
    replace(demo, head_preview=None).write(tmp_path / "schedule")  # vLLM has none
    output, log = tmp_path / "out", tmp_path / "job.log"
    with log.open("w") as said:
        job = subprocess.Popen(
            ray_head.submit(command(output, tmp_path / "schedule")), cwd=ROOT, env=os.environ | ray_head.environment,
            stdout=said, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            while not list(output.glob("_commits/*")):
                assert job.poll() is None, log.read_text()[-3000:]
                time.sleep(0.1)
            replicas = [
                process
                for process in psutil.Process().children(recursive=True)
                if "MapBatches(Replica)" in " ".join(process.cmdline())
            ]
            assert len(replicas) == 1
            replicas[0].kill()
            assert job.wait(LIMIT_S) == 0, log.read_text()[-3000:]
        finally:
            job.kill()
    assert "units were lost with their processes" in log.read_text()

    own = GenerateText(
        2, id_column="id", prompt=PROMPT, max_new_tokens=NEW_TOKENS, device="cpu", schedule=str(tmp_path / "schedule")
    )
    texts = pq.read_table(ROOT / CORPUS).slice(0, ROWS)
    assert by_id(pa.concat_tables(map(pq.read_table, (output / "data").glob("*.parquet")))) == by_id(own(texts))


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("fault", ["memory", "row"])
def test_a_jobs_passes_that_fail_cost_the_row_that_fails_alone(fault: str, tmp_path: Path) -> None:
    texts = pq.read_table(ROOT / CORPUS).slice(0, 6).select(["id", "text"])
    texts = texts.set_column(1, "text", pa.array([*texts["text"].to_pylist()[:5], "An UNLUCKY text."]))
    pq.write_table(texts, tmp_path / "texts.parquet")
    options: dict[str, Any] = {
        "id_column": "id", "prompt": PROMPT, "max_new_tokens": 6, "device": "cpu", "batch_size": 4,
        "schedule": str(ROOT / "infra" / "demo" / "calibrated" / "1.25x"),
    }  # fmt: skip
    output = tmp_path / "out"
    config = JobConfig(
        input=str(tmp_path / "texts.parquet"), output=str(output), engine="vllm", replicas=1, rows_per_unit=3,
        ray_address="local", **options,
    )  # fmt: skip
    result = run_job(config, Faulty(fault=fault))
    assert result.totals.rows == 6
    found = by_id(pa.concat_tables(map(pq.read_table, (output / "data").glob("*.parquet"))))
    wanted = by_id(GenerateText(2, engine="torch", **options)(texts))
    for row, expected in zip(found, wanted, strict=True):
        if fault == "row" and row["id"] == texts["id"][5].as_py():
            assert row["error"] == "ValueError: this row cannot be"
        else:
            assert (row["error"], row["generation"]) == (None, expected["generation"])
