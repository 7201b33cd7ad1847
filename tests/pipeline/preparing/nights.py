"""What an incremental run has after some nights, told from generations that name night, file, version and row."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow.parquet as pq
from engine_double import Echo, EchoBackend

from pipeline.commits.commit import Commit, read_commits
from pipeline.inspection import inspect, verify
from pipeline.storage.storage import Storage

Put = Callable[..., None]
Move = Callable[[str, str], None]


def by(name: str) -> EchoBackend:
    """An engine whose generations begin with a name."""
    return EchoBackend(Echo(f"{name}: "))


def generations(output: str, leftovers: bool = False) -> list[str]:
    """What a reader finds through the manifest, sorted; no data lies beside it, unless there may be leftovers."""
    manifest = json.loads(Path(output, "_SUCCESS.json").read_text())
    files = [entry["file"] for entry in manifest["commits"]]
    assert leftovers or Storage(output).names("data") == sorted(files)
    rows = [row for file in files for row in pq.read_table(Path(output, file)).to_pylist()]
    assert manifest["totals"]["rows"] == manifest["input"]["rows"] == len(rows)
    found = inspect(Storage(output))
    assert (found.state, found.rows, found.replaced) == ("done", len(rows), [])
    assert verify(Storage(output), found) == []
    assert all(row["generation"].split(": ")[1] == row["text"] for row in rows)
    return sorted(row["generation"] for row in rows)


def in_order(output: str) -> list[Commit]:
    """The commits that a manifest lists, in its order."""
    commits = {commit.file: commit for commit in read_commits(Storage(output))}
    return [commits[entry["file"]] for entry in json.loads(Path(output, "_SUCCESS.json").read_text())["commits"]]


def texts(by: str, name: str, rows: int, version: str = "v1") -> list[str]:
    return [f"{by}: {name} {version} {row}" for row in range(rows)]


def everything(*parts: Sequence[str]) -> list[str]:
    return sorted(text for part in parts for text in part)


def snapshot(output: str) -> dict[Path, int]:
    """Every file of an output but the lease, with its time."""
    return {path: path.stat().st_mtime_ns for path in Path(output).rglob("*") if "_lease" not in path.parts}
