"""Damaged records, read by all that reads them; run as a script.

usage: records.py FIRST END      prints one line of JSON for each seed from FIRST up to END
"""

import os
import random
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from damaged_json import in_gzip, put_instead, with_bytes_changed, with_value_changed
from engine_double import Echo, EchoBackend
from inline_session import without_ray
from parts import PARTS
from rich.console import Console
from trials import run, sentence

from engine import ModelError, ScheduleError
from jobs import inspect_run, job_output
from pipeline.commits.commit import SUCCESS_FILE, read_commits, write_snapshot
from pipeline.commits.manifest import read_manifest
from pipeline.config import JobConfig
from pipeline.dataset.config import GENERATION, DatasetConfig
from pipeline.dataset.generate import generate_dataset
from pipeline.errors import JobError, UnitsFailed
from pipeline.forecaster import forecast_run
from pipeline.reporting import report, schedule_maps
from pipeline.reporting.forecast import write_forecast
from pipeline.run import run_job
from pipeline.storage import lease
from pipeline.storage.records import RecordDamaged

ROWS = {"a": 7, "b": 5}  # of the input files
TEXT = "{file} {row}"
BACKEND = EchoBackend(Echo("said: "))


@dataclass(frozen=True)
class Kind:
    """A kind of record: the output it stands in, and what its files are called."""

    of: str
    glob: str


KINDS = {
    "run": Kind("done", "_run.json"),
    "commit": Kind("done", "_commits/*.json"),
    "snapshot": Kind("done", "_snapshot.json.gz"),
    "manifest": Kind("done", SUCCESS_FILE),
    "plan": Kind("done", "_plan.json"),
    "input": Kind("done", "_input/*.json"),
    "half-done run": Kind("failing", "_run.json"),
    "half-done commit": Kind("failing", "_commits/*.json"),
    "half-done input": Kind("failing", "_input/*.json"),
    "failed": Kind("failing", "_failed/*.json"),
    "nightly run": Kind("nightly", "_run.json"),
    "nightly commit": Kind("nightly", "_commits/*.json"),
    "nightly inputs": Kind("nightly", "_inputs.json"),
    "nightly lease": Kind("nightly", "_lease/*.json"),
    "nightly manifest": Kind("nightly", SUCCESS_FILE),
    "data set": Kind("set", "_DATASET.json"),
    "data set's run": Kind("set", f"{GENERATION}/_run.json"),
    "data set's commit": Kind("set", f"{GENERATION}/_commits/*.json"),
    "data set's manifest": Kind("set", f"{GENERATION}/{SUCCESS_FILE}"),
}  # fmt: skip
ALL = (*KINDS, *PARTS)


