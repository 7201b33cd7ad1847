"""Figures of the pipeline at scale, on an engine double: throughput, planning, driver memory, resuming.

python tests/pipeline/scale.py --rows 10000000 --units 2000 --commits 100000
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from engine_double import ByteTokenizer, Echo, EchoBackend, NoEngineBackend
from servers import BUCKET, S3Server

from pipeline.commits.commit import COMMITS, SNAPSHOT_EVERY, SUCCESS_FILE, commit_unit, read_commits, write_snapshot
from pipeline.config import JobConfig
from pipeline.inputs.work import make_plan
from pipeline.preparing.fit import choose_schedule
from pipeline.preparing.run_record import claim_output, describe_run
from pipeline.rows.row_generator import RowGenerator
from pipeline.rows.rows import generate, prepare
from pipeline.rows.template import PromptTemplate
from pipeline.run import run_job
from pipeline.storage.storage import Storage

FILES = 20
MB = 1 << 20
TEMPLATE = PromptTemplate("{text}", format="raw")


class DriverMemory:
    """Private memory of this process, sampled every half second."""

    def __init__(self) -> None:
        self.samples: list[float] = []  # in MB
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        process = psutil.Process()
        while True:
            memory = process.memory_info()
            self.samples.append((memory.rss - memory.shared) / MB)
            time.sleep(0.5)


def throughput(folder: Path, rows: int, units: int) -> dict[str, Any]:
    """A whole run: read -> generate (double) -> write -> commit."""
    per_file = rows // FILES
    for file in range(FILES):
        (folder / "in").mkdir(exist_ok=True)
        text = pa.array([f"row {row}" for row in range(per_file)])
        pq.write_table(pa.table({"text": text}), folder / f"in/{file:02d}.parquet", row_group_size=50_000)
        del text
    config = JobConfig(
        input=str(folder / "in"),
        output=str(folder / "out"),
        prompt_format="raw",
        max_new_tokens=8,
        rows_per_unit=rows // units,
        batch_size=rows // units,
        replicas=1,
        ray_address="local",
    )
    start = time.monotonic()
    planned = make_plan(config, TEMPLATE)
    planning = time.monotonic() - start
    memory = DriverMemory()
    result = run_job(config, EchoBackend())
    samples = memory.samples
    commits = read_commits(Storage(config.output))
    assert sum(commit.totals.rows for commit in commits) == planned.rows == result.totals.rows
    return {
        "rows": planned.rows,
        "units": len(commits),
        "planning_s": round(planning, 2),
        "run_s": round(result.seconds, 1),
        "rows_per_s": round(planned.rows / result.generating_seconds),
        "driver_mb_at_a_tenth": round(samples[len(samples) // 10]),
        "driver_mb_at_half": round(samples[len(samples) // 2]),
        "driver_mb_peak": round(max(samples)),
    }


def resuming(folder: Path, output: str, units: int) -> dict[str, Any]:
    """A run with nothing left to do but its manifest and report, from its listing to its end."""
    (folder / "in").mkdir(parents=True)
    pq.write_table(pa.table({"text": pa.array(["x"] * units)}), folder / "in/a.parquet")
    config = JobConfig(input=str(folder / "in"), output=output, prompt_format="raw", rows_per_unit=1)
    backend = NoEngineBackend()
    start = time.monotonic()
    plan = make_plan(config, TEMPLATE)
    planning = time.monotonic() - start
    schedule = choose_schedule(config, backend.shape(config))
    storage = config.output_storage()
    claim = claim_output(storage, describe_run(config, plan, schedule, backend.identity(config)))
    # One unit is really committed, and all the others have copies of its record.
    first = plan.units[0]
    prepared = prepare(pa.table({"text": ["x"]}), plan.kept, "text", TEMPLATE, ByteTokenizer(), 1)
    rows = generate(prepared, ["x"], RowGenerator(Echo(), config.sampling(), None, 1))
    commit = commit_unit(storage, first, rows, claim.run)
    commits = [replace(commit, unit=unit.id, start=unit.start) for unit in plan.units]
    storage.fs.pipe({storage.path(f"{COMMITS}/{copy.unit}.json"): copy.to_json() for copy in commits[1:]})
    # As a driver leaves it that was killed just before its next snapshot.
    write_snapshot(storage, commits[: 1 - SNAPSHOT_EVERY])
    memory = DriverMemory()
    start = time.monotonic()
    assert run_job(config, backend).rows_resumed == units
    seconds = time.monotonic() - start
    assert storage.read(SUCCESS_FILE) is not None
    return {
        "commits": units,
        "planning_s": round(planning, 2),
        "list_and_resume_s": round(seconds, 1),
        "driver_mb_peak": round(max(memory.samples)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--units", type=int, default=2_000)
    parser.add_argument("--commits", type=int, default=100_000)
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"  # for Ray's workers
    with tempfile.TemporaryDirectory(prefix="scale") as name:
        folder = Path(name)
        figures: dict[str, Any] = {}
        if given.commits:
            figures["resuming, local"] = resuming(folder / "local", str(folder / "local/out"), given.commits)
            print(json.dumps(figures, indent=1), flush=True)
            server = S3Server(folder / "s3")
            try:
                os.environ.update(server.environment)
                figures["resuming, S3"] = resuming(folder / "remote", f"s3://{BUCKET}/scale/out", given.commits)
                print(json.dumps(figures, indent=1), flush=True)
            finally:
                server.stop()
        if given.rows:
            figures["throughput"] = throughput(folder, given.rows, given.units)
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
