"""The local cluster as nightly work uses it: two Ray nodes, an S3 server, incremental jobs by submission."""

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from datasets import load_dataset
from servers import wait_until

ROOT = Path(__file__).parents[2]
ROWS = 4  # of each input file
JOB_S = 300
FLAGS = ["--incremental", "--replicas", "2", "--threads-per-replica", "1", "--rows-per-unit", "2"]
FLAGS += ["--max-new-tokens", "6"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(6 * JOB_S)]


def local_demo() -> ModuleType:
    """infra/local/demo.py, which lies in no package."""
    spec = importlib.util.spec_from_file_location("local_demo", ROOT / "infra/local/demo.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["local_demo"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


demo = local_demo()


class Cluster:
    """S3 server and two Ray nodes, and a file of texts for every night."""

    def __init__(self, environment: dict[str, str], files: Any, head: Any) -> None:
        self.environment, self.files, self.head = environment, files, head

    def add_texts(self, night: int) -> None:
        with self.files.open(f"{demo.INPUT}/{night}.parquet", "wb") as stream:
            pq.write_table(pq.read_table(demo.TEXTS).slice(night * ROWS, ROWS), stream)

    def start(self) -> subprocess.Popen[str]:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        started: subprocess.Popen[str] = demo.submit(self.head, self.environment, FLAGS, **streams)
        return started

    def manifest(self) -> dict[str, Any]:
        return dict(json.loads(self.files.cat_file(f"{demo.OUTPUT}/_SUCCESS.json")))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="sd"))  # short: the paths of Ray's sockets have a limit
    try:
        with (
            demo.s3_server(folder) as (environment, files),
            demo.ray_head(folder, environment) as head,
            demo.ray_node(folder, environment, head),
        ):
            yield Cluster(environment, files, head)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def done(job: subprocess.Popen[str]) -> str:
    said = job.communicate(timeout=JOB_S)[0]
    assert job.returncode == 0, said
    return said


def test_nightly_jobs_on_two_nodes_do_each_file_once_and_never_two_at_a_time(cluster: Cluster) -> None:
    assert cluster.head.nodes() == 2
    cluster.add_texts(0)
    assert "1 of 1 files are new or changed" in done(cluster.start())
    first = cluster.manifest()

    cluster.add_texts(1)
    leases = cluster.files.glob(f"{demo.OUTPUT}/_lease/*")  # of the first night, the last of which stays
    ours = cluster.start()
    wait_until(lambda: cluster.files.glob(f"{demo.OUTPUT}/_lease/*") != leases, "the lease of the job", JOB_S)
    other = cluster.start()
    assert "1 of 2 files are new or changed" in done(ours)
    # It saw the first one at work, or found that it has finished meanwhile.
    said = done(other)
    assert "nothing to do" in said or "nothing is new" in said
    second = cluster.manifest()
    assert second["totals"]["rows"] == 2 * ROWS
    assert [commit for commit in second["commits"] if commit in first["commits"]] == first["commits"]

    texts = pq.read_table(demo.TEXTS).slice(0, 2 * ROWS)["id"].to_pylist()
    paths = [f"s3://{demo.OUTPUT}/{commit['file']}" for commit in second["commits"]]
    options = {
        "key": cluster.environment["AWS_ACCESS_KEY_ID"],
        "secret": cluster.environment["AWS_SECRET_ACCESS_KEY"],
        "endpoint_url": cluster.environment["AWS_ENDPOINT_URL"],
    }
    frame = pd.concat(pd.read_parquet(path, storage_options=options) for path in paths)
    with tempfile.TemporaryDirectory() as cache:  # last: it writes into the options
        loaded = load_dataset("parquet", data_files=paths, split="train", storage_options=options, cache_dir=cache)
        assert loaded["id"][:] == texts
    assert frame["id"].tolist() == texts
    assert frame["generation"].str.strip().str.len().gt(0).all()
