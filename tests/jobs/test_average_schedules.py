"""Trained schedules are averaged from directories into one, which says what it has seen."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine import Schedule
from jobs import command_line
from jobs.average_schedules import PROGRAM, AverageSchedules, write_average
from pipeline.preparing.fit import made_from

DEMO = Path(__file__).parents[2] / "infra" / "demo"


def averaged(output: Path, *names: str | Path) -> int:
    schedules = [str(DEMO / name) for name in names]  # an absolute path stays what it is
    config = command_line.parse(AverageSchedules, PROGRAM, ["--schedules", *schedules, "--output", str(output)])
    return command_line.run(PROGRAM, lambda: write_average(config))


def test_the_mean_of_a_schedule_with_itself_saves_and_knows_the_same(tmp_path: Path) -> None:
    assert averaged(tmp_path / "mean", "adapted", "adapted") == 0
    before, mean = Schedule.read(DEMO / "adapted"), Schedule.read(tmp_path / "mean")
    assert mean.plateaus == before.plateaus
    assert mean.bridges == before.bridges
    assert mean.adapter is not None
    assert before.adapter is not None
    assert mean.adapter.rank == 2 * before.adapter.rank
    assert mean.provenance["averaged"] == 2
    assert mean.provenance["adapted_on"] == before.provenance["adapted_on"]
    assert mean.provenance["adapted_before"] == [before.provenance["adapted_on"]]
    assert "held_out" not in mean.provenance
    assert averaged(tmp_path / "mean", "adapted", "adapted") == 0, "its own output may be written again"


def test_schedules_that_skip_other_layers_are_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert averaged(tmp_path / "mean", "whole_sample_1.5x", "whole_sample_2x") == 1
    assert "schedule 2 is of another kind than the first, by its layers, " in capsys.readouterr().err
    assert not (tmp_path / "mean" / "schedule.json").exists()


def with_another(record: str, tmp_path: Path, **changes: object) -> Path:
    """The demo's schedule as trained or calibrated on something else."""
    adapted = Schedule.read(DEMO / "adapted")
    changed = dict(adapted.provenance[record]) | changes
    replace(adapted, provenance={**adapted.provenance, record: changed}).write(tmp_path / "other")
    return tmp_path / "other"


def test_trainings_of_different_models_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = with_another("adapted_on", tmp_path, model=["a-base-model", "0123", "float32"])
    assert averaged(tmp_path / "mean", "adapted", other) == 1
    assert (
        "different models, or versions of one: a-base-model (0123), smollm2-135m-instruct (b1f7339d)"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "mean" / "schedule.json").exists()


def test_what_the_others_were_calibrated_on_is_seen_too(tmp_path: Path) -> None:
    other = with_another("calibrated_on", tmp_path, part="test")
    assert averaged(tmp_path / "mean", "adapted", other) == 0
    mean = Schedule.read(tmp_path / "mean")
    assert [how for how, _ in made_from(mean.provenance, "test", "id")] == ["trained"]


def test_a_directory_of_several_is_refused_naming_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert averaged(tmp_path / "mean", "calibrated", "adapted") == 1
    said = capsys.readouterr().err
    assert "calibrated' holds several schedules (1.25x, 1.45x, 1.65x, 2x): name one of them" in said
