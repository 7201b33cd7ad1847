"""Every rival is solved for the target it is judged at, on the lengths really generated."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from engine import EarlyExit, Engine, Sampling, Schedule, ScheduleError, decode_flop_speedup
from engine.schedules.schedule import Plateau
from pipeline.evaluation import rivals as module
from pipeline.evaluation.contender import Contender
from pipeline.evaluation.rivals import RIVALS, TOLERANCE, RivalCalibration, SolvedRivals, solve_rival

TARGETS = [1.3, 1.6]


@pytest.fixture(scope="module")
def calibration(packaged: Engine, texts: list[str]) -> RivalCalibration:
    prompts = [packaged.tokenizer.encode_chat(text) for text in sorted(texts, key=len)[:4]]
    return RivalCalibration.measure(packaged, Sampling(max_new_tokens=10), prompts)


@pytest.mark.parametrize("name", [name for name in RIVALS if name not in ("calm-dec", "multi-layer-exit")])
def test_a_rival_meets_its_target_and_no_milder_one_would(calibration: RivalCalibration, name: str) -> None:
    for target in TARGETS:
        rival = RIVALS[name](calibration, target)
        schedule = rival.method
        assert isinstance(schedule, Schedule)
        assert (rival.target, rival.is_rival) == (target, True)
        assert decode_flop_speedup(calibration.shape, schedule, calibration.lengths) >= target
        # One unit or layer less at each step does not.
        group = 1 if name == "adaskip" else 2
        plateaus = tuple(Plateau(p.first_step, max(0, p.skipped - group)) for p in schedule.plateaus)
        milder = Schedule(schedule.layers, schedule.skip_order, plateaus)
        assert decode_flop_speedup(calibration.shape, milder, calibration.lengths) < target


def test_skipdecode_takes_the_warm_up_with_the_lowest_kl(calibration: RivalCalibration) -> None:
    rival = RIVALS["skipdecode"](calibration, 1.3)
    assert isinstance(rival.method, Schedule)
    listed = dict(pair.split(": ") for pair in rival.note.split("by warm-up: ")[1].split(", "))
    assert list(listed) == ["1", "2", "3", "4", "5", "6"]
    best = min(listed, key=lambda warmup: float(listed[warmup]))
    assert rival.note.startswith(f"warm-up {best};")
    assert rival.method.skip_order[0].layer == int(best)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["calm-dec", "multi-layer-exit"])
def test_an_exit_rule_meets_its_target_on_what_it_generates(calibration: RivalCalibration, name: str) -> None:
    rival = RIVALS[name](calibration, 1.3)
    assert isinstance(rival.method, EarlyExit)
    found = list(
        calibration.engine.generate_with_exits(
            calibration.prompts, calibration.sampling, rival.method, len(calibration.prompts)
        )
    )
    full = sum(generation.flops_decode_full_depth for generation in found)
    assert full / sum(generation.flops_decode for generation in found) >= 1.3 * (1 - TOLERANCE)


def test_a_target_out_of_reach_leaves_the_rival_out_and_says_so(
    calibration: RivalCalibration, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger=module.__name__):
        assert solve_rival("early-termination", 40.0, calibration) is None
    assert "early-termination at 40x is left out" in caplog.text


@pytest.mark.parametrize(
    ("target", "longest", "said"),
    [
        (40.0, 10, r"^with a check after layer [0-9]+ it stays below 40x at every threshold$"),
        (1.3, 1, "^no answer to the calibration prompts has a decode step$"),
    ],
)
def test_an_exit_rule_out_of_reach_says_why(
    calibration: RivalCalibration, target: float, longest: int, said: str
) -> None:
    sampling = Sampling(max_new_tokens=longest)
    short = replace(calibration, sampling=sampling, prompts=calibration.prompts[:1], answers=calibration.answers[:1])
    with pytest.raises(ScheduleError, match=said):
        RIVALS["calm-dec"](short, target)


def test_what_was_solved_is_not_solved_again(
    calibration: RivalCalibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names, targets = ["unified-layer-skipping", "early-termination", "calm-dec"], [1.3, 40.0]
    exits = Contender("CALM-DEC", 1.3, EarlyExit("CALM-DEC", (10,), 0.25), is_rival=True, note="made up")

    def made_up(_: RivalCalibration, target: float) -> Contender:
        if target > 2:
            raise ScheduleError("out of reach")
        return exits

    monkeypatch.setitem(RIVALS, "calm-dec", made_up)
    prompts = calibration.prompts
    first = SolvedRivals(tmp_path, "packaged", calibration.sampling, prompts).solve(names, targets, lambda: calibration)
    found = list(first)
    assert [rival.label for rival in found] == [
        "Unified Layer Skipping, 1.3x", "early termination, 1.3x", "CALM-DEC, 1.3x",
    ]  # fmt: skip
    again = SolvedRivals(tmp_path, "packaged", calibration.sampling, prompts)
    caplog.clear()
    assert list(again.solve(names, targets, lambda: pytest.fail("measured again"))) == found
    assert caplog.text.count("at 40x is left out: it is out of reach") == caplog.text.count("left out") > 0
    other = SolvedRivals(tmp_path, "packaged", calibration.sampling, prompts[1:])
    with pytest.raises(RuntimeError, match="asked"):
        list(other.solve(names, targets, lambda: _raise()))


def _raise() -> RivalCalibration:
    raise RuntimeError("asked")
