"""The evaluation job from its command line to its three files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine import Schedule, Tokenizer, Unit, checkpoint_directory, describe
from engine.schedules import recipes
from jobs import command_line, evaluate_schedule
from jobs.evaluate_schedule import (
    PROGRAM,
    EvaluateSchedule,
    evaluate,
    read_contenders,
    read_prompts,
    told_apart,
    warn_of_another_report,
    warn_of_seen_rows,
    with_reference_column,
)
from pipeline.errors import JobError
from pipeline.evaluation.contender import Contender

CORPUS = "infra/demo/package_descriptions.parquet"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["evaluate_schedule.py", *arguments])
    return command_line.start(EvaluateSchedule, PROGRAM, evaluate)


@pytest.fixture
def judging(cores: int) -> Callable[[Path, Path], list[str]]:
    """Arguments that judge schedules on the demo's texts, in a few tokens each, into a directory."""
    common = ["--input", CORPUS, "--id-column", "id", "--part", "all", "--max-new-tokens", "6"]
    return lambda schedules, out: [
        *common, "--threads", str(cores), "--schedules", str(schedules), "--output", str(out),
    ]  # fmt: skip


@pytest.fixture
def schedules(tmp_path: Path) -> Path:
    """A directory of two targets, as calibrating writes."""
    for target, active in ((1.1, 26), (1.6, 14)):
        recipe = recipes.skipdecode(30, warmup=4, max_active=active, min_active=active, horizon=1)
        described = recipe.to_dict() | {"name": "plain", "target_speedup": target}
        directory = tmp_path / "calibrated" / f"{target}x"
        directory.mkdir(parents=True)
        (directory / "schedule.json").write_text(json.dumps(described))
    return tmp_path / "calibrated"


