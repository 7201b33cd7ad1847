"""The demo's schedules: made for the packaged model, and worth their bridges and their training."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from engine import Engine, Sampling, Schedule, describe, model_identity
from engine.forward.quality import Judge
from engine.forward.teacher_forcing import Answer
from jobs.calibrate_schedule import MAPS_FILE
from pipeline.config import GenerationConfig
from pipeline.preparing.fit import choose_schedule
from pipeline.reporting.schedule_maps import schedule_maps
from tests.engine.prompts import sharing

DEMO = Path(__file__).parent.parent.parent / "infra" / "demo"
MODEL = "smollm2-135m-instruct"
TASK = "Summarize this software package in one short sentence.\n\n{text}"
TARGETS = [1.25, 1.45, 1.65, 2]


def answered(model: Engine, texts: list[str]) -> list[Answer]:
    """Full depth's answers to the demo's task on some texts."""
    prompts = [model.tokenizer.encode_chat(TASK.format(text=text)) for text in texts]
    return [Answer(prompts[g.index], g.tokens) for g in model.generate(prompts, Sampling(max_new_tokens=24))]


@pytest.mark.parametrize("target", TARGETS)
def test_each_was_made_for_the_packaged_model_and_reaches_its_target(target: float) -> None:
    config = GenerationConfig(schedule=str(DEMO / "calibrated"), target_speedup=target)
    schedule = choose_schedule(config, describe(MODEL))
    assert schedule.provenance["target_speedup"] == target
    assert schedule.provenance["decode_flop_speedup"] >= target
    assert schedule.provenance["calibrated_on"]["model"][:2] == [MODEL, model_identity(MODEL)]
    assert schedule.provenance["calibrated_on"]["part"] == "calibrate"


def test_the_demo_names_them() -> None:
    config = yaml.safe_load((DEMO / "summarize.yaml").read_text())
    assert config["schedule"] == "infra/demo/whole_sample_2x"
    assert (DEMO / "whole_sample_2x" / "bridges.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "saved", "agreement"), [("whole_sample_2x", 0.5, 0.75), ("whole_sample_1.5x", 1 - 1 / 1.5, 0.8)]
)
def test_where_prompts_run_fewer_layers_much_is_saved_and_most_tokens_stay(
    packaged: Engine, texts: list[str], name: str, saved: float, agreement: float
) -> None:
    schedule = Schedule.read(DEMO / name)
    assert schedule.provenance["sample_flop_speedup"] >= 1 / (1 - saved)
    assert schedule.provenance["adapted_on"]["part"] == "train"
    assert schedule.provenance["adapted_on"]["model"][:2] == [MODEL, model_identity(MODEL)]
    answers = answered(packaged, sorted(texts, key=len)[:16])
    instruction = GenerationConfig(prompt=TASK).template().shared_prefix(packaged.tokenizer)
    with sharing(packaged, instruction), torch.inference_mode():  # computed in full, as where it was trained
        judge = Judge(packaged.teacher_forced(answers))
        quality = judge.judge(schedule, packaged.compiled(schedule))
    assert quality.agreement > agreement


def test_at_half_of_the_compute_most_tokens_stay_and_without_the_bridges_few_do(
    packaged: Engine, texts: list[str]
) -> None:
    schedule = Schedule.read(DEMO / "calibrated" / "2x")
    answers = answered(packaged, sorted(texts, key=len)[:8])
    bare = replace(schedule, plateaus=tuple(p._replace(bridges=()) for p in schedule.plateaus), bridges={})
    with torch.inference_mode():
        judge = Judge(packaged.teacher_forced(answers))
        bridged = judge.judge(schedule, packaged.compiled(schedule))
        assert bridged.agreement > 0.6
        assert judge.judge(bare, packaged.compiled(bare)).agreement < 0.3


def test_training_on_other_prompts_has_brought_the_demos_texts_closer_at_the_same_flops(
    packaged: Engine, texts: list[str]
) -> None:
    calibrated, adapted = (Schedule.read(DEMO / where) for where in ("calibrated/1.65x", "adapted"))
    assert adapted.provenance["adapted_on"]["part"] == "train"
    assert adapted.provenance["adapted_on"]["model"][:2] == [MODEL, model_identity(MODEL)]
    assert (adapted.plateaus, adapted.skip_order) == (calibrated.plateaus, calibrated.skip_order)
    assert adapted.head_preview == calibrated.head_preview
    answers = answered(packaged, sorted(texts, key=len)[:16])
    with torch.inference_mode():
        judge = Judge(packaged.teacher_forced(answers))
        before, after = (judge.judge(each, packaged.compiled(each)).mean_kl for each in (calibrated, adapted))
    assert after < 0.85 * before


def test_the_figure_in_the_readme_shows_them() -> None:
    schedules = [(f"{target}x", Schedule.read(DEMO / "calibrated" / f"{target}x")) for target in TARGETS]
    assert (DEMO / "calibrated" / MAPS_FILE).read_text() == schedule_maps(schedules, 48)


def test_however_few_the_steps_are_no_half_of_one_is_on_the_axis() -> None:
    drawn = schedule_maps([("a schedule", Schedule.read(DEMO / where)) for where in ("whole_sample_2x", "adapted")], 3)
    assert "<!-- 2 -->" in drawn  # each text is drawn below a comment of it
    assert not re.search(r"<!-- \d+\.\d+ -->", drawn)


def test_what_prompts_run_is_drawn_where_a_schedule_changes_it() -> None:
    """An image of the steps, and one of prompts: beside others for those that run all layers on prompts too."""
    plain, bridged = (Schedule.read(DEMO / where) for where in ("calibrated/1.45x", "whole_sample_2x"))
    for named, images in (([plain], 1), ([bridged], 2), ([plain, bridged], 4)):
        drawn = schedule_maps([("a schedule", schedule) for schedule in named], 48)
        assert (drawn.count("<image"), "prompts" in drawn) == (images, images > 1)
