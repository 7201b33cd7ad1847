"""One run under faults: its input, its sessions, and the proof that nothing is lost and nothing is twice."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from counting_double import counting_backend, tokens_generated
from fault_proxy import FaultProxy, key
from servers import BUCKET, BUSY_MACHINE, S3Server

from pipeline.cluster import EMBEDDED_STORE_BYTES
from pipeline.config import JobConfig
from pipeline.inspection import inspect, verify
from pipeline.run import RunResult, run_job
from pipeline.storage import Storage

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
IMPORTS = ":".join(str(folder) for folder in (ROOT, HERE, HERE.parent, HERE.parent / "pipeline"))
NEW_TOKENS = 12
PATIENCE_S = 20.0  # the product's own default is ten minutes


@contextmanager
def local_ray(environment: dict[str, str], **options: Any) -> Iterator[None]:
    """Ray inside this process on two cores; this process and its workers have the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**environment, **BUSY_MACHINE, "PYTHONPATH": IMPORTS}.items():
            patch.setenv(name, value)
        if ray.is_initialized():
            ray.shutdown()
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=EMBEDDED_STORE_BYTES // 4,
            _system_config={"idle_worker_killing_time_threshold_ms": 600_000, "num_workers_soft_limit": 8},
            **options,
        )
        try:
            yield
        finally:
            ray.shutdown()


class Trial:
    """A run of a name of its own on a server that other trials use too."""

    def __init__(
        self,
        server: S3Server,
        proxy: FaultProxy,
        folder: Path,
        rows: int = 24,
        files: int = 2,
        special: dict[int, str] | None = None,
    ) -> None:
        """`special` are texts of chosen rows, such as those that spring a trap of `trap_double`."""
        self.name = f"run-{uuid.uuid4().hex[:10]}"
        self.server, self.proxy, self.folder = server, proxy, folder
        self.texts = [(special or {}).get(row, f"{row} of {self.name}") for row in range(rows)]
        per_file = -(-rows // files)
        for file in range(files):
            part = range(file * per_file, min(rows, (file + 1) * per_file))
            sink = io.BytesIO()
            pq.write_table(pa.table({"id": list(part), "text": [self.texts[row] for row in part]}), sink)
            server.files.pipe_file(f"{BUCKET}/{self.name}/in/{file}.parquet", sink.getvalue())
        proxy.arm(self.name)

    def config(self, **options: Any) -> JobConfig:
        return JobConfig(**self.options(**options))

    def options(self, **options: Any) -> dict[str, Any]:
        defaults = {
            "input": key(f"{self.name}/in"),
            "output": key(f"{self.name}/out"),
            "s3_endpoint": self.proxy.url,
            "prompt_format": "raw",
            "max_new_tokens": NEW_TOKENS,
            "rows_per_unit": 4,
            "replicas": 1,
            "storage_patience_s": PATIENCE_S,
            "stop_grace_s": 10.0,
            "stall_minutes": 5.0,
        }
        return {**defaults, **options}

    def run(self, seconds_per_batch: float = 0.0, **options: Any) -> RunResult:
        """A session inside this process."""
        return run_job(self.config(**options), counting_backend(self.folder, seconds_per_batch))

    def start(
        self, seconds_per_batch: float = 0.0, lease: dict[str, float] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """A session in a process of its own, on a Ray of its own unless told otherwise; `lease` are times of its."""
        told = {
            "folder": str(self.folder),
            "seconds_per_batch": seconds_per_batch,
            "lease": lease or {},
            "job": self.options(**{"ray_address": "local", **options}),
        }
        return subprocess.Popen(
            [sys.executable, str(HERE / "driver.py"), json.dumps(told)],
            env=os.environ | self.server.environment | {"PYTHONPATH": IMPORTS},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def tokens_of_one_pass(self) -> int:
        return sum(min(NEW_TOKENS, len(text)) for text in self.texts)

    @property
    def tokens_generated(self) -> int:
        return tokens_generated(self.folder)

    def check(self, errors: dict[int, str] | None = None) -> None:
        """Every row of the input is in the output once, with the generation it must have; `errors` are prefixes.

        Reads the server directly, as a reader of the output would: through the manifest.
        """
        files = self.server.files
        root = f"{BUCKET}/{self.name}/out"
        manifest = json.loads(files.cat_file(f"{root}/_SUCCESS.json"))
        contents = [files.cat_file(f"{root}/{entry['file']}") for entry in manifest["commits"]]
        rows = pa.concat_tables(pq.read_table(io.BytesIO(content)) for content in contents).to_pylist()
        assert [row["id"] for row in rows] == list(range(len(self.texts)))
        for row in rows:
            wrong = (errors or {}).get(row["id"])
            if wrong is None:
                assert row["generation"] == self.texts[row["id"]][:NEW_TOKENS]
                assert row["error"] is None
            else:
                assert row["generation"] is None
                assert row["error"].startswith(wrong)
        left = {path.rsplit("/", 1)[-1] for path in files.find(f"{root}/data")}
        assert left == {entry["file"].rsplit("/", 1)[-1] for entry in manifest["commits"]}
        storage = Storage(key(f"{self.name}/out"), self.config().output_storage().settings)
        assert verify(storage, inspect(storage)) == []


def own_processes(title: str) -> list[psutil.Process]:
    """Living descendants of this process whose title or command line contains a text; nobody else's."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if title in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill_replicas() -> None:
    """SIGKILL for every replica of the Ray clusters that this process has started."""
    for process in own_processes("MapBatches(Replica)"):
        process.kill()
