"""The proof of a fault trial: it finds each harm that it is to rule out."""

import io
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from counting_double import SIGNED
from inline_session import without_ray
from servers import BUCKET
from trial import NEW_TOKENS, Harmed, Trial

FOREIGN = "foreign files changed"

Rows = list[dict[str, Any]]


@pytest.fixture
def finished(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> Trial:
    """24 rows in two files, published in units of four, among files of others."""
    without_ray(monkeypatch)
    trial.lay_foreign_files(["out_notes"])
    trial.run()
    trial.lay_foreign_files(["out/data/notes.txt"])
    trial.check()
    return trial


def first_file(trial: Trial, change: Callable[[Rows], None]) -> None:
    """Change rows of what the manifest lists first."""
    files, root = trial.server.files, f"{BUCKET}/{trial.name}/out"
    path = f"{root}/{json.loads(files.cat_file(f'{root}/_SUCCESS.json'))['commits'][0]['file']}"
    table = pq.read_table(io.BytesIO(files.cat_file(path)))
    rows = table.to_pylist()
    change(rows)
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, table.schema), sink)
    files.pipe_file(path, sink.getvalue())


def manifest(trial: Trial, change: Callable[[list[Any]], None]) -> None:
    files, path = trial.server.files, f"{BUCKET}/{trial.name}/out/_SUCCESS.json"
    content = json.loads(files.cat_file(path))
    change(content["commits"])
    files.pipe_file(path, json.dumps(content).encode())


def set_generation(text: Callable[[int], str], rows_wrong: int) -> Callable[[Trial], None]:
    def change(rows: Rows) -> None:
        for row in rows[:rows_wrong]:
            row["generation"] = text(row["id"])[:NEW_TOKENS]

    return lambda trial: first_file(trial, change)


@pytest.mark.parametrize(
    ("damage", "harm", "count"),
    [
        (lambda trial: manifest(trial, lambda commits: commits.pop(2)), "rows lost", 4),
        (lambda trial: manifest(trial, lambda commits: commits.insert(1, commits[0])), "rows doubled", 4),
        (set_generation("{} of nobody".format, 3), "rows changed", 3),
        (set_generation("{} anew".format, 1), "rows mixed", 1),
        (set_generation((SIGNED + "1: {}").format, 2), "rows mixed", 2),
        (lambda trial: trial.server.files.rm_file(f"{BUCKET}/{trial.name}/out/data/notes.txt"), FOREIGN, 1),
        (lambda trial: trial.server.files.pipe_file(f"{BUCKET}/{trial.name}/out_notes", b"?"), FOREIGN, 1),
    ],
)
def test_what_is_wrong_with_an_output_is_found_and_counted(
    finished: Trial, damage: Callable[[Trial], None], harm: str, count: int
) -> None:
    damage(finished)
    with pytest.raises(Harmed) as found:
        finished.check()
    rows_and_files = {name: number for name, number in found.value.counts.items() if number and " " in name}
    assert rows_and_files.pop("stray files", 0) == (harm == "rows lost")
    assert rows_and_files == {harm: count}


def test_of_a_file_that_is_swapped_either_version_may_be_there_but_not_both(finished: Trial) -> None:
    set_generation("{} anew".format, 4)(finished)
    with pytest.raises(Harmed) as found:
        finished.check(of_any_version=True)
    assert found.value.counts["rows mixed"] == 4
    assert found.value.counts["rows changed"] == 0