class World:
    """Outputs as real jobs leave them, twice: those of `other` are of another run each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.canary = root / "canary"
        self.canary.write_text("{}")
        for folder, files in (("in", ROWS), ("partly", {**ROWS, "broken": 3}), ("other", {"c": 3})):
            for name, rows in files.items():
                (root / folder).mkdir(exist_ok=True)
                texts = [TEXT.format(file=name, row=row) for row in range(rows)]
                pq.write_table(pa.table({"text": texts}), root / folder / f"{name}.parquet")
        (root / "partly/broken.parquet").write_bytes(b"PAR1 no more PAR1")
        for whose, folder in (("", "in"), ("other-", "other")):
            for name in ("done", "failing", "nightly", "set"):
                input_ = "partly" if (name, folder) == ("failing", "in") else folder
                self.work(name, root / f"{whose}{name}", root / input_)
                if name == "done":
                    config = self.config(name, root / f"{whose}{name}", root / input_)
                    storage = config.output_storage()
                    write_forecast(storage, forecast_run(config, BACKEND))
                    write_snapshot(storage, read_commits(storage))

    def config(self, name: str, output: Path, input_: Path) -> JobConfig:
        options: dict[str, Any] = {
            "input": str(input_), "output": str(output), "prompt": "{text}", "prompt_format": "raw",
            "max_new_tokens": 40, "rows_per_unit": 4, "storage_patience_s": 1.0,
        }  # fmt: skip
        if name == "set":
            return DatasetConfig(**options, rows_per_shard=5)
        return JobConfig(**options, incremental=name == "nightly")

    def work(self, name: str, output: Path, input_: Path) -> None:
        config = self.config(name, output, input_)
        try:
            if isinstance(config, DatasetConfig):
                generate_dataset(config, BACKEND)
            else:
                run_job(config, BACKEND)
        except UnitsFailed as error:
            sentence(error)
            assert name == "failing"


@cache
def world() -> World:
    return World(Path(tempfile.mkdtemp(prefix="fuzz-records-")))


@cache
def bomb() -> bytes:
    """A gigabyte of nothing, in a megabyte."""
    made = zlib.compressobj(1, wbits=31)
    return b"".join([made.compress(b" " * (1 << 20)) for _ in range(1 << 10)]) + made.flush()


def damage(draw: random.Random, kind: Kind, output: Path) -> str:
    """Damage one record of an output. Returns what was done."""
    path = draw.choice(sorted(output.glob(kind.glob)))
    content, how = path.read_bytes(), draw.random()
    gz = path.suffix == ".gz"
    if how < 0.1:
        return put_instead(draw, path, world().canary)
    if how < 0.2:
        source, said = draw.choice([
            (world().root / f"other-{kind.of}", "another run's"),
            (world().root / kind.of, "another record's"),
        ])  # fmt: skip
        glob = kind.glob if said == "another run's" else "**/*.json*"
        path.write_bytes(draw.choice(sorted(source.glob(glob)) or [path]).read_bytes())
        return said
    if gz:
        said, content = in_gzip(draw, content, world().canary, bomb)
    elif how < 0.5:
        said, content = with_bytes_changed(draw, content)
    else:
        said, content = with_value_changed(draw, content, world().canary)
    path.write_bytes(content)
    return said


def look_at(output: Path) -> None:
    """All that reads an output and writes nothing. Raises AssertionError if it did."""
    before = state(output)
    try:
        inspect_run.look(inspect_run.InspectRun(output=str(output), verify=True))
    finally:
        assert state(output) == before, "a reader wrote"


def state(root: Path) -> dict[str, tuple[int, ...]]:
    return {str(p): (s.st_mode, s.st_size, s.st_mtime_ns, s.st_ino) for p in walk(root) for s in (p.lstat(),)}


def walk(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        yield from (Path(folder, name) for name in [*folders, *files])


def check_rows(output: Path, rows: dict[str, int]) -> None:
    """A job that ended well has left each row once, as the manifest's readers find them."""
    storage = JobConfig(input="-", output=str(output)).output_storage()
    manifest = read_manifest(storage)
    assert manifest is not None, "done, but no manifest"
    texts = [
        text for entry in manifest["commits"] for text in pq.read_table(output / entry["file"])["text"].to_pylist()
    ]
    wanted = [TEXT.format(file=file, row=row) for file, count in rows.items() for row in range(count)]
    assert sorted(texts) == sorted(wanted), f"done with {sorted(texts)}"


def process(kind: Kind, output: Path, touched: str) -> str:
    """What all readers say of an output with a damaged record, the first that finds fault."""
    config = world().config(kind.of, output, world().root / ("partly" if kind.of == "failing" else "in"))
    run_output = output / GENERATION if kind.of == "set" else output

    def job() -> None:
        if isinstance(config, DatasetConfig):
            generate_dataset(config, BACKEND)
        else:
            run_job(config, BACKEND)
        check_rows(run_output, ROWS)

    def plan() -> None:
        forecast_run(config.model_copy(update={"incremental": False, "output": str(run_output)}), BACKEND)

    found = []
    for read in (lambda: look_at(run_output), plan, job, job):
        try:
            read()
        except (JobError, ModelError, ScheduleError, UnitsFailed) as error:
            if os.environ.get("SHOW"):
                print(repr(error))
            said = sentence(error)
            if isinstance(error, RecordDamaged) and touched not in said:
                raise AssertionError(f"{touched} is not named: {said}") from error
            if not isinstance(error, UnitsFailed) or kind.of != "failing":
                found.append(said)
    return next(iter(found), "")


def trial(seed: int) -> tuple[str, Callable[[], str]]:
    draw = random.Random(seed)
    name = ALL[seed % len(ALL)]
    folder = Path(tempfile.mkdtemp(dir=world().root))
    if name in PARTS:
        said, read = PARTS[name](draw, folder, world().canary)
    else:
        kind, output = KINDS[name], folder / "out"
        shutil.copytree(world().root / kind.of, output)
        said, read = damage(draw, kind, output), lambda: process(kind, output, Path(kind.glob).parts[0].split("*")[0])

    def read_it() -> str:
        before = state(world().root / "in") | state(world().root / "done")
        try:
            return read()
        finally:
            assert world().canary.read_text() == "{}", "what is outside of the output was changed"
            assert state(world().root / "in") | state(world().root / "done") == before, "another's files were changed"
            shutil.rmtree(folder)

    return f"{name}, {said}", read_it


if __name__ == "__main__":
    patch, nowhere = pytest.MonkeyPatch(), open(os.devnull, "w")  # noqa: SIM115
    without_ray(patch)
    patch.setattr(lease, "LEASE_S", 0.0)  # what a dead job holds is taken over at once
    for module in (report, schedule_maps):
        patch.setattr(module, "to_svg", lambda figure: "")  # drawing takes a second
    for module in (inspect_run, job_output):
        patch.setattr(module, "Console", lambda: Console(file=nowhere))
    try:
        run(trial)
    finally:
        shutil.rmtree(world().root)
