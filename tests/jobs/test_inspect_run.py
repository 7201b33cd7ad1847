"""What inspect_run says of an output in every state, and what --verify finds in a damaged one."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from jobs import command_line, inspect_run
from jobs.job_output import storage_flags
from pipeline.commits.commit import checksum, commit_unit, read_commits
from pipeline.commits.failed import record_failure
from pipeline.commits.manifest import write_success
from pipeline.preparing.run_record import claim_output
from pipeline.rows.rows import GENERATED
from pipeline.rows.unit import WorkUnit
from pipeline.storage.settings import StorageConfig
from pipeline.storage.storage import Storage

ROWS, PER_UNIT = 10, 4
UNITS = [WorkUnit(f"00000-{start:09d}", "in/a.parquet", start, min(PER_UNIT, ROWS - start)) for start in (0, 4, 8)]
RUN = {
    "model": ["m", "0", "float32"],
    "sampling": {},
    "version": "1",
    "input": {"rows": ROWS, "limit": ROWS},
    "schedule": {"layers": 30},
}
Inspect = Callable[..., tuple[int, str]]


@pytest.fixture
def output(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "out"))


@pytest.fixture
def commit(output: Storage) -> Callable[..., None]:
    """Commits units of an unfinished run, and finishes it if told to."""

    def run(*units: WorkUnit, finish: bool = False) -> None:
        claim = claim_output(output, RUN)
        output.write("_input/0.json", json.dumps({"files": {"a.parquet": ["", ROWS + 5]}}).encode())
        for unit in units:
            rows = [{"generation": "g", "finish_reason": "stop", "generated_tokens": 2, "mean_active_layers": 30.0}]
            table = pa.Table.from_pylist(rows * unit.generations, schema=GENERATED)
            commit_unit(output, unit, table, claim.run, {"seconds": 1.0})
        if finish:
            record = json.loads(output.read("_run.json") or b"")
            commits = read_commits(output)
            write_success(output, record, commits, commits[0].totals)

    return run


@pytest.fixture
def inspect(output: Storage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Inspect:
    """Exit code and everything said."""

    def run(*flags: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["inspect_run.py", output.url, *flags])
        code = inspect_run.main()
        said = capsys.readouterr()
        return code, " ".join((said.out + said.err).split())

    return run


def test_a_finished_run_is_done_and_verified(commit: Callable[..., None], inspect: Inspect) -> None:
    commit(*UNITS, finish=True)
    code, said = inspect("--verify")
    assert code == 0
    assert "out: done" in said
    assert "10 of 10 rows in 3 units" in said
    assert "verified: 3 files, 10 rows, each once" in said


def test_an_unfinished_run_says_how_far_it_is_and_how_to_go_on(commit: Callable[..., None], inspect: Inspect) -> None:
    commit(*UNITS[:2])
    code, said = inspect("--price-per-gpu-hour", "1800")
    assert code == 4
    assert "out: unfinished" in said
    assert "replica-hours │ 0.0006" in said
    assert "1.0000 at 1800 an hour" in said
    assert "8 of 10 rows in 2 units" in said
    assert "next: start the same job again: it resumes" in said


def test_failed_units_are_named_until_they_are_committed(
    output: Storage, commit: Callable[..., None], inspect: Inspect
) -> None:
    commit(*UNITS[:2])
    record_failure(output, UNITS[2], 3, "generate: ValueError: no")
    record_failure(output, UNITS[0], 3, "committed by a later session")
    code, said = inspect()
    assert code == 3
    assert "2 rows in 1 unit" in said
    assert "failed: 00000-000000008, rows 8 to 9 of in/a.parquet, 3 attempts: generate: ValueError: no" in said
    assert "later session" not in said


def test_a_run_that_was_stopped_is_to_go_on_whatever_failed_in_it(
    output: Storage, commit: Callable[..., None], inspect: Inspect
) -> None:
    commit(*UNITS[:1])
    record_failure(output, WorkUnit("00001-000000000", "in/b.parquet", 0, 0), 1, "read: no Parquet")
    record_failure(output, UNITS[1], 3, "generate: ValueError: no")
    code, said = inspect()
    assert code == 4
    assert "out: unfinished, and some units failed" in said
    assert (
        "start the same job again: it resumes and repeats nothing that is committed, and tries the failed units" in said
    )
    commit(UNITS[2])
    code, said = inspect()
    assert code == 3
    assert "out: incomplete: some units failed" in said
    assert "start the same job again: it tries only those" in said


def test_failed_rows_are_counted_as_committed_ones_are_with_all_their_samples(
    output: Storage, commit: Callable[..., None], inspect: Inspect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RUN, "sampling", {"samples_per_prompt": 4})
    commit(WorkUnit("00000-000000000", "in/a.parquet", 0, 2, 4))
    record_failure(output, WorkUnit("00000-000000002", "in/a.parquet", 2, 8, 4), 3, "no")
    code, said = inspect()
    assert code == 3
    assert "committed │ 8 of 40 rows in 1 unit" in said
    assert "failed │ 32 rows in 1 unit" in said
    assert "failed: 00000-000000002, rows 2 to 9 of in/a.parquet" in said


def test_a_file_that_became_unreadable_is_named_though_its_first_unit_is_committed(
    output: Storage, commit: Callable[..., None], inspect: Inspect
) -> None:
    commit(*UNITS)
    record_failure(output, WorkUnit(UNITS[0].id, UNITS[0].path, 0, 0), 1, "read: no permission")
    code, said = inspect()
    assert code == 3
    assert "failed: 00000-000000000, whole file in/a.parquet, 1 attempt: read: no permission" in said


def test_an_output_without_a_run_is_one_sentence(inspect: Inspect) -> None:
    code, said = inspect()
    assert code == 1
    assert said.startswith("inspect_run.py: error: ")
    assert "holds no run" in said


def test_of_a_data_set_the_run_behind_it_is_shown(
    commit: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], output: Storage
) -> None:
    commit(*UNITS, finish=True)
    data_set = Path(output.url).parent / "set"
    data_set.mkdir()
    Path(output.url).rename(data_set / "_generation")
    monkeypatch.setattr(sys, "argv", ["inspect_run.py", f"{data_set}/", "--verify"])
    assert inspect_run.main() == 4
    said, stopped = capsys.readouterr()
    assert "set/_generation: done" in said
    assert "verified: 3 files, 10 rows, each once" in " ".join(said.split())
    assert "set/': it is not published yet; start the same job again, which generates nothing anew" in stopped
    finished = (data_set / "_generation/_SUCCESS.json").rename(data_set.parent / "success.json")
    assert inspect_run.main() == 4, "of a run that is not finished nothing is published yet"
    assert "verified: 3 files, 10 rows, each once" in " ".join(capsys.readouterr().out.split())
    finished.rename(data_set / "_generation/_SUCCESS.json")
    success = json.loads((data_set / "_generation/_SUCCESS.json").read_text())
    made_of = {"run": success["fingerprint"], "commits": checksum(json.dumps(success["commits"]).encode())}
    (data_set / "_DATASET.json").write_text(json.dumps({**made_of, "rows": 0, "dropped": {}, "files": []}))
    assert inspect_run.main() == 0
    assert "set/_DATASET.json lists" in " ".join(capsys.readouterr().out.split())


def test_help_shows_that_the_output_is_named_without_a_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["inspect_run.py", "--help"])
    with pytest.raises(SystemExit):
        inspect_run.main()
    assert "usage: inspect_run.py [--config FILE] [OPTION ...] OUTPUT\n" in capsys.readouterr().out


def test_the_output_may_stand_in_a_configuration_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def parsed(*given: str) -> inspect_run.InspectRun:
        return command_line.parse(inspect_run.InspectRun, "inspect_run.py", given, positional="output")

    file = tmp_path / "job.yaml"
    file.write_text("output: out/a\n")
    assert parsed("--config", str(file)).output == "out/a"
    assert parsed("out/b", "--config", str(file)).output == "out/b"
    with pytest.raises(SystemExit):
        parsed()
    assert "error: OUTPUT is required\n" in capsys.readouterr().err


def test_every_kind_of_damage_is_found(output: Storage, commit: Callable[..., None], inspect: Inspect) -> None:
    commit(*UNITS, WorkUnit("00000-000000002", "in/a.parquet", 2, 4), finish=True)
    first, _, second, third = (output.path(commit.file) for commit in read_commits(output))
    content = Path(first).read_bytes()
    Path(first).write_bytes(content[:-1] + b"?")
    Path(second).unlink()
    manifest = json.loads(output.read("_SUCCESS.json") or b"")
    manifest["commits"] = manifest["commits"][:-1]
    output.write("_SUCCESS.json", json.dumps(manifest).encode())
    code, said = inspect("--verify")
    assert code == 1
    assert f"data/{Path(first).name} has changed" in said
    assert f"data/{Path(second).name} is missing" in said
    assert "rows 2 to 3 of 'in/a.parquet' are there twice" in said
    assert f"data/{Path(third).name} is not in the manifest" in said
    assert "the input has 10 rows, the output 14" in said


def test_a_damaged_file_is_named_with_the_commit_that_is_to_be_deleted(
    output: Storage, commit: Callable[..., None], inspect: Inspect
) -> None:
    commit(*UNITS, finish=True)
    lost = read_commits(output)[1]
    Path(output.path(lost.file)).unlink()
    code, said = inspect("--verify")
    assert code == 1
    assert f"damaged: {lost.file} is missing (its commit is _commits/{UNITS[1].id}.json)" in said
    assert "error: 1 damage in" in said


@pytest.mark.parametrize("of_an_earlier_version", [False, True])
def test_all_samples_of_all_rows_are_each_there_once(
    output: Storage, commit: Callable[..., None], inspect: Inspect, monkeypatch: pytest.MonkeyPatch,
    of_an_earlier_version: bool,
) -> None:  # fmt: skip
    """Once each sample had units of its own."""
    monkeypatch.setitem(RUN, "sampling", {"samples_per_prompt": 2})
    of_input = [(start, 5) for start in (0, 5)]
    units = [WorkUnit(f"00000-{start:09d}", "in/a.parquet", start, rows, 2) for start, rows in of_input]
    if of_an_earlier_version:
        units = [replace(unit, id=f"{unit.id}-00{sample}", samples=1) for unit in units for sample in range(2)]
    commit(*units, finish=True)
    code, said = inspect("--verify")
    assert code == 0, said
    assert f"verified: {len(units)} files, 20 rows, each once" in said
    Path(output.path(f"_commits/{units[0].id}.json")).unlink()
    code, said = inspect("--verify")
    assert code == 1
    assert "rows 0 to 4 of 'in/a.parquet' are missing" in said
    assert f"the input has 10 rows of 2 samples, the output {15 if of_an_earlier_version else 10}" in said


def test_a_gap_in_a_finished_run_is_found(commit: Callable[..., None], inspect: Inspect) -> None:
    commit(UNITS[0], UNITS[2], finish=True)
    code, said = inspect("--verify")
    assert code == 1
    assert "rows 4 to 7 of 'in/a.parquet' are missing" in said


def test_a_job_says_how_to_look_at_its_output_where_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = StorageConfig(s3_endpoint="http://store:9000", s3_path_style=True, storage_patience_s=5)
    monkeypatch.setattr(sys, "argv", ["inspect_run.py", "s3://b/out", *storage_flags(reached)])
    config = command_line.parse(inspect_run.InspectRun, "inspect_run.py", positional="output")
    own = {"output": "s3://b/out", "verify": False, "price_per_gpu_hour": None}
    assert config.model_dump() == {**reached.model_dump(), **own}
