"""Which schedule a configuration names: a file, a directory, the right one of several calibrated, or a plain one."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from servers import BUCKET, S3Server

from engine import Block, Bridge, ModelShape, Plateau, Schedule, ScheduleError
from engine.calibration.prompts import PromptCut, counted_prompt_bridge
from engine.parts.adapter import Adapter
from pipeline.config import GenerationConfig
from pipeline.errors import JobError
from pipeline.preparing.fit import choose_schedule, warn_of_another_model
from pipeline.storage.settings import StorageConfig

SHAPE = ModelShape("llama", 8, 16, 2, 1, 8, 50, 512, 900, 2000, 800)


def calibrated(skipped: int, speedup: float) -> Schedule:
    block = Block.of_layers(2, 2 + skipped)
    bridge = Bridge.affine(block, torch.full((16, 16), 0.1 * skipped), torch.zeros(16))
    plateaus = (Plateau(0, 2 * skipped, ("b",)),)
    return Schedule(8, block.units, plateaus, {"decode_flop_speedup": speedup}, {"b": bridge})


@pytest.fixture
def directory(tmp_path: Path) -> str:
    """Two calibrated schedules."""
    calibrated(2, 1.27).write(tmp_path / "1.25x")
    calibrated(4, 1.66).write(tmp_path / "1.65x")
    return str(tmp_path)


@pytest.mark.parametrize(("target", "skipped"), [(1.1, 2), (1.27, 2), (1.3, 4), (1.66, 4)])
def test_of_several_the_one_that_just_reaches_the_target(directory: str, target: float, skipped: int) -> None:
    schedule = choose_schedule(GenerationConfig(schedule=directory, target_speedup=target), SHAPE)
    assert schedule == calibrated(skipped, 0)


def test_what_cannot_be_chosen_is_said_with_what_there_is(directory: str) -> None:
    with pytest.raises(ScheduleError, match=r"holds no schedule of 2x, only 1\.27x, 1\.66x"):
        choose_schedule(GenerationConfig(schedule=directory, target_speedup=2), SHAPE)
    with pytest.raises(ScheduleError, match=r"choose one with target_speedup, among 1\.27x, 1\.66x"):
        choose_schedule(GenerationConfig(schedule=directory), SHAPE)


def test_what_is_offered_may_be_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the figures are rounded to."""
    caplog.set_level("INFO")
    made = {1.65: 1.6558, 1.45: 1.4479}
    for skipped, (target, speedup) in enumerate(made.items(), start=3):
        said = {"decode_flop_speedup": speedup, "target_speedup": target}
        replace(calibrated(skipped, speedup), provenance=said).write(tmp_path / f"{target}x")
    calibrated(2, 1.2678).write(tmp_path / "other")  # made for nobody knows what
    with pytest.raises(ScheduleError, match=r"among 1\.26x, 1\.45x, 1\.65x$"):
        choose_schedule(GenerationConfig(schedule=str(tmp_path)), SHAPE)
    for target, skipped in ((1.26, 2), (1.65, 3), (1.45, 4)):
        chosen = choose_schedule(GenerationConfig(schedule=str(tmp_path), target_speedup=target), SHAPE)
        assert chosen == calibrated(skipped, 0)
    assert "the schedule other, of 1.27x, is the slowest that reaches 1.26x" in caplog.messages


def test_schedules_that_do_not_say_how_fast_they_are_are_named_one_by_one(tmp_path: Path) -> None:
    for name in ("skipdecode", "unified"):
        replace(calibrated(2, 1.27), provenance={}).write(tmp_path / name)
    for target in (None, 1.5):
        with pytest.raises(ScheduleError, match="do not say how fast they are: name one of them"):
            choose_schedule(GenerationConfig(schedule=str(tmp_path), target_speedup=target), SHAPE)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ScheduleError, match=r"holds no schedule\.json, nor does a directory in it"):
        choose_schedule(GenerationConfig(schedule=str(tmp_path / "empty")), SHAPE)


def test_of_schedules_for_the_whole_sample_and_others_none_is_chosen(directory: str) -> None:
    figures = {"decode_flop_speedup": 1.2, "sample_flop_speedup": 1.51, "target_sample_speedup": 1.5}
    replace(calibrated(3, 1.2), provenance=figures).write(f"{directory}/1.5x")
    for target, why in ((None, ""), (1.5, "target_speedup could mean either, so ")):
        with pytest.raises(ScheduleError, match=rf"cheaper \(1\.5x\) and others: {why}name one of them"):
            choose_schedule(GenerationConfig(schedule=directory, target_speedup=target), SHAPE)


def test_one_schedule_leaves_nothing_to_choose(directory: str) -> None:
    one = f"{directory}/1.65x"
    assert choose_schedule(GenerationConfig(schedule=one), SHAPE) == calibrated(4, 0)
    assert choose_schedule(GenerationConfig(schedule=f"{one}/schedule.json"), SHAPE) == calibrated(4, 0)
    with pytest.raises(ScheduleError, match="is one schedule"):
        choose_schedule(GenerationConfig(schedule=one, target_speedup=1.5), SHAPE)


