"""Calibrate, then adapt, then read the result, as a person does it, on a tiny model."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from ray.train import WorkerGroupError
from safetensors.torch import save_file

import engine
from engine import Block, Bridge, Engine, Plateau, Schedule, ScheduleError, describe
from engine.adaptation.curve import Point
from engine.forward.quality import Judge
from engine.forward.teacher_forcing import Answer
from engine.parts.part import digest_of
from engine.schedules import decays, orders
from jobs import adapt_model, adaptation, answers, calibrate_schedule, command_line
from jobs.adaptation import CHECKPOINT_FILE, AdaptModel, reason_of, settings_of, train_on_cluster, warn_of_seen_prompts
from jobs.answers import ANSWERS_FILE, answer_corpus, with_more_answers
from pipeline.errors import JobError, JobStopped
from pipeline.evaluation.charts import learning_curve
from pipeline.execution import cluster
from pipeline.preparing.fit import read_schedule
from pipeline.storage.ownership import CLAIM_FILE
from tests.engine.conftest import silent_bridge
from tests.engine.quiet import quiet

ROOT = Path(__file__).parents[2]
CORPUS = str(ROOT / "infra" / "demo" / "package_descriptions.parquet")
NOWHERE = ["--schedule", "", "--output", ""]  # of those who only want answers


@pytest.fixture(scope="module")
def common(make_checkpoint: Callable[..., Path]) -> list[str]:
    model = make_checkpoint(vocab_size=260, eos=259)  # no byte ends an answer
    return [
        *("--model", str(model), "--device", "cpu", "--input", CORPUS, "--prompt", "{text}", "--prompt-format", "raw"),
        *("--max-prompt-tokens", "40", "--max-new-tokens", "12", "--part", "all"),
    ]


def configured(arguments: list[str]) -> AdaptModel:
    return command_line.parse(AdaptModel, adapt_model.PROGRAM, arguments)


def adapt(arguments: list[str]) -> int:
    config = configured(arguments)
    return command_line.run(adapt_model.PROGRAM, lambda: adapt_model.adapt(config))


def calibrate(arguments: list[str]) -> None:
    given = command_line.parse(calibrate_schedule.CalibrateSchedule, calibrate_schedule.PROGRAM, arguments)
    calibrate_schedule.calibrate(given)


@pytest.fixture(scope="module")
def calibrated(common: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Schedules for two targets, to be left as they are."""
    output = tmp_path_factory.mktemp("calibrated") / "targets"
    calibrate([*common, "--output", str(output), "--prompts", "40", "--target-speedups", "1.1", "1.3"])
    return output


