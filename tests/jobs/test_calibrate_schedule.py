"""The calibration job as its users start it, on a small random model with the packaged tokenizer."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from engine import Engine, Sampling, Schedule, ScheduleError, checkpoint_directory, describe
from engine.calibration.prompts import counted_prompt_bridge, prompt_cut
from engine.forward.target import sample_flop_speedup
from jobs import answers, calibrate_schedule, command_line
from pipeline.errors import JobError
from pipeline.preparing.fit import read_schedule
from pipeline.storage.ownership import claim_directory

ROOT = Path(__file__).parent.parent.parent
FLAGS = ["--part", "all", "--prompts", "40", "--max-new-tokens", "6", "--min-new-tokens", "3"]
CORPUS = "infra/demo/package_descriptions.parquet"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve layers of width 64: most of it is the vocabulary, so speed-ups are small."""
    directory = tmp_path_factory.mktemp("model")
    packaged = checkpoint_directory("smollm2-135m-instruct")
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    AutoTokenizer.from_pretrained(packaged).save_pretrained(directory)
    return directory


def calibrate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "jobs/calibrate_schedule.py", "--input", CORPUS, "--threads", "1", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


def configured(model: Path, output: Path, *arguments: str) -> calibrate_schedule.CalibrateSchedule:
    """For the job in this process."""
    given = ["--input", str(ROOT / CORPUS), "--model", str(model), "--output", str(output), "--threads", "1", *FLAGS]
    return command_line.parse(calibrate_schedule.CalibrateSchedule, calibrate_schedule.PROGRAM, [*given, *arguments])


@pytest.fixture(scope="module")
def calibrated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The job's output and what it said."""
    output = tmp_path_factory.mktemp("out") / "schedules"
    ended = calibrate("--model", str(model), "--output", str(output), *FLAGS, "--target-speedups", "1.02", "1.05")
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    return output, ended.stdout + ended.stderr


def test_each_target_gets_a_schedule_that_the_engine_runs(model: Path, calibrated: tuple[Path, str]) -> None:
    output, said = calibrated
    assert sorted(written.name for written in output.iterdir()) == [
        "1.02x", "1.05x", "_job.json", answers.ANSWERS_FILE, "schedules.svg",
    ]  # fmt: skip
    engine = Engine.load(str(model), device="cpu")
    for target in (1.02, 1.05):
        schedule = Schedule.read(output / f"{target}x")
        assert schedule.provenance["decode_flop_speedup"] >= target
        [generation] = engine.generate([[5, 6, 7]], Sampling(max_new_tokens=8, min_new_tokens=8), schedule)
        assert generation.flops_decode < generation.flops_decode_full_depth
        assert f"{schedule.provenance['decode_flop_speedup']:.3f}x" in said
    assert "on 6 held-out answers, teacher-forced" in said
    assert re.search(r"┃ agreement +┃", said), "whole, though this is no terminal"


def test_the_schedule_says_where_it_comes_from_and_what_to_expect(model: Path, calibrated: tuple[Path, str]) -> None:
    written = json.loads((calibrated[0] / "1.05x" / "schedule.json").read_text())
    made = written["calibrated_on"]
    assert made["model"][0] == str(model)
    assert made["prompts"] == 40
    assert len(made["prompts_digest"]) == 64
    assert written["sample_flop_speedup"] < written["decode_flop_speedup"]
    held_out = written["held_out"]
    assert held_out["tokens"] > held_out["answers"] == 6
    assert held_out["kl_interval"][0] <= held_out["kl"] <= held_out["kl_interval"][1]
    assert held_out["agreement_interval"][0] <= held_out["agreement"] <= held_out["agreement_interval"][1]


def test_prompts_may_be_bridged_too(model: Path, calibrated: tuple[Path, str], tmp_path: Path) -> None:
    flags = [*FLAGS, "--target-speedups", "1.05", "--prompt-layers", "9"]
    ended = calibrate("--model", str(model), "--output", str(tmp_path), *flags)
    assert ended.returncode == 0, ended.stderr
    plain, bridged = (Schedule.read(output / "1.05x") for output in (calibrated[0], tmp_path))
    assert plain.prompt_bridge is None
    assert bridged.prompt_bridge is not None
    assert bridged.prompt_bridge.layers == 9
    assert bridged.provenance["decode_flop_speedup"] == plain.provenance["decode_flop_speedup"]
    assert bridged.provenance["sample_flop_speedup"] > plain.provenance["sample_flop_speedup"]
    engine = Engine.load(str(model), device="cpu")
    [generation] = engine.generate([[5, 6, 7]], Sampling(max_new_tokens=2), bridged)
    [deeper] = engine.generate([[5, 6, 7]], Sampling(max_new_tokens=2), plain)
    assert generation.flops_prompt < deeper.flops_prompt