@pytest.mark.usefixtures("credentials")
def test_schedules_are_read_from_object_storage(directory: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their bridges and adapter: all of them, one, or its file."""
    adapter = Adapter({"a3.q.down": torch.ones(16, 1), "a3.q.up": torch.ones(1, 16)})
    whole = replace(calibrated(4, 1.66), adapter=adapter)
    whole.write(Path(directory) / "1.65x")
    s3.files.put(directory, f"{BUCKET}/schedules", recursive=True)
    url = f"s3://{BUCKET}/schedules"
    storage = StorageConfig(storage_patience_s=5)
    for config in (
        GenerationConfig(schedule=url, target_speedup=1.5),
        GenerationConfig(schedule=f"{url}/1.65x"),
        GenerationConfig(schedule=f"{url}/1.65x/schedule.json"),
    ):
        assert choose_schedule(config, SHAPE, storage) == whole
    with pytest.raises(ScheduleError, match=r"s3://corpus/schedules' holds no schedule of 2x"):
        choose_schedule(GenerationConfig(schedule=url, target_speedup=2), SHAPE, storage)
    with pytest.raises(ScheduleError, match=r"s3://corpus/nothing.* cannot be read"):
        choose_schedule(GenerationConfig(schedule=f"s3://{BUCKET}/nothing"), SHAPE, storage)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not the right one")
    with pytest.raises(JobError, match="refuses reading"):
        choose_schedule(GenerationConfig(schedule=url), SHAPE, StorageConfig(s3_path_style=True))


@pytest.mark.parametrize(("target", "skipped"), [(1.3, 2), (1.6, 4)])
def test_where_prompts_skip_too_the_target_is_of_the_whole_sample(tmp_path: Path, target: float, skipped: int) -> None:
    """Whatever they were made by: decoding alone is the smaller part of what they save."""
    bridge = counted_prompt_bridge(SHAPE, PromptCut(6, range(2, 3), keeps_skipped=False))
    for name, layers, sample in (("some", 2, 1.4), ("more", 4, 1.7)):
        provenance = {"decode_flop_speedup": 1.1, "sample_flop_speedup": sample}
        replace(calibrated(layers, 0), prompt_bridge=bridge, provenance=provenance).write(tmp_path / name)
    chosen = choose_schedule(GenerationConfig(schedule=str(tmp_path), target_speedup=target), SHAPE)
    assert chosen == replace(calibrated(skipped, 0), prompt_bridge=bridge)


def test_a_schedule_made_for_another_model_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    made = {"model": ["owner/small", "abc", "auto"], "prompts": 5}
    schedule = replace(calibrated(2, 1.27), provenance={"calibrated_on": made})
    for model, identity in (("owner/small", "abc"), ("elsewhere/small", "abc")):
        warn_of_another_model(schedule, model, identity)
    for unknown in ({}, {"calibrated_on": {"model": "owner/small"}}, {"adapted_on": [1]}):
        warn_of_another_model(replace(schedule, provenance=unknown), "owner/large", "def")
    trained = {"calibrated_on": made, "adapted_on": {"model": ["owner/large", "def", "auto"]}}
    warn_of_another_model(replace(schedule, provenance=trained), "owner/large", "def")
    assert not caplog.records
    warn_of_another_model(schedule, "owner/large", "def")
    [record] = caplog.records
    assert "made for the model owner/small, and owner/large is another one" in record.message


def test_a_directory_without_a_schedule(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="cannot be read"):
        choose_schedule(GenerationConfig(schedule=str(tmp_path), target_speedup=1.5), SHAPE)


def test_a_name_too_long_for_a_file_is_no_schedule() -> None:
    with pytest.raises(ScheduleError, match="cannot be read"):
        choose_schedule(GenerationConfig(schedule="a" * 300), SHAPE)


def test_bridges_for_another_width_are_refused(directory: str) -> None:
    wider = ModelShape("llama", 8, 32, 2, 1, 8, 50, 512, 900, 2000, 800)
    with pytest.raises(ScheduleError, match=r"width 16, but .* width 32"):
        choose_schedule(GenerationConfig(schedule=f"{directory}/1.25x"), wider)


def test_a_plain_schedule_comes_with_advice(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert choose_schedule(GenerationConfig(), SHAPE).is_full_depth
    assert not caplog.messages
    assert not choose_schedule(GenerationConfig(target_speedup=1.1), SHAPE).is_full_depth
    [line] = caplog.messages
    assert "calibrate_schedule.py" in line
    assert "keeps far more quality" in line


def test_the_schedule_made_for_the_target_is_chosen_whatever_later_lengths_have_made_of_it(tmp_path: Path) -> None:
    for skipped, target, measured in ((2, 1.25, 1.24), (4, 1.65, 1.66)):
        provenance = {"target_speedup": target, "decode_flop_speedup": measured}
        replace(calibrated(skipped, 0), provenance=provenance).write(tmp_path / f"{target}x")
    chosen = choose_schedule(GenerationConfig(schedule=str(tmp_path), target_speedup=1.25), SHAPE)
    assert chosen == calibrated(2, 0)
