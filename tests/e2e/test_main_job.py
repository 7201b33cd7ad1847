"""The main job as users start it: as a script, submitted to a Ray head, on S3, on several replicas."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from servers import S3Server

if TYPE_CHECKING:
    from conftest import RayHead

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "infra" / "demo" / "package_descriptions.parquet"
SCRIPT = "jobs/summarize_corpus.py"
LIMIT_S = 240

pytestmark = pytest.mark.timeout(LIMIT_S + 60)


def run(command: list[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def output_rows(output: Path) -> list[dict[str, Any]]:
    """All rows of a finished run, in input order."""
    manifest = json.loads((output / "_SUCCESS.json").read_text())
    return pa.concat_tables(pq.read_table(output / commit["file"]) for commit in manifest["commits"]).to_pylist()


def test_ray_job_submit_runs_the_main_job_on_s3(ray_head: RayHead, s3: S3Server) -> None:
    s3.files.put_file(str(CORPUS), "corpus/in/texts.parquet")
    # The working directory travels to the cluster: the job must not depend on where it was submitted.
    submit = [str(Path(sys.executable).parent / "ray"), "job", "submit", "--address", ray_head.dashboard]
    flags = ["--input", "s3://corpus/in/", "--output", "s3://corpus/out", "--limit", "6", "--rows-per-unit", "3"]
    flags += ["--id-column", "id", "--max-new-tokens", "6", "--target-speedup", "1.1"]
    said = run([*submit, "--working-dir", ".", "--", "python", SCRIPT, *flags], ray_head.environment)

    assert "succeeded" in said
    assert "report: s3://corpus/out/report.html" in said
    assert "Traceback" not in said
    assert s3.environment["AWS_SECRET_ACCESS_KEY"] not in said
    manifest = json.loads(s3.files.cat_file("corpus/out/_SUCCESS.json"))
    assert [commit["rows"] for commit in manifest["commits"]] == [3, 3]
    rows = []
    for commit in manifest["commits"]:
        with s3.files.open(f"corpus/out/{commit['file']}") as stream:
            rows += pq.read_table(stream).to_pylist()
    assert [row["id"] for row in rows] == pq.read_table(CORPUS)["id"].to_pylist()[:6]
    for row in rows:
        assert row["generation"].strip()
        assert row["error"] is None
        assert row["mean_active_layers"] < 30
    assert s3.files.cat_file("corpus/out/report.html").startswith(b"<!doctype html>")


@pytest.mark.slow
def test_two_replicas_give_the_same_rows_as_one(tmp_path: Path) -> None:
    flags = ["--input", str(CORPUS), "--limit", "24", "--rows-per-unit", "4", "--max-new-tokens", "10"]
    flags += ["--temperature", "0.8", "--top-p", "0.95", "--target-speedup", "1.1", "--threads-per-replica", "1"]
    for replicas in ("1", "2"):
        where = ["--ray-address", "local", "--output", str(tmp_path / replicas), "--replicas", replicas]
        run([sys.executable, SCRIPT, *flags, *where])

    one, two = output_rows(tmp_path / "1"), output_rows(tmp_path / "2")
    assert len(one) == 24
    assert one == two


@pytest.mark.parametrize("bucket", ["corpus", "no-such-bucket"])
def test_a_storage_that_refuses_ends_the_job_with_one_sentence_that_holds_no_secret(s3: S3Server, bucket: str) -> None:
    command = [sys.executable, SCRIPT, "--input", f"s3://{bucket}/in/", "--output", "s3://corpus/other"]
    secret = secrets.token_hex(16) if bucket == "corpus" else s3.environment["AWS_SECRET_ACCESS_KEY"]
    environment = os.environ | s3.environment | {"AWS_SECRET_ACCESS_KEY": secret}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)

    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert f"s3://{bucket}/in" in line
    assert "Traceback" not in done.stdout + done.stderr
    assert secret not in done.stdout + done.stderr