def test_a_whole_sample_target_is_met_by_both_savings(model: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, "--target-speedups", "1.02", "1.05", "--target-sample-speedups", "1.15", "1.4"]
    ended = calibrate("--model", str(model), "--output", str(tmp_path), *flags)
    assert ended.returncode == 0, ended.stderr
    mixes = re.findall(
        r"([\d.]+)x of the whole sample: ([\d.]+)x in decoding, skipped (.+), prompts in (\d+) layers: KL ([\d.]+)",
        ended.stderr,
    )
    # Prompts alone, and beside decoding that grows and at one depth, where that differs.
    assert [m for m in mixes if m[:2] == ("1.4", "1")]
    tried = {
        target: {decoding: [m[2] for m in mixes if m[:2] == (target, decoding)] for decoding in ("1.02", "1.05")}
        for target in ("1.15", "1.4")
    }
    assert all(
        1 <= len(set(skipped)) == len(skipped) <= 2
        for by_decoding in tried.values()
        for skipped in by_decoding.values()
    )
    less, more = (Schedule.read(tmp_path / name) for name in ("1.15x", "1.4x"))
    lengths = load_file(tmp_path / answers.ANSWERS_FILE)["lengths"].view(-1, 2).tolist()
    shape = describe(str(model))
    for schedule, target in ((less, 1.15), (more, 1.4)):
        assert target <= schedule.provenance["sample_flop_speedup"]
        assert schedule.prompt_bridge is not None
        # One layer more on prompts would not reach it.
        bare = replace(schedule, prompt_bridge=None)
        cut = prompt_cut(shape, schedule.prompt_bridge.layers + 1, [bare])
        counted = replace(bare, prompt_bridge=counted_prompt_bridge(shape, cut))
        shared = schedule.provenance["calibrated_on"]["shared_prefix_tokens"]
        assert sample_flop_speedup(shape, counted, lengths, shared) < target
        ours = schedule.provenance["target_speedup"], schedule.prompt_bridge.layers
        judged = [((float(m[1]), int(m[3])), float(m[4])) for m in mixes if m[0] == str(target)]
        assert min(kl for mix, kl in judged if mix == ours) <= min(kl for _, kl in judged) + 0.001
    assert less.prompt_bridge is not None
    assert more.prompt_bridge is not None
    assert less.prompt_bridge.layers > more.prompt_bridge.layers
    # A job's target is of the whole sample too.
    assert read_schedule(str(tmp_path), 1.3) == more
    with pytest.raises(ScheduleError, match=r"holds no schedule of 1\.9x"):
        read_schedule(str(tmp_path), 1.9)


