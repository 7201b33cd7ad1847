"""The job benchmark: contenders in processes of their own, and what is said of them."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

from engine import Ledger, Schedule, decode_flop_speedup, describe
from engine.schedules import recipes
from jobs.benchmarks.figures import Measured, WholeJob, figures, flops
from jobs.benchmarks.job import BenchmarkJob, _contenders, bare_schedules, benchmark, named_schedules
from jobs.benchmarks.peers.own_engine import OwnEngine
from jobs.benchmarks.peers.protocol import Job
from jobs.benchmarks.worker import RUNNERS, VARIANTS, Runner, Worker
from pipeline.errors import JobError

NEW_TOKENS, ROWS = 6, 5


def half_depth(layers: int = 5) -> Schedule:
    return recipes.skipdecode(layers, warmup=1, max_active=3, min_active=3, horizon=1)


def job(model: str, folder: Path) -> Job:
    return Job(model, [[1, 2]], [], NEW_TOKENS, 0, 2, [0], 1, "cpu", "float32", 0.2, False, None, str(folder))


def test_contenders_run_the_same_job_and_who_is_not_installed_or_fails_to_load_is_left_out(
    tmp_path: Path,
    make_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(RUNNERS, "openvino", Runner("protocol", "a broken peer", ()))
    model = make_checkpoint(vocab_size=300)  # any byte
    half_depth().write(tmp_path / "half")
    benchmark(
        BenchmarkJob(
            contenders=["engine", "lock-step", "transformers", "openvino", "vllm"],
            schedules=[tmp_path / "half"],
            model=str(model),
            prompt="Summarize: {text}",
            prompt_format="raw",
            rows=ROWS,
            max_new_tokens=NEW_TOKENS,
            batch_size=2,
            rounds=2,
            threads=1,
            peers_python=sys.executable,
            vllm_python=str(tmp_path / "nowhere"),
            output=tmp_path / "out",
        )
    )
    said = capsys.readouterr().out
    assert f"vLLM is left out: there is no {tmp_path / 'nowhere'}; make vllm-env" in said
    assert "left out: a broken peer ended: it printed 'nothing' last" in said
    report = json.loads((tmp_path / "out" / "job.json").read_text())
    full, half, lock_step, halved, peer = report["contenders"]
    ours = [name + under for name in ("our engine", "our engine in lock-step") for under in ("", ", half")]
    assert [each["name"] for each in report["contenders"]] == [*ours, "transformers"]
    assert lock_step["same_rows"] == 1.0
    assert halved["output_tokens"] == half["output_tokens"]
    assert lock_step["occupancy"] <= full["occupancy"]
    assert peer["same_rows"] == full["same_rows"] == 1.0
    assert peer["output_tokens"] == full["output_tokens"] > ROWS
    assert full["decode_over_reference"] == 1.0
    assert len(full["cache_course"]) > NEW_TOKENS
    assert half["decode_flop_x"] > half["sample_flop_x"] > 1
    assert all(len(each["rounds"]) == 2 for each in (full, half, peer))
    assert all(run["prompt_seconds"] + run["decode_seconds"] <= run["seconds"] for run in full["rounds"])
    assert (tmp_path / "out" / "job.svg").stat().st_size > 1000


def test_our_engine_has_the_same_tokens_in_lock_step_and_without_an_optimisation(
    tmp_path: Path, make_checkpoint: Callable[..., Path]
) -> None:
    task = replace(job(str(make_checkpoint()), tmp_path), prompts=[[5, 7, 9], [5, 8], [5, 1, 2, 3]], shared_prefix=[5])
    task = replace(task, least_tokens=NEW_TOKENS)
    runs = [OwnEngine(variant, task).answer(task.prompts) for variant in ("", *VARIANTS)]
    assert all(run.answers == runs[0].answers for run in runs)
    assert [len(answer) for answer in runs[0].answers] == [NEW_TOKENS] * 3  # none ends earlier
    assert max(runs[0].cache_course or ()) > 0


def test_schedules_without_bridges_reach_the_speed_ups_asked_for(
    tmp_path: Path, make_checkpoint: Callable[..., Path]
) -> None:
    shape = describe(str(make_checkpoint()))
    found = bare_schedules([1.05], NEW_TOKENS, WholeJob(shape, [40, 60], 8, ["", ""]), tmp_path)
    assert list(found) == ["bare 1.05x", "linear ramp"]
    for path, schedule in found.values():
        assert Schedule.read(path).plateaus == schedule.plateaus
    assert decode_flop_speedup(shape, found["bare 1.05x"][1], [(40, NEW_TOKENS), (60, NEW_TOKENS)]) >= 1.05


def measured(name: str, schedule: Schedule | None, seconds: list[float], generated: list[int]) -> Measured:
    told: dict[str, Any] = {"prompt_seconds": None, "decode_seconds": None, "occupancy": None}
    rounds = [{"seconds": each} | told for each in seconds]
    texts = ["a package"] * len(generated)
    return Measured(name, "engine", schedule, rounds=rounds, answers=[[1]] * 2, generated=generated, texts=texts)


def test_a_schedule_that_takes_its_share_of_the_work_has_realised_it(make_checkpoint: Callable[..., Path]) -> None:
    """Also where its answers are shorter: less work is no skill."""
    task = WholeJob(describe(str(make_checkpoint())), [40, 60], 8, ["a package", "a library"])
    whole, half = [20, 30], [12, 30]
    less = flops(task, half_depth(), half).total / flops(task, None, whole).total
    contenders = [
        measured("full", None, [10.0, 30.0, 20.0], whole),
        measured("half", half_depth(), [10.0 * less, 30.0 * less, 20.0 * less], half),
    ]
    rates = [flops(task, None, whole).total / 5.0] * 3
    full, scheduled = figures(contenders, task, rates)
    assert scheduled["realised_share"] == pytest.approx(1.0)
    assert scheduled["measured_x"] == pytest.approx(scheduled["job_flop_x"])
    assert scheduled["job_flop_x"] > scheduled["sample_flop_x"] > 1
    assert full["share_of_floor"] == pytest.approx(0.25)  # 5 of 20 seconds
    assert full["floor_prompt_seconds"] + full["floor_decode_seconds"] == pytest.approx(5.0)
    assert "realised_share" not in full


def test_a_job_costs_what_the_ledger_says_and_its_shared_tokens_once(make_checkpoint: Callable[..., Path]) -> None:
    shape = describe(str(make_checkpoint()))
    ledger, task = Ledger(shape, Schedule.full_depth(shape.layers)), WholeJob(shape, [40, 60], 8, ["", ""])
    cost = flops(task, None, [3, 1])
    assert cost.prompts == ledger.prefix(8) + ledger.prompt(40, 8) + ledger.prompt(60, 8)
    assert cost.decoding == ledger.decode(40, 3)


def test_schedules_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    for folder in ("calibrated/2x", "adapted/2x", "half"):
        half_depth().write(tmp_path / folder)
    paths = [tmp_path / "calibrated" / "2x", tmp_path / "adapted" / "2x", tmp_path / "half"]
    assert list(named_schedules(paths)) == [str(paths[0]), str(paths[1]), "half"]


def test_a_contender_that_nobody_knows_is_named() -> None:
    with pytest.raises(ValidationError, match=r"'llama\.cpp' is not known: known are engine, lock-step, unpacked"):
        BenchmarkJob(contenders=["llama.cpp"])


def test_a_contender_that_dies_is_named_with_its_last_words(tmp_path: Path) -> None:
    worker = Worker("a peer", Runner("protocol", "a peer", ()), sys.executable, job("none", tmp_path), tmp_path / "log")
    with pytest.raises(JobError, match="a peer ended: it printed 'nothing' last, the rest is in"):
        worker.load()
    worker.stop()


def test_a_contender_that_was_killed_is_said_to_have_been(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -9 $$\n")
    python.chmod(0o755)
    worker = Worker("a peer", Runner("protocol", "a peer", ()), str(python), job("none", tmp_path), tmp_path / "log")
    with pytest.raises(JobError, match="a peer ended, killed as the system does where memory runs out"):
        worker.load()
    worker.stop()


def test_a_runner_without_its_modules_says_how_to_get_them() -> None:
    runner = Runner("vllm", "vLLM", ("json", "no_such_module"), "vllm")
    assert runner.missing(sys.executable) == (
        f"vLLM is left out: {sys.executable} has no no_such_module; make vllm-env"
    )
    assert RUNNERS["engine"].missing(sys.executable) is None


def test_a_reference_that_runs_on_cpus_alone_is_refused_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RUNNERS, "openvino", Runner("protocol", "OpenVINO GenAI", ()))
    first, second = (
        BenchmarkJob(contenders=contenders, device="cuda", output=tmp_path)
        for contenders in (["openvino", "engine"], ["engine", "openvino"])
    )
    with pytest.raises(JobError, match="OpenVINO GenAI is left out: it runs on CPUs alone"):
        list(_contenders(first, job("none", tmp_path), {}, Console()))
    assert [each.name for each, _ in _contenders(second, job("none", tmp_path), {}, Console())] == ["our engine"]


def test_answers_are_compared_with_the_references_that_are_there(make_checkpoint: Callable[..., Path]) -> None:
    shape = describe(str(make_checkpoint()))
    whole, other = (measured(name, None, [1.0], [2, 2]) for name in ("whole", "other"))
    other.texts = ["a parcel", ""]
    for references, share in ((["a package", " "], 0.5), (["", ""], None)):
        found = figures([whole, other], WholeJob(shape, [40, 60], 0, references), [1e9])
        assert found[1]["rouge_l_share"] == (None if share is None else pytest.approx(share))