def test_a_calibrated_schedule_is_adapted_and_a_rerun_goes_on(
    common: list[str], calibrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    started, adapted = silenced(calibrated, tmp_path), tmp_path / "adapted"
    before = Schedule.read(started / "1.1x")

    chosen = ["--schedule", str(started), "--target-speedup", "1.1"]
    arguments = [*common, *chosen, "--output", str(adapted), "--prompts", "60"]
    assert adapt([*arguments, "--steps", "20", "--gate-width", "4", "--adapter-rank", "0"]) == 0
    after = Schedule.read(adapted)
    assert (after.skip_order, after.plateaus) == (before.skip_order, before.plateaus)
    assert (before.provenance["name"], after.provenance["name"]) == ("bridged, 1.1x", "bridged, adapted, 1.1x")
    assert after.bridges.keys() == before.bridges.keys()
    assert after.bridges != before.bridges
    assert after.provenance["decode_flop_speedup"] < before.provenance["decode_flop_speedup"]  # the gate costs
    curve = json.loads((adapted / adapt_model.CURVE_FILE).read_text())
    assert [point["step"] for point in curve] == [0, 20]
    assert curve[0]["loss"] is None
    assert re.search(r"on 6 held-out answers, .*│    0 │             - │ ", capsys.readouterr().out, re.DOTALL)
    assert after.provenance["held_out"]["kl"] == pytest.approx(min(point["kl"] for point in curve), abs=1e-4)
    card = (adapted / adapt_model.CARD_FILE).read_text()
    assert "own weights are unchanged" in card
    assert f"\n{after.provenance['sample_flop_speedup']:.2f}x fewer FLOPs than full depth for whole samples" in card
    assert f"| on {after.provenance['held_out']['answers']} held-out answers of full depth" in card
    assert (adapted / adapt_model.FIGURE_FILE).read_text() == learning_curve([Point(**point) for point in curve])

    assert adapt([*arguments, "--steps", "20", "--gate-width", "4", "--adapter-rank", "0"]) == 0
    assert json.loads((adapted / adapt_model.CURVE_FILE).read_text()) == curve
    capsys.readouterr()
    assert adapt([*arguments, "--steps", "30", "--gate-width", "4", "--adapter-rank", "0"]) == 1
    assert "of another training (--steps was 20, is 30)" in capsys.readouterr().err

    further = configured([*common, "--schedule", str(adapted), "--gate-width", "8", "--output", str(tmp_path / "no")])
    assert adapt_model._read(further, describe(further.model)).keys() == {""}
    assert "bridges that are gated go on as they are: --gate-width is for those that are not" in caplog.messages

    train_to(monkeypatch, 0.5, 0.25)
    arguments = [*common, *chosen, "--output", str(tmp_path / "above"), "--prompts", "60"]
    assert adapt([*arguments, "--steps", "5", "--adapter-rank", "2", "--prompt-layers", "3"]) == 0
    above = Schedule.read(tmp_path / "above")
    assert above.adapter is not None
    assert above.provenance["decode_flop_speedup"] == pytest.approx(before.provenance["decode_flop_speedup"], rel=0.01)
    assert "an adapter of rank 2" in (tmp_path / "above" / adapt_model.CARD_FILE).read_text()
    assert above.prompt_bridge is not None
    assert above.prompt_bridge.layers == 3
    assert above.provenance["sample_flop_speedup"] > 1.1 * before.provenance["sample_flop_speedup"]
    capsys.readouterr()
    arguments = [*common, "--schedule", str(tmp_path / "above"), "--output", str(tmp_path / "again")]
    assert adapt([*arguments, "--prompt-layers", "2"]) == 1
    assert "has a prompt bridge already: leave out --prompt-layers" in capsys.readouterr().err


def test_without_a_schedule_prompts_alone_run_fewer_layers(
    common: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    train_to(monkeypatch, 0.5, 0.25)  # by itself, a random model learns nothing for texts that are held out
    arguments = [*common, "--output", str(tmp_path / "adapted"), "--prompts", "60", "--steps", "2"]
    assert adapt([*arguments, "--prompt-layers", "3"]) == 0
    adapted = Schedule.read(tmp_path / "adapted")
    assert adapted.prompt_bridge is not None
    assert adapted.plateaus == (Plateau(0, 0),)
    assert adapted.adapter is not None
    assert adapted.adapter.changes_prompts
    assert adapted.provenance["decode_flop_speedup"] == 1
    assert adapted.provenance["sample_flop_speedup"] > 1
    assert "from full depth" in " ".join((tmp_path / "adapted" / adapt_model.CARD_FILE).read_text().split())

    again = [*common, "--schedule", str(tmp_path / "adapted"), "--prompts", "60", "--steps", "1"]
    assert adapt([*again, "--output", str(tmp_path / "again"), "--adapter-rank", "3", "--gate-width", "4"]) == 0
    assert "goes on with the adapter that it has" in caplog.text
    assert "--gate-width is for bridges that answers pass, and there are none" in caplog.messages
    assert Schedule.read(tmp_path / "again").provenance["name"] == "adapted"
    further = Schedule.read(tmp_path / "again").adapter
    assert further is not None
    assert further.rank == adapted.adapter.rank != 3
    assert f"an adapter of rank {further.rank}" in (tmp_path / "again" / adapt_model.CARD_FILE).read_text()
    replace(adapted, prompt_bridge=None, adapter=replace(adapted.adapter, changes_prompts=False)).write(
        tmp_path / "decoding"
    )
    of_decoding = [*common, "--schedule", str(tmp_path / "decoding"), "--output", str(tmp_path / "refused")]
    assert adapt([*of_decoding, "--prompt-layers", "3"]) == 1
    assert "has an adapter of decode tokens alone, that learns no prompts" in capsys.readouterr().err

    several = tmp_path / "several"
    for name in ("1.1x", "1.3x"):
        adapted.write(several / name)
    beside = [*common, "--schedule", str(several), "--output", str(tmp_path / "adapted"), "--steps", "1"]
    assert adapt(beside) == 1
    assert "holds other schedules (schedule.json), of which a job could run one" in capsys.readouterr().err

    assert adapt(arguments) == 1
    assert "name a --schedule, or the --prompt-layers that prompts run" in capsys.readouterr().err
    assert adapt([*arguments, "--prompt-layers", "3", "--target-speedup", "2"]) == 1
    assert "--target-speedup chooses among schedules" in capsys.readouterr().err


@pytest.fixture
def untrained(common: list[str], tmp_path: Path) -> list[str]:
    """Flags for a schedule whose bridge does nothing yet."""
    shape = engine.describe(common[1])
    block = Block.of_layers(1, 3)
    bridges = {"1-3": silent_bridge(block, shape.hidden)}
    plateaus = (Plateau(0, len(block.units), ("1-3",)),)
    Schedule(shape.layers, tuple(block.units), plateaus, bridges=bridges).write(tmp_path / "schedule")
    return ["--schedule", str(tmp_path / "schedule"), "--output", str(tmp_path / "out")]


@pytest.mark.parametrize(("kls", "step"), [((0.5, 0.25, 0.4), 20), ((0.5, 0.5, 0.6), 0)])
def test_it_is_told_of_which_step_the_written_state_is_and_where_training_has_brought_nothing(
    kls: tuple[float, ...], step: int, common: list[str], untrained: list[str], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    train_to(monkeypatch, *kls)
    caplog.set_level("INFO")
    assert adapt([*common, *untrained, "--prompts", "20", "--steps", "1"]) == 0
    assert f"written: the state of step {step}, of held-out KL {min(kls):.3f}" in caplog.messages
    assert ("training has brought nothing: what is written is as it was before" in caplog.messages) == (step == 0)
    schedule = Schedule.read(untrained[-1])
    assert (schedule.adapter is None) == (step == 0), "what does nothing costs nothing"
    assert (schedule.provenance.get("name") is None) == (step == 0)
    card = Path(untrained[-1], adapt_model.CARD_FILE).read_text()
    assert ("Training has brought nothing: what is written is as it was before." in card) == (step == 0)


def train_to(monkeypatch: pytest.MonkeyPatch, *kls: float) -> None:
    """Trainings are real, and their curve shows these."""
    points = [Point(20 * index, 1.0 if index else None, kl, 0.5, 1.0) for index, kl in enumerate(kls)]
    monkeypatch.setattr(adapt_model, "train", lambda *given: replace(adaptation.train(*given), points=points))


def test_the_teacher_is_gone_before_the_student_is_loaded(
    common: list[str], untrained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load, decoders = Engine.load, list[Callable[[], object]]()

    def watched(*arguments: Any) -> Engine:
        assert not any(decoder() for decoder in decoders)
        loaded = load(*arguments)
        decoders.append(weakref.ref(loaded.decoder))
        return loaded

    monkeypatch.setattr("jobs.adaptation.Engine", SimpleNamespace(load=watched))
    monkeypatch.setattr(
        adapt_model.AdaptModel, "load_engine", lambda config, _: watched(config.model, config.device, config.dtype)
    )
    assert adapt([*common, *untrained, "--prompts", "60", "--prompt-layers", "4", "--steps", "1"]) == 0
    assert len(decoders) == 2


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--steps", "2", "--steps was 1, is 2"), ("--prompt", "Say: {text}", "--prompt was '{text}', is 'Say: {text}'"),
        ("--prompts", "40", "--prompts was 60, is 40"), ("--schedule", "other", "--schedule was "),
        ("--input", "elsewhere.parquet", "--input was "),
        ("--dtype", "bfloat16", "the answers' --dtype was 'float32', is 'bfloat16'"),
        ("--answers-per-prompt", "2", "--answers-per-prompt was 1"),
    ],
)  # fmt: skip
def test_another_option_is_refused_by_name_before_the_model_is_loaded(
    option: str, value: str, said: str, common: list[str], untrained: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    arguments = [*common, *untrained, "--prompts", "60", "--steps", "1"]
    schedule = Schedule.read(tmp_path / "schedule")
    if option == "--schedule":
        value = str(tmp_path / value)
        Schedule(schedule.layers, schedule.skip_order, (Plateau(0, 2),)).write(value)
    settings = settings_of(configured(arguments), [schedule])
    assert settings["--workers"] == 1, "with others updates are of other answers"
    state = json.dumps({"settings": settings})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / CLAIM_FILE).write_text(json.dumps({"format": 1, "job": adapt_model.PROGRAM}))
    save_file({}, tmp_path / "out" / CHECKPOINT_FILE, {"state": state, "digest": digest_of(state, [])})
    monkeypatch.setattr(AdaptModel, "load_engine", lambda *_: pytest.fail("the model is loaded"))
    assert adapt([*arguments, option, value]) == 1
    assert f"of another training ({said}" in capsys.readouterr().err


def test_a_training_whose_input_has_grown_is_refused_before_a_prompt_is_answered(
    common: list[str], untrained: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Other prompts would be drawn, and their answers written over those that it learnt from."""
    inputs = tmp_path / "in"
    inputs.mkdir()
    shutil.copy(CORPUS, inputs / "a.parquet")
    arguments = [*common, *untrained, "--input", str(inputs), "--prompts", "60", "--steps", "1"]
    assert adapt(arguments) == 0
    kept = (tmp_path / "out" / ANSWERS_FILE).read_bytes()
    shutil.copy(CORPUS, inputs / "b.parquet")
    monkeypatch.setattr("jobs.answers.answer_prompts", lambda *_: pytest.fail("a prompt is answered"))
    capsys.readouterr()
    assert adapt(arguments) == 1
    assert "of another training (the prompts drawn was '" in capsys.readouterr().err
    assert (tmp_path / "out" / ANSWERS_FILE).read_bytes() == kept


@pytest.mark.parametrize(("drawn", "seed", "warned"), [(60, 0, False), (42, 0, True), (40, 0, True), (60, 1, True)])
def test_a_schedule_that_has_seen_what_it_is_judged_by_is_said_to(
    drawn: int, seed: int, warned: bool, common: list[str], calibrated: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = [*common, "--output", "out", "--prompts", "60", "--seed", str(seed)]  # of which so many may be there
    config = configured(given)
    warn_of_seen_prompts(config, Schedule.read(calibrated / "1.1x"), drawn)
    assert ("was calibrated on 40 prompts of the all part by text" in caplog.text) == warned


def test_prompts_of_another_part_may_be_among_those_it_is_judged_by(
    common: list[str], calibrated: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of all rows so many as of a part of them lie elsewhere."""
    schedule = Schedule.read(calibrated / "1.1x")
    of_a_part = {**schedule.provenance["calibrated_on"], "part": "train"}
    schedule = replace(schedule, provenance={**schedule.provenance, "calibrated_on": of_a_part})
    warn_of_seen_prompts(configured([*common, "--output", "out", "--prompts", "60"]), schedule, 60)
    assert "was calibrated on 40 prompts of the train part by text" in caplog.text


def test_a_rerun_answers_no_prompt_again(
    common: list[str], untrained: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*common, *untrained, "--prompts", "60", "--answers-per-prompt", "2", "--steps", "1"]
    assert adapt(arguments) == 0
    curve = (tmp_path / "out" / adapt_model.CURVE_FILE).read_text()
    with monkeypatch.context() as patch:
        patch.setattr("jobs.answers.answer_prompts", lambda *_: pytest.fail("a prompt is answered again"))
        assert adapt(arguments) == 0
        assert (tmp_path / "out" / adapt_model.CURVE_FILE).read_text() == curve
        (tmp_path / "out" / CHECKPOINT_FILE).unlink()  # other steps learn from the same answers
        assert adapt([*arguments, "--steps", "2"]) == 0
    (tmp_path / "out" / ANSWERS_FILE).write_bytes(b"no answers")
    assert adapt([*arguments, "--steps", "2"]) == 0  # drawn again


def test_answers_that_were_drawn_before_it_was_killed_are_not_drawn_again(
    common: list[str], untrained: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(output: str) -> list[tuple[list[int], list[int]]]:
        config = configured([*common, *untrained, "--prompts", "60", "--batch-size", "4", "--output", output])
        place = Path(config.output)
        place.mkdir(exist_ok=True)
        found, _ = answer_corpus(config, config.load_engine(), quiet, kept_in=place / ANSWERS_FILE)
        return [(list(answer.prompt), list(answer.tokens)) for answer in found]

    whole, asked = drawn(str(tmp_path / "whole")), list[int]()
    monkeypatch.setattr(answers, "KEPT_EVERY", 5)
    answer = answers.answer_prompts

    def killed_at_last(model: Engine, prompts: Sequence[Sequence[int]], *others: Any) -> list[Answer]:
        asked.append(len(prompts))
        if sum(asked) == 60:
            raise KeyboardInterrupt
        return answer(model, prompts, *others)

    monkeypatch.setattr(answers, "answer_prompts", killed_at_last)
    with pytest.raises(KeyboardInterrupt):
        drawn(str(tmp_path / "parts"))
    assert drawn(str(tmp_path / "parts")) == whole
    assert asked == [20, 20, 20, 20]


@pytest.mark.parametrize("options", [[], ["--prompt-layers", "4"]])
def test_more_prompts_than_the_memory_holds_are_refused_before_they_are_answered(
    options: list[str], common: list[str], untrained: list[str], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    freed = 300_000

    def said() -> str:
        assert adapt([*common, *untrained, "--prompts", "60", *options]) == 1
        return capsys.readouterr().err

    monkeypatch.setattr("jobs.adaptation.free_bytes", lambda _: 1_000_000 - freed)
    monkeypatch.setattr("jobs.adaptation.teacher_bytes", lambda _: freed)
    monkeypatch.setattr("jobs.adaptation.trained_bytes", lambda *_: 0)
    refused = said()
    assert "training on 60 prompts keeps some" in refused
    assert "what it works in alone does not fit" in refused
    assert "answering at full depth" not in refused
    monkeypatch.setattr("jobs.adaptation.working_bytes", lambda *_: 0)
    monkeypatch.setattr("jobs.adaptation.model_bytes", lambda *_: 300_000)
    monkeypatch.setattr("jobs.adaptation.kept_bytes", lambda *_: 1_000_000)
    assert "with about 30 prompts it fits" in said()


def silenced(calibrated: Path, where: Path) -> Path:
    """The same schedules with bridges of nothing: what is fitted to a random model, training does not mend for texts
    that are held out.
    """
    started = Path(shutil.copytree(calibrated, where / "calibrated"))
    for name in ("1.1x", "1.3x"):
        fitted = Schedule.read(started / name)
        silent = {each: replace(bridge, tensors=zeros(bridge)) for each, bridge in fitted.bridges.items()}
        replace(fitted, bridges=silent).write(started / name)
    return started


def zeros(bridge: Bridge) -> dict[str, torch.Tensor]:
    return {role: torch.zeros_like(tensor) for role, tensor in bridge.tensors.items()}


def test_several_schedules_are_trained_together_and_a_job_chooses_among_them(
    common: list[str], calibrated: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    started, adapted = silenced(calibrated, tmp_path), tmp_path / "adapted"
    Schedule.full_depth(5).write(started / "1x")
    arguments = [*common, "--schedule", str(started), "--output", str(adapted), "--prompts", "60"]
    arguments += ["--steps", "20", "--adapter-rank", "2"]
    assert adapt(arguments) == 0
    assert "1x skips nothing: there is nothing to learn, and it is left out" in caplog.text
    slower, faster = (read_schedule(str(adapted), target) for target in (1.1, 1.3))
    assert sorted(path.name for path in adapted.iterdir() if path.is_dir()) == ["1.1x", "1.3x"]
    assert slower.adapter == faster.adapter
    assert slower.adapter is not None
    for name, schedule in (("1.1x", slower), ("1.3x", faster)):
        before = Schedule.read(started / name).bridges
        assert schedule.bridges.keys() == before.keys()
        assert all(schedule.bridges[each] != before[each] for each in before)
        assert f"| {name}, after | {schedule.provenance['held_out']['kl']:.3f} |" in (adapted / "README.md").read_text()


@pytest.mark.alone
@pytest.mark.timeout(600)
def test_several_workers_train_on_a_ray_cluster(common: list[str], tmp_path: Path) -> None:
    """As one process would on the mean of their gradients (tests/engine/adaptation/test_peers.py)."""
    block = Block.of_layers(1, 2)
    bridges = {"1-2": silent_bridge(block, engine.describe(common[1]).hidden)}
    Schedule(5, block.units, (Plateau(0, 2, ("1-2",)),), bridges=bridges).write(tmp_path / "calibrated")
    adapted = tmp_path / "adapted"  # named relative to where the job is started, as is the model; workers run elsewhere
    common = [os.path.relpath(each, tmp_path) if each == common[1] else each for each in common]
    program = [sys.executable, str(ROOT / "jobs" / adapt_model.PROGRAM), "--workers", "2", "--ray-address", "local"]
    arguments = [*common, "--schedule", str(tmp_path / "calibrated"), "--prompts", "60", "--output", adapted.name]
    done = subprocess.run([*program, *arguments, "--steps", "20"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "training: 20 of 20" in done.stderr + done.stdout
    schedule = Schedule.read(adapted)
    assert schedule.adapter is not None
    assert bool(schedule.bridges["1-2"].tensors["weight"].any())  # all zero before
    assert schedule.provenance["adapted_on"]["workers"] == 2
    assert schedule.provenance["held_out"]["answers"] == 6
    assert [point["step"] for point in json.loads((adapted / adapt_model.CURVE_FILE).read_text())] == [0, 20]


@pytest.mark.alone
@pytest.mark.timeout(600)
def test_several_workers_that_are_interrupted_say_that_a_rerun_goes_on(
    common: list[str], untrained: list[str], tmp_path: Path
) -> None:
    program = [sys.executable, "-u", str(ROOT / "jobs" / adapt_model.PROGRAM), "--workers", "2"]
    arguments = [*common, *untrained, "--ray-address", "local", "--prompts", "60", "--steps", "100000"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, all below
    try:
        process = subprocess.Popen(
            [*program, *arguments], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if "training: " in line:
                process.send_signal(signal.SIGINT)
                break
        said += process.stdout
    assert process.returncode == 4, "".join(said)
    assert "stopped: interrupted; start it again" in "".join(said)


def test_workers_on_cpus_claim_no_gpus(
    common: list[str], untrained: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def no_trainer(*_: Any, scaling_config: Any, **__: Any) -> None:
        asked.append(scaling_config)
        raise JobError("asked for enough")

    monkeypatch.setattr(cluster, "connect", lambda _: None)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 4.0, "GPU": 1.0})
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 4.0, "GPU": 1.0}}])
    monkeypatch.setattr("ray.train.torch.TorchTrainer", no_trainer)
    config = configured([*common, *untrained, "--workers", "2"])
    (tmp_path / "out").mkdir()
    with pytest.raises(JobError, match="asked for enough"):
        train_on_cluster(config, [])
    assert not asked[0].use_gpu
    with pytest.raises(JobError, match="2 workers are too many for 4 cores and 1 GPUs"):
        train_on_cluster(config.model_copy(update={"device": "auto"}), [])


def test_a_gpu_by_number_is_refused_for_several_workers(
    common: list[str], untrained: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        configured([*common, *untrained, "--workers", "2", "--device", "cuda:1"])
    assert "device 'cuda:1' names one of several GPUs, and Ray gives each worker" in capsys.readouterr().err


def test_what_a_worker_could_not_do_is_what_the_user_is_told() -> None:
    damaged = ScheduleError("the checkpoint is of another training")
    assert reason_of(WorkerGroupError("...", {1: damaged})) is damaged
    lost = reason_of(WorkerGroupError("rank 1:\nthe node is gone", {1: RuntimeError("gone")}))
    assert isinstance(lost, JobStopped)
    assert "(the node is gone): start it again" in str(lost)
    for failure in (KeyError("a defect"), torch.OutOfMemoryError("CUDA out of memory"), JobStopped("start it again")):
        assert reason_of(WorkerGroupError("...", {0: RuntimeError("connection closed by peer"), 1: failure})) is failure


def test_prompts_are_cut_short_in_training_as_in_a_job(common: list[str], tmp_path: Path) -> None:
    """What they share is computed at full depth there, before any prompt."""
    common = [*common, "--prompt", "Say it in a few words: {text}"]
    into = ["--output", str(tmp_path), "--prompts", "40", "--prompt-layers", "2", "--target-speedups", "1.1"]
    calibrate([*common, *into])
    chosen = ["--schedule", str(tmp_path / "1.1x"), "--output", str(tmp_path / "adapted"), "--prompts", "60"]
    assert adapt([*common, *chosen, "--steps", "1"]) == 0
    config = configured([*common, *chosen])
    model = config.load_engine()
    held_out = answer_corpus(config, model, quiet)[0][-6:]  # and has it share the prefix
    schedule = Schedule.read(tmp_path / "1.1x")
    with torch.inference_mode():
        judge = Judge(model.teacher_forced(held_out))
        quality = judge.judge(schedule, model.compiled(schedule))
    curve = json.loads((tmp_path / "adapted" / adapt_model.CURVE_FILE).read_text())
    assert curve[0]["kl"] == pytest.approx(quality.mean_kl, rel=1e-3)


def test_more_answers_to_a_prompt_are_more_to_learn_from(common: list[str]) -> None:
    config = configured([*common, *NOWHERE, "--prompts", "20"])
    model = config.load_engine()
    answers = answer_corpus(config, model, quiet)[0]
    more = with_more_answers(config, model, answers, 3, quiet)
    assert more[::3] == answers
    prompts = [answer.prompt for answer in more]
    assert prompts == [answer.prompt for answer in answers for _ in range(3)]
    assert len({tuple(answer.tokens) for answer in more}) > 2 * len(answers)
    twice = [*answers, Answer(answers[0].prompt, (5, 6))]
    assert with_more_answers(config, model, twice, 3, quiet) == [answers[0], twice[-1], *more[1:]]


def test_more_answers_are_others_where_the_first_are_drawn_too(common: list[str]) -> None:
    config = configured([*common, *NOWHERE, "--prompts", "20", "--temperature", "1"])
    model = config.load_engine()
    answers = answer_corpus(config, model, quiet)[0]
    more = with_more_answers(config, model, answers, 2, quiet)
    assert more[::2] == answers
    assert not any(first == second for first, second in zip(more[::2], more[1::2], strict=True))


@pytest.mark.parametrize(
    ("schedule", "rank", "said"),
    [
        (Schedule.full_depth(5), "4", "skips nothing"),
        (Schedule.build(5, orders.evenly_spaced(5), decays.constant(2), 0), "0", "there is nothing to adapt"),
        (Schedule.build(5, orders.top_first(5), decays.constant(2), 0), "4", "there is nothing to adapt"),
    ],
    ids=["full depth", "without bridges or adapter", "nothing runs above what it skips"],
)
def test_a_schedule_with_nothing_to_learn_is_refused_before_the_model_is_loaded(
    schedule: Schedule, rank: str, said: str, common: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    schedule.write(tmp_path / "bare")
    monkeypatch.setattr(Engine, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    named = ["--schedule", str(tmp_path / "bare"), "--output", str(tmp_path / "out")]
    assert adapt([*common, *named, "--adapter-rank", rank]) == 1
    assert said in capsys.readouterr().err


def test_a_prompt_that_comes_twice_is_answered_once(common: list[str], tmp_path: Path) -> None:
    """Else one of the two would be learnt from and the other judged by."""
    texts = pq.read_table(CORPUS).slice(0, 15)["text"].to_pylist() * 2
    pq.write_table(pa.table({"id": range(30), "text": texts}), tmp_path / "texts.parquet")
    config = configured([*common, *NOWHERE, "--input", str(tmp_path / "texts.parquet"), "--prompts", "30"])
    drawn, provenance = answer_corpus(config, config.load_engine(), quiet)
    prompts = [tuple(answer.prompt) for answer in drawn]
    assert len(prompts) == len(set(prompts)) == provenance["prompts"] == 15


def test_a_prompts_answers_are_the_same_whichever_process_draws_them(
    common: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured([*common, *NOWHERE, "--temperature", "1.0", "--prompts", "20"])
    model = config.load_engine()
    alone = answer_corpus(config, model, quiet)[0]
    shares: list[Answer] = []
    for rank in range(3):
        monkeypatch.setattr(answers.Peers, "__init__", lambda self, rank=rank: vars(self).update(rank=rank, count=3))
        monkeypatch.setattr(answers.Peers, "firsts", lambda self, value: value)
        monkeypatch.setattr(answers.Peers, "everyones", lambda self, value: [value])
        shares += answer_corpus(config, model, quiet)[0]
    assert shares == alone


@pytest.mark.parametrize("changed", [[], ["--max-new-tokens", "4"], ["--seed", "1"], ["--prompts", "25"]])
def test_answers_that_were_drawn_otherwise_are_named_before_they_are_replaced(
    changed: list[str], common: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = tmp_path / ANSWERS_FILE
    for options in ([], changed):
        caplog.clear()
        config = configured([*common, *NOWHERE, "--prompts", "20", *options])
        answer_corpus(config, config.load_engine(), quiet, kept_in=kept)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    replaced = f"the answers in {kept} are to other prompts, drawn otherwise or damaged: they are replaced"
    assert said == ([replaced] if changed else [])


def test_held_out_answers_are_not_learnt_from(
    common: list[str], untrained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taught = []

    def seen(student: Engine, schedules: object, train: list[Answer], held_out: list[Answer], *_: object) -> None:
        taught.append((train, held_out))
        raise ScheduleError("seen")

    monkeypatch.setattr("jobs.adaptation.Trainer", seen)
    assert adapt([*common, *untrained, "--prompts", "60"]) == 1
    [(train, held_out)] = taught
    assert train
    assert held_out
    assert not {tuple(answer.prompt) for answer in train} & {tuple(answer.prompt) for answer in held_out}


def test_kept_answers_are_of_one_model_sampling_precision_and_prompts(
    common: list[str], make_checkpoint: Callable[..., Path]
) -> None:
    config = configured([*common, *NOWHERE, "--prompts", "20"])

    def drawn_as(prompts: list[list[int]], **changes: Any) -> str:
        given = config.model_copy(update=changes)
        return answers._drawn_as(given, prompts, given.sampling())

    model = str(make_checkpoint(seed=1, vocab_size=260, eos=259))
    others = [{"max_new_tokens": 6}, {"temperature": 1.0}, {"dtype": "bfloat16"}, {"model": model}]
    known = drawn_as([[1]])
    assert len({known, drawn_as([[2]]), *(drawn_as([[1]], **other) for other in others)}) == 6
    assert drawn_as([[1]], output="elsewhere", batch_size=3) == known
    assert drawn_as([[1]], device="cpu", dtype="float32") == known, "auto is what it means on this device"