def test_a_rerun_extends_what_is_there_and_the_report_stands_alone(
    tmp_path: Path,
    schedules: Path,
    judging: Callable[[Path, Path], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    arguments = [*judging(schedules, out), "--rows", "4", "--batch-size", "2"]
    assert run(monkeypatch, *arguments) == 0
    assert "plain, 1.6x" in capsys.readouterr().out
    computed = {file: file.stat().st_mtime_ns for file in (out / "work").rglob("*.parquet")}
    assert len(computed) == 3 * 2  # contenders, batches
    rivals = ["--rivals", "early-termination", "--target-speedups", "1.6", "--calibration-rows", "2"]
    assert run(monkeypatch, *arguments, *rivals) == 0
    assert {file: file.stat().st_mtime_ns for file in computed} == computed
    results = json.loads((out / "figures.json").read_text())
    labels = [each["label"] for each in results["contenders"]]
    assert labels == ["full depth", "plain, 1.1x", "plain, 1.6x", "early termination, 1.6x"]
    assert all(each["rows"] == 4 for each in results["contenders"])
    value, low, high = results["contenders"][1]["share_of_full_depth"]["rouge_l"]
    assert low <= value <= high
    value, low, high = results["contenders"][2]["excess_nll"]
    assert 0 < low <= value <= high
    table = pq.read_table(out / "outputs.parquet")
    assert table.num_rows == 4 * 4
    assert {"nll", "repetition", "unsupported"} <= set(table.column_names)
    assert set(table["contender"].to_pylist()) == set(labels)
    rival = Schedule.read(out / "rivals" / "early-termination-1.6x")  # to run, or to adapt
    assert rival.skipped_units(0) >= {Unit("a", 29), Unit("m", 29)}
    assert rival.provenance["name"] == "early termination, 1.6x"
    html = (out / "report.html").read_text()
    assert html.count("<svg") == 4
    assert "plain, 1.6x" in html
    for outside in ("<script", "<link", "src=", "url(http", "@import"):
        assert outside not in html


def test_another_precision_is_another_study(
    tmp_path: Path,
    schedules: Path,
    judging: Callable[[Path, Path], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Else what one computed would be shown as the other's, or beside it."""
    arguments = [*judging(schedules / "1.6x", tmp_path / "out"), "--rows", "2"]
    for dtype in ("float32", "bfloat16"):
        assert run(monkeypatch, *arguments, "--dtype", dtype) == 0
    assert len(list((tmp_path / "out" / "work").rglob("*.parquet"))) == 2 * 2  # contenders, precisions


def test_two_schedules_of_one_name_are_told_apart_by_where_they_lie(tmp_path: Path, schedules: Path) -> None:
    other = tmp_path / "again"
    Schedule.read(schedules / "1.6x").write(other)
    found = read_contenders([str(schedules), str(other)], describe("smollm2-135m-instruct"))
    names = [f"plain ({path}), 1.6x" for path in (schedules / "1.6x", other)]
    assert [each.label for each in found] == ["plain, 1.1x", *names]


def test_a_schedule_for_whole_samples_is_called_by_what_they_gain_whatever_decoding_does(tmp_path: Path) -> None:
    made = {"name": "bridged, adapted, 1x", "target_speedup": 1.0, "target_sample_speedup": 1.4}
    Schedule(30, provenance=made).write(tmp_path / "1.4x")
    [contender] = read_contenders([str(tmp_path)], describe("smollm2-135m-instruct"))
    assert contender.label == "bridged, adapted, 1.4x of whole samples"
    again = [str(tmp_path), f"{tmp_path}/1.4x", f"{tmp_path}/1.4x/schedule.json"]
    assert read_contenders(again, describe("smollm2-135m-instruct")) == [contender], "judged once"


def test_a_schedule_without_a_name_is_called_as_its_file_or_directory(tmp_path: Path) -> None:
    shape = describe("smollm2-135m-instruct")
    recipe = recipes.skipdecode(shape.layers, warmup=4, max_active=26, min_active=26, horizon=1)
    schedule = replace(recipe, provenance={})
    for folder in ("1.65x", "deeper"):
        schedule.write(tmp_path / folder)
    file = tmp_path / "by.hand.json"
    file.write_text(schedule.to_json())
    found = read_contenders([f"{tmp_path}/1.65x", f"{tmp_path}/deeper/", str(file)], shape)
    assert [each.label for each in found] == ["1.65x", "deeper", "by.hand"]


def test_schedules_are_read_by_url_too(schedules: Path) -> None:
    config = EvaluateSchedule(input="in", output=Path("out"), schedules=["memory://evaluated/calibrated"])
    fsspec.filesystem("memory").put(f"{schedules}/", "/evaluated/calibrated", recursive=True)
    found = read_contenders(config.schedules, describe("smollm2-135m-instruct"), config)
    assert [each.label for each in found] == ["plain, 1.1x", "plain, 1.6x"]


@pytest.mark.parametrize(
    ("named", "columns", "taken"),
    [
        (None, ["text", "reference"], "reference"),
        (None, ["text"], ""),
        ("", ["text", "reference"], ""),
        ("summary", ["text", "summary"], "summary"),
    ],
)
def test_references_are_taken_where_the_input_has_them(
    tmp_path: Path, named: str | None, columns: list[str], taken: str
) -> None:
    pq.write_table(pa.table({name: ["a"] for name in columns}), tmp_path / "in.parquet")
    config = EvaluateSchedule(
        input=str(tmp_path / "in.parquet"), output=tmp_path / "out", rivals=["all"], reference_column=named
    )
    assert with_reference_column(config).reference_column == taken


def test_prompts_that_are_alike_are_told_for_intervals_take_them_for_different_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pq.write_table(pa.table({"text": ["a", "b", "a", "a"]}), tmp_path / "in.parquet")
    given = {"input": str(tmp_path / "in.parquet"), "output": tmp_path / "out", "rivals": ["all"], "part": "all"}
    config = EvaluateSchedule(**given, model="smollm2-135m-instruct")
    tokenizer = Tokenizer(checkpoint_directory(config.model))
    assert len(read_prompts(config, "all", 4, tokenizer, describe(config.model))) == 4
    assert "2 of the prompts are others once more: intervals are narrower than they should be" in caplog.messages


def test_what_an_earlier_report_had_that_its_successor_has_not_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, config = tmp_path / "figures.json", {"rows": 10, "max_new_tokens": 8, "seed": 0}
    warn_of_another_report(file, config, [])
    for content in ("{", "[]", json.dumps({"config": config, "contenders": [{"label": "full depth"}]})):
        file.write_text(content)
        warn_of_another_report(file, config | {"rows": 20}, ["full depth", "ours, 2x"])
    assert caplog.messages == []
    file.write_text(json.dumps({"config": config, "contenders": [{"label": "ours, 2x"}, {"label": "full depth"}]}))
    warn_of_another_report(file, config | {"max_new_tokens": 9}, ["full depth"])
    assert caplog.messages == [
        "the report of an earlier call is replaced (other max_new_tokens, 'ours, 2x' is not in it); its outputs stay"
    ]
    warn_of_another_report(file, config | {"id_column": "id"}, ["full depth", "ours, 2x"])  # there was none
    assert caplog.messages[1:] == ["the report of an earlier call is replaced (other id_column); its outputs stay"]


def test_a_reference_has_its_broken_bytes_replaced_and_a_null_is_none(tmp_path: Path) -> None:
    offsets, content = pa.array([0, 2, 5, 5], pa.int32()), b"ok\xff\xfed"
    broken = pa.StringArray.from_buffers(3, offsets.buffers()[1], pa.py_buffer(content))
    references = pa.chunked_array([broken, pa.array([None], pa.string())])
    pq.write_table(pa.table({"text": ["a", "b", "c", "d"], "reference": references}), tmp_path / "in.parquet")
    given = {"input": str(tmp_path / "in.parquet"), "output": tmp_path / "out", "rivals": ["all"], "part": "all"}
    config = with_reference_column(EvaluateSchedule(**given, model="smollm2-135m-instruct"))
    tokenizer = Tokenizer(checkpoint_directory(config.model))
    prompts = read_prompts(config, "all", 4, tokenizer, describe(config.model))
    assert {each.text: each.reference for each in prompts} == {"a": "ok", "b": "\ufffd\ufffdd", "c": "", "d": ""}


def test_a_reference_column_holds_text(tmp_path: Path) -> None:
    numbers = pa.table({"text": ["a", "b"], "reference": [12345, 12346]})
    pq.write_table(numbers, tmp_path / "in.parquet")
    given = {"input": str(tmp_path / "in.parquet"), "output": tmp_path / "out", "rivals": ["all"]}
    assert with_reference_column(EvaluateSchedule(**given)).reference_column == ""
    with pytest.raises(JobError, match=r"^column 'reference' is int64, not string: name a column of reference"):
        with_reference_column(EvaluateSchedule(**given, reference_column="reference"))


def test_schedules_are_judged_with_shorter_prompts_too(
    tmp_path: Path,
    schedules: Path,
    judging: Callable[[Path, Path], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    more = ["--rows", "2", "--prompt-layers", "24", "20", "--bridge-rows", "20"]
    assert run(monkeypatch, *judging(schedules, out), *more) == 0
    found = {each["label"]: each for each in json.loads((out / "figures.json").read_text())["contenders"]}
    assert found.keys() == {
        f"{name}{prompts}{target}"
        for name, targets in (("full depth", [""]), ("plain", [", 1.1x", ", 1.6x"]))
        for prompts in ("", ", 24 layers on prompts", ", 20 layers on prompts")
        for target in targets
    }
    speedups = [found[f"full depth{prompts}"]["sample_flop_speedup"][0]
                for prompts in ("", ", 24 layers on prompts", ", 20 layers on prompts")]  # fmt: skip
    assert speedups[0] == 1
    assert speedups == sorted(set(speedups))
    assert found["full depth, 24 layers on prompts"]["decode_flop_speedup"][0] == 1
    html = (out / "report.html").read_text()
    assert "Savings in prompts and in decoding" in html
    for each in found.values():  # a cell of the map each, full depth's own among them
        assert f"<!-- {each['sample_flop_speedup'][0]:.2f}x -->" in html
    assert html.count("<svg") == 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name something to judge"),
        (["--rivals", "magic"], "rival 'magic' is not known: known are skipdecode"),
        (
            ["--rivals", "all", "--target-speedups", "0.5"],
            "--target-speedups Input should be greater than 1",
        ),
        (["--rivals", "all", "--target-speedups", "nan"], "should be a finite number"),
        (["--rivals", "all", "--target-sample-speedup", "inf"], "should be a finite number"),
        (["--rivals", "all", "--reference-column", "summary"], "full depth's outputs alone (--reference-column '')"),
        (["--prompt-layers", "30"], "prompts can run 1 to 29 of this model's layers, not 30"),
        (["--schedules", "nowhere.json"], "'nowhere.json' cannot be read"),
        (["--schedules", "infra"], "'infra' holds no schedule.json"),
        (["--rivals", "all", "--text-column", "body"], "body"),
        (["--rivals", "all", "--target-speedups"], "at least 1 item"),
        (["--rivals", "all", "--prompt", "Summarize."], "has no {text} field"),
    ],
)
def test_a_mistake_is_one_line_before_any_model_is_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(evaluate_schedule.Engine, "load", lambda *_: pytest.fail("a model was loaded"))
    given = ["--input", CORPUS, "--output", str(tmp_path / "out"), *arguments]
    try:
        code = run(monkeypatch, *given)
    except SystemExit as exit_:
        code = int(str(exit_.code))
    assert code in (1, 2)
    errors = [line for line in capsys.readouterr().err.splitlines() if ": error: " in line]
    assert len(errors) == 1
    assert said in errors[0]


@pytest.mark.parametrize(
    ("part", "given", "is_warned"),
    [
        ("calibrate", {"rivals": ["early-termination"], "target_speedups": [1.3]}, True),
        ("all", {"prompt_layers": [12]}, True),
        ("calibrate", {"schedules": ["x"]}, False),
        ("test", {"rivals": ["early-termination"], "target_speedups": [1.3]}, False),
    ],
)
def test_rivals_and_bridges_that_are_judged_on_rows_they_are_made_from_are_named(
    part: str, given: dict[str, Any], is_warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = EvaluateSchedule(input=CORPUS, output=str(tmp_path), part=part, **given)  # type: ignore[arg-type]
    warn_of_seen_rows(config, [])
    said = f"rivals and bridges are made from the calibrate part, and judged on the {part} part"
    assert caplog.messages == [said] * is_warned


@pytest.mark.parametrize(
    ("made", "judged", "id_column", "is_warned"),
    [
        ({"part": "calibrate", "parted_by": "title"}, "test", None, True),
        ({"part": "calibrate", "parted_by": "id"}, "test", "id", False),
        ({"part": "calibrate", "parted_by": "id"}, "calibrate", "id", True),
        ({"part": "all", "parted_by": "id"}, "test", "id", True),
        ({"part": "calibrate", "parted_by": "id"}, "all", "id", True),
        ({"part": "calibrate", "parted_by": "sku"}, "test", "id", True),
        ({"part": "calibrate", "parted_by": "text"}, "test", None, False),
        ({"part": "calibrate", "parted_by": "id"}, "test", None, True),
    ],
)
@pytest.mark.parametrize("how", ["calibrated_on", "adapted_on", "adapted_before"])
def test_a_schedule_that_may_have_seen_what_it_is_judged_on_is_named(
    how: str, made: dict[str, str], judged: str, id_column: str | None, is_warned: bool, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    config = EvaluateSchedule(
        input=CORPUS, schedules=["x"], output=str(tmp_path), part=judged, id_column=id_column, rivals=[]
    )
    unseen = {"part": "train", "parted_by": id_column or "text"}
    record = {how: [unseen, made], "adapted_on": unseen} if how == "adapted_before" else {how: made}
    schedule = replace(recipes.skipdecode(30, 4, 14, 14, 1), provenance=record)
    warn_of_seen_rows(config, [Contender("one of ours", 1.6, schedule)])
    assert ("one of ours" in caplog.text) == is_warned


def test_rivals_and_targets_that_are_named_twice_are_judged_once(tmp_path: Path) -> None:
    given = {"rivals": ["unified-layer-skipping"] * 2, "target_speedups": [1.3, 1.2, 1.3]}
    config = EvaluateSchedule(input=CORPUS, output=str(tmp_path), **given)
    assert (config.rivals, config.target_speedups) == (["unified-layer-skipping"], [1.3, 1.2])


def test_what_is_called_alike_is_told_apart_and_what_is_the_same_judged_once() -> None:
    named = Contender("bridged", 1.25, Schedule.full_depth(4))
    solved = Contender("bridged", 1.25, recipes.unified_layer_skipping(4, active=3), is_rival=True)
    found = told_apart([named, solved, replace(named, is_rival=True)])
    assert [each.label for each in found] == ["bridged, 1.25x", "bridged (fitted here), 1.25x"]
    assert [each.method for each in found] == [named.method, solved.method]
    third = replace(named, method=recipes.unified_layer_skipping(4, active=2))
    again = "bridged (fitted here) (fitted here), 1.25x"
    assert [each.label for each in told_apart([*found, third])] == [*(each.label for each in found), again]
