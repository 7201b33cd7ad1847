"""One run under faults: its input, its sessions, and the proof that nothing is lost and nothing is twice."""

import io
import json
import os
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from counting_double import SIGNED, counting_backend, tokens_generated
from fault_proxy import FaultProxy, key
from servers import BUCKET, IMPORTS, S3Server, wait_until

from pipeline.config import JobConfig
from pipeline.inspection import inspect, verify
from pipeline.run import RunResult, run_job
from pipeline.storage.storage import Storage

HERE = Path(__file__).parent
NEW_TOKENS = 12
PATIENCE_S = 20.0  # the product's own default is ten minutes
HARMS = ("rows lost", "rows doubled", "rows changed", "rows mixed", "foreign files changed", "stray files", "damages")


class Harmed(AssertionError):
    """An output is not as it must be."""

    def __init__(self, counts: Counter[str], example: str) -> None:
        """`counts` are of HARMS."""
        super().__init__(f"{dict(+counts)}, such as {example}")
        self.counts = counts


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
        per_file = -(-rows // files)
        self._parts = [range(start, min(rows, start + per_file)) for start in range(0, rows, per_file)]
        self.texts = [(special or {}).get(row, f"{row} of {self.name}") for row in range(rows)]  # wanted in the output
        # Of the first file there is another version, of as many rows.
        self._versions = [self.texts, [f"{row} anew" for row in self._parts[0]] + self.texts[len(self._parts[0]) :]]
        self.version = 0  # in the input
        self._foreign: dict[str, bytes] = {}
        self._drivers: list[subprocess.Popen[str]] = []
        for file in range(len(self._parts)):
            self._write_input(file)
        proxy.arm(self.name)

    def replace_input(self) -> None:
        """The first file's other version takes its place, or the first one that again: equal rows make equal files."""
        self.version = 1 - self.version
        self._write_input(0)

    def want_newest(self) -> None:
        """From now on the output has to be of the input as it is."""
        self.texts = self._versions[self.version]

    def _write_input(self, file: int) -> None:
        part, sink = self._parts[file], io.BytesIO()
        texts = self._versions[self.version][part.start : part.stop]
        pq.write_table(pa.table({"id": list(part), "text": texts}), sink)
        self.server.files.pipe_file(f"{BUCKET}/{self.name}/in/{file}.parquet", sink.getvalue())

    @property
    def begun(self) -> bool:
        """Whether the output is a run's."""
        return self._has("_run.json")

    @property
    def published(self) -> bool:
        return self._has("_SUCCESS.json")

    def _has(self, name: str) -> bool:
        return bool(self.server.files.exists(f"{BUCKET}/{self.name}/out/{name}"))

    def wait_for_commits(self, count: int) -> None:
        """Until so many stand: they are written side by side, so the nth may be asked for before those before it."""
        wait_until(lambda: len(self.server.files.find(f"{BUCKET}/{self.name}/out/_commits")) >= count, "a commit")

    def lay_foreign_files(self, names: Sequence[str]) -> None:
        """Beside the output or in it; `check` wants them back as they are."""
        for name in names:
            path = f"{BUCKET}/{self.name}/{name}"
            self._foreign[path] = f"{name} of somebody".encode()
            self.server.files.pipe_file(path, self._foreign[path])

    @property
    def foreign_files(self) -> int:
        return len(self._foreign)

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

    def run(self, seconds_per_batch: float = 0.0, model: str = "0", **options: Any) -> RunResult:
        """A session inside this process."""
        return run_job(self.config(**options), counting_backend(self.folder, seconds_per_batch, model))

    def start(
        self, seconds_per_batch: float = 0.0, lease: dict[str, float] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """A session in a process of its own, on a Ray of its own unless told otherwise; `lease` are times of its."""
        driver = waiting_driver(self.server)
        self._drivers.append(driver)
        tell(driver, self.order(seconds_per_batch, lease=lease or {}, **options))
        return driver

    def close(self) -> None:
        """Drivers that a test which failed has left end."""
        for driver in self._drivers:
            driver.kill()
            driver.wait()

    def order(
        self, seconds_per_batch: float, lease: dict[str, float], clock_s: float = 0.0, **options: Any
    ) -> dict[str, Any]:
        """What a driver is told."""
        return {
            "folder": str(self.folder),
            "seconds_per_batch": seconds_per_batch,
            "lease": lease,
            "clock_s": clock_s,
            "job": self.options(**{"ray_address": "local", **options}),
        }

    @property
    def tokens_of_one_pass(self) -> int:
        return sum(min(NEW_TOKENS, len(text)) for text in self.texts)

    @property
    def tokens_generated(self) -> int:
        return tokens_generated(self.folder)

    def check(self, errors: dict[int, str] | None = None, of_any_version: bool = False) -> None:
        """Every row of the input is in the output once, with the generation it must have; `errors` are prefixes.

        Reads the server directly, as a reader of the output would: through the manifest.

        Args:
            of_any_version: each file's rows may be of either of its versions, but of one and the same.

        Raises:
            Harmed: something is lost, twice, wrong, or was somebody else's.
        """
        files, harm, examples = self.server.files, Counter[str](), list[object]()
        root = f"{BUCKET}/{self.name}/out"
        manifest = json.loads(files.cat_file(f"{root}/_SUCCESS.json"))
        contents = [files.cat_file(f"{root}/{entry['file']}") for entry in manifest["commits"]]
        rows = pa.concat_tables(pq.read_table(io.BytesIO(content)) for content in contents).to_pylist()

        ids = [row["id"] for row in rows]
        harm["rows lost"] = len(set(range(len(self.texts))).difference(ids))
        harm["rows doubled"] = len(ids) - len(set(ids))
        harm["rows changed"] = list(dict.fromkeys(ids)) != sorted(set(ids))  # in another order
        versions = [self._wrong(row, (errors or {}).get(row["id"]), of_any_version, harm, examples) for row in rows]
        first = [version for row, version in zip(rows, versions, strict=True) if row["id"] in self._parts[0]]
        if of_any_version:
            harm["rows mixed"] += min(first.count(version) for version in (0, 1))

        for path, content in self._foreign.items():
            if not files.exists(path) or files.cat_file(path) != content:
                harm["foreign files changed"] += 1
                examples.append(path)
        left = {path.rsplit("/", 1)[-1] for path in files.find(f"{root}/data") if path not in self._foreign}
        stray = left ^ {entry["file"].rsplit("/", 1)[-1] for entry in manifest["commits"]}
        storage = Storage(key(f"{self.name}/out"), self.config().output_storage().settings)
        damages = verify(storage, inspect(storage))
        if not of_any_version:  # or else a job has yet to come, which sweeps
            harm["stray files"], harm["damages"] = len(stray), len(damages)
        if harm.total():
            raise Harmed(harm, str([*examples, *stray, *damages][:1] or [ids]))

    def _wrong(
        self, row: dict[str, Any], error: str | None, of_any_version: bool, harm: Counter[str], examples: list[object]
    ) -> int | None:
        """Counts what is wrong with a row; which version of the input it is of."""
        made = [texts[row["id"]][:NEW_TOKENS] for texts in self._versions]
        wanted = made if of_any_version else [self.texts[row["id"]][:NEW_TOKENS]]
        if error is not None:
            right = row["generation"] is None and row["error"].startswith(error)
        else:
            right = row["generation"] in wanted and row["error"] is None
        if not right:
            other = row["generation"] in made or str(row["generation"]).startswith(SIGNED)
            harm["rows mixed" if other else "rows changed"] += 1
            examples.append(row)
        return made.index(row["generation"]) if row["generation"] in made else None


def waiting_driver(server: S3Server) -> subprocess.Popen[str]:
    """A driver's process that waits to be told its job: imports take longer than that."""
    return subprocess.Popen(
        [sys.executable, str(HERE / "driver.py")],
        env=os.environ | server.environment | {"PYTHONPATH": IMPORTS},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def tell(driver: subprocess.Popen[str], order: dict[str, Any]) -> None:
    """Begin a job in a driver that waits."""
    assert driver.stdin is not None
    driver.stdin.write(json.dumps(order))
    driver.stdin.close()
    driver.stdin = None


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


def kill_replicas() -> int:
    """SIGKILL for every replica of the Ray clusters that this process has started; how many there were."""
    killed = 0
    for process in own_processes("MapBatches(Replica)"):
        with suppress(psutil.NoSuchProcess):
            process.kill()
            killed += 1
    return killed