def mistake(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What is said of flags that are refused at once."""
    with pytest.raises(SystemExit):
        configured(Path("m"), Path("y"), *flags)
    return capsys.readouterr().err


def test_layers_on_prompts_are_chosen_by_one_of_the_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert "leave out prompt_layers" in mistake(capsys, "--target-sample-speedups", "2", "--prompt-layers", "9")


@pytest.mark.parametrize("flag", ["--target-speedups", "--target-sample-speedups"])
@pytest.mark.parametrize("target", ["nan", "inf", "-3", "0.5", "1"])
def test_a_target_is_a_number_above_1(capsys: pytest.CaptureFixture[str], flag: str, target: str) -> None:
    assert f"error: {flag} Input should be" in mistake(capsys, flag, "1.5", target)


@pytest.mark.parametrize(("flag", "value"), [("--prompts", "19"), ("--max-new-tokens", "1")])
def test_less_than_calibration_needs_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    assert f"error: {flag} Input should be greater than or equal to" in mistake(capsys, flag, value)


def test_schedules_for_other_targets_are_not_left_among_the_new_ones(model: Path, tmp_path: Path) -> None:
    claim_directory(tmp_path, calibrate_schedule.PROGRAM)
    for name in ("1.5x", "40x"):
        Schedule.full_depth(12).write(tmp_path / name)

    def refusal(*targets: str) -> str:
        config = configured(model, tmp_path, *targets)
        with pytest.raises((JobError, ScheduleError)) as refused:
            calibrate_schedule.calibrate(config)
        return str(refused.value)

    assert "holds other schedules (1.5x)" in refusal("--target-speedups", "1.05", "40")
    assert "other schedules (1.5x, 40x)" in refusal("--target-speedups", "1.5", "40", "--target-sample-speedups", "1.1")
    assert "40x cannot be met" in refusal("--target-speedups", "1.5", "40")  # those may be written over


def test_a_schedule_from_other_answers_is_named_before_it_is_written_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = {"prompts": 500, "sampling": {"stop": ("END",)}}
    Schedule(4, provenance={"calibrated_on": made}).write(tmp_path / "1.25x")
    (tmp_path / "1.5x").mkdir()
    (tmp_path / "1.5x/schedule.json").write_text("{")
    for now in (made, made | {"prompts": 20}):
        calibrate_schedule.warn_of_others(tmp_path, ["1.25x", "1.5x", "2x"], now)
    assert caplog.messages == [
        f"the schedule in {tmp_path / '1.25x'}, calibrated on other answers, to 500 prompts, will be written over"
    ]


def test_a_rerun_answers_no_prompt_again_and_makes_the_same_schedules(
    model: Path, calibrated: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    output, _ = calibrated
    before = Schedule.read(output / "1.05x")
    config = configured(model, output, "--target-speedups", "1.02", "1.05")
    monkeypatch.setattr(answers, "answer_prompts", lambda *_: pytest.fail("prompts are answered"))
    calibrate_schedule.calibrate(config)
    after = Schedule.read(output / "1.05x")
    assert (after.skip_order, after.plateaus) == (before.skip_order, before.plateaus)
    assert "written over" not in caplog.text
    held_out, earlier = after.provenance["held_out"], before.provenance["held_out"]
    assert held_out["tokens"] == earlier["tokens"]
    assert held_out["kl"] == pytest.approx(earlier["kl"], rel=1e-3)


def test_progress_says_how_fast_it_goes(calibrated: tuple[Path, str]) -> None:
    assert "answering at full depth: 40 of 40" in calibrated[1]
    assert re.search(r"/s, \d:\d\d:\d\d left", calibrated[1])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--target-speedups", "1.02", "40"], "40x cannot be met"),
        (
            ["--id-column", "id", "--part", "test"],
            r"needs 20 prompts, and the test part of .* makes 1\d: give a larger",
        ),
        (["--text-column", "body"], "no column 'body'"),
    ],
)
def test_what_cannot_work_is_said_before_a_prompt_is_answered(
    model: Path, tmp_path: Path, flags: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "answer_prompts", lambda *_: pytest.fail("prompts were answered"))
    with pytest.raises((JobError, ScheduleError), match=said):
        calibrate_schedule.calibrate(configured(model, tmp_path, *flags))


def test_layers_on_prompts_that_the_model_has_not_are_said_before_it_is_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(ScheduleError, match="prompts can run 1 to 11 of this model's layers, not 12"):
        calibrate_schedule.calibrate(configured(model, tmp_path, "--prompt-layers", "12"))


def test_more_prompts_than_the_memory_holds_are_refused_before_one_is_answered(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "answer_prompts", lambda *_: pytest.fail("prompts were answered"))
    monkeypatch.setattr(calibrate_schedule, "free_bytes", lambda _: 1_000_000)
    with pytest.raises(ScheduleError, match=r"calibrating on 40 prompts keeps some .* works in alone does not fit"):
        calibrate_schedule.calibrate(configured(model, tmp_path, "--target-speedups", "1.02"))


def test_a_whole_sample_target_out_of_reach_is_said(model: Path, tmp_path: Path) -> None:
    config = configured(model, tmp_path, "--target-speedups", "1.02", "--target-sample-speedups", "90")
    with pytest.raises(ScheduleError, match=r"90x of the whole sample cannot be met with 1\.02x in"):
        calibrate_schedule.calibrate(config)


def test_targets_whose_directories_would_be_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    said = mistake(capsys, "--target-speedups", "1.25", "1.2500001")
    assert "two targets have the directory '1.25x'" in said
