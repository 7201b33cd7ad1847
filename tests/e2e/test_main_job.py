"""The main job as users start it: as a script, submitted to a Ray head, on S3, on several replicas."""

import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Collection
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Self
from urllib.request import urlopen

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from promql import finds
from servers import RayHead, S3Server, wait_until

from pipeline.monitoring.metrics import COUNTED

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "infra" / "demo" / "package_descriptions.parquet"
SCRIPT = "jobs/summarize_corpus.py"
LIMIT_S = 240

pytestmark = pytest.mark.timeout(LIMIT_S + 300)  # and what the fixtures may take


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


@dataclass(frozen=True)
class Submitted:
    """What a submitted job said, left and counted."""

    said: str
    manifest: dict[str, Any]
    samples: dict[tuple[str, str], Sample]  # the last of each series


@pytest.fixture(scope="module")
def submitted(ray_head: RayHead, s3: S3Server) -> Submitted:
    s3.files.put_file(str(CORPUS), "corpus/in/texts.parquet")
    # The working directory travels to the cluster: the job must not depend on where it was submitted.
    flags = ["--input", "s3://corpus/in/", "--output", "s3://corpus/out", "--limit", "6", "--rows-per-unit", "3"]
    flags += ["--id-column", "id", "--max-new-tokens", "6", "--target-speedup", "1.1", "--audit-fraction", "1"]
    with Scraping(ray_head.metrics) as scraping:
        said = run(ray_head.submit(["python", SCRIPT, *flags]), ray_head.environment)
        manifest = json.loads(s3.files.cat_file("corpus/out/_SUCCESS.json"))
        # Counters reach the port seconds later, one by one, the last ones after the driver's end.
        wait_until(lambda: counted(list(scraping.samples.values())) == ledger(manifest), "the last counts")
    return Submitted(said, manifest, scraping.samples)


def counted(samples: Collection[Sample]) -> dict[str, float]:
    """The sums of counters, by the ledger's names."""
    return {
        field: sum(sample.value for sample in samples if sample.name == f"ray_{metric.name}")
        for field, metric in COUNTED.items()
    }


def ledger(manifest: dict[str, Any]) -> dict[str, Any]:
    return {field: pytest.approx(manifest["totals"][field], rel=1e-12) for field in COUNTED}


class Scraping:
    """Reads a metrics port again and again for as long as the block lasts; replicas' series end before the job."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._scrape, daemon=True)
        self.samples: dict[tuple[str, str], Sample] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _scrape(self) -> None:
        while not self._done.wait(2.0):
            try:
                with urlopen(self._url, timeout=30) as answer:
                    lines = answer.read().decode().splitlines(keepends=True)
            except (OSError, HTTPException):  # the agent is busy, or not there yet
                continue
            ours = "".join(line for line in lines if "ray_skipdecode_" in line)
            for family in text_string_to_metric_families(ours):
                for sample in family.samples:
                    self.samples[sample.name, json.dumps(sample.labels, sort_keys=True)] = sample


def test_ray_job_submit_runs_the_main_job_on_s3(submitted: Submitted, s3: S3Server) -> None:
    said, manifest = submitted.said, submitted.manifest
    assert "succeeded" in said
    assert "report: s3://corpus/out/report.html" in said
    assert "Traceback" not in said
    assert s3.environment["AWS_SECRET_ACCESS_KEY"] not in said
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


def test_what_prometheus_scrapes_is_the_ledger_to_the_last_token(submitted: Submitted) -> None:
    for sample in submitted.samples.values():
        assert sample.labels["run"].startswith(submitted.manifest["fingerprint"])
    assert submitted.manifest["totals"]["generated_tokens"] > 0
    assert counted(submitted.samples.values()) == ledger(submitted.manifest)


def test_every_query_of_the_dashboard_finds_data(submitted: Submitted) -> None:
    (run,) = {sample.labels["run"] for sample in submitted.samples.values()}
    for query in dashboard_queries():
        assert finds(query, submitted.samples.values(), run=run), query
        assert not finds(query, submitted.samples.values(), run="another"), query


def dashboard_queries() -> list[str]:
    panels = json.loads((ROOT / "infra/grafana/skipdecode.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


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


@pytest.mark.parametrize(
    ("bucket", "named"),
    [pytest.param("corpus", "corpus/other", marks=pytest.mark.slow), ("no-such-bucket", "no-such-bucket/in")],
)
def test_a_storage_that_refuses_ends_the_job_with_one_sentence_that_holds_no_secret(
    s3: S3Server, bucket: str, named: str
) -> None:
    """It names the place: with a secret that is wrong for both, the output, where a job looks first."""
    command = [sys.executable, SCRIPT, "--input", f"s3://{bucket}/in/", "--output", "s3://corpus/other"]
    secret = secrets.token_hex(16) if bucket == "corpus" else s3.environment["AWS_SECRET_ACCESS_KEY"]
    environment = os.environ | s3.environment | {"AWS_SECRET_ACCESS_KEY": secret}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)

    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert f"s3://{named}" in line
    assert "Traceback" not in done.stdout + done.stderr
    assert secret not in done.stdout + done.stderr
