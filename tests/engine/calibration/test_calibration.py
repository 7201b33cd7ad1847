"""Bridges are the ridge regressions they claim to be, and the schedules made of them hold what they promise."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine import Block, Engine, Ledger, Plateau, Sampling, Schedule, ScheduleError, Unit, decode_flop_speedup
from engine.calibration import bridged, calibrate, own_states
from engine.calibration.bridged import Bridges, Candidate
from engine.calibration.calibrate import Calibration, check_targets
from engine.calibration.collect import answer_prompts, collect_moments
from engine.calibration.growth import best_growths
from engine.calibration.moments import Moments
from engine.calibration.own_states import OwnStates
from engine.forward.compiled_parts import compile_bridge
from engine.forward.operations import Compiled
from engine.forward.quality import Judge, Quality
from engine.forward.teacher_forcing import Answer
from engine.kernels import Kernels
from engine.parts.prompt_bridge import PromptBridge
from engine.shape import AttentionKind
from tests.engine.prompts import random_prompts, sharing
from tests.engine.quiet import quiet

WIDTH, LAYERS = 12, 8
CPU = torch.device("cpu")
START, END = 4, 10  # places


def random_states(count: int, seed: int = 0) -> dict[int, Tensor]:
    """States at two places; a few entries are far larger than the others, as in real models."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, WIDTH, generator=draw) * torch.logspace(-1, 2, WIDTH) + 3
    y = torch.randn(count, WIDTH, generator=draw)
    return {START: x, END: x + 0.1 * x @ torch.randn(WIDTH, WIDTH, generator=draw) + y + 1}


def moments_of(*parts: dict[int, Tensor]) -> Moments:
    moments = Moments(START, (END,), WIDTH, CPU)
    for part in parts:
        moments.add(part[START], part)
    return moments


def test_states_that_do_not_vary_are_refused() -> None:
    with pytest.raises(ScheduleError, match="the states of these tokens are all alike"):
        moments_of({place: torch.ones(5, WIDTH) for place in (START, END)}).fit(END, 1e-3)


@pytest.mark.parametrize("ridge", [1e-4, 1e-2])
def test_a_bridge_is_the_ridge_regression_of_its_tokens(ridge: float) -> None:
    states = random_states(400)
    bridge = moments_of({place: x[:150] for place, x in states.items()}, {p: x[150:] for p, x in states.items()}).fit(
        END, ridge
    )
    x, y = states[START].double(), (states[END].double() - states[START].double())
    xc, yc = x - x.mean(0), y - y.mean(0)
    penalty = ridge * xc.square().sum() / WIDTH
    # The same problem as ordinary least squares on rows that pull the weights to zero.
    rows = torch.cat([xc, penalty.sqrt() * torch.eye(WIDTH, dtype=torch.float64)])
    weight = torch.linalg.lstsq(rows, torch.cat([yc, torch.zeros(WIDTH, WIDTH, dtype=torch.float64)])).solution
    torch.testing.assert_close(bridge.tensors["weight"], weight.half())
    torch.testing.assert_close(bridge.tensors["bias"], (y.mean(0) - x.mean(0) @ weight).half())
    assert bridge.block == Block.of_layers(2, 5)


def test_weights_count_a_token_so_many_times_and_a_gain_scales_what_was_learnt() -> None:
    states = random_states(60)
    weights = torch.tensor([1.0, 2.0, 3.0]).repeat(20)
    weighted = Moments(START, (END,), WIDTH, CPU)
    weighted.add(states[START], states, weights)
    repeated = moments_of({place: x.repeat_interleave(weights.long(), 0) for place, x in states.items()})
    bridge = weighted.fit(END, 1e-3)
    torch.testing.assert_close(bridge.tensors["weight"], repeated.fit(END, 1e-3).tensors["weight"])
    torch.testing.assert_close(bridge.tensors["bias"], repeated.fit(END, 1e-3).tensors["bias"])
    gained = weighted.fit(END, 1e-3, gain=1.2)
    torch.testing.assert_close(gained.tensors["weight"], 1.2 * bridge.tensors["weight"])
    mean = (weights[:, None] * states[START]).sum(0, keepdim=True) / weights.sum()
    here, there = (compile_bridge(b, Kernels(), torch.float32, CPU)(mean) for b in (bridge, gained))
    # The mean token goes where it went, up to the rounding of the stored weights.
    torch.testing.assert_close(here, there, rtol=2e-3, atol=0.05)


def test_a_bridge_fitted_over_nothing_is_the_identity() -> None:
    x = random_states(100)[START]
    moments = Moments(START, (START,), WIDTH, CPU)
    moments.add(x, {START: x})
    bridge = moments.fit(START, 1e-3)
    assert torch.equal(compile_bridge(bridge, Kernels(), torch.float32, CPU)(x), x)


def test_merged_moments_are_those_of_all_tokens() -> None:
    first, second = random_states(120, seed=1), random_states(80, seed=2)
    merged = moments_of(first).merged(moments_of(second)).fit(END, 1e-3)
    together = moments_of({place: torch.cat([first[place], second[place]]) for place in first}).fit(END, 1e-3)
    torch.testing.assert_close(merged.tensors["weight"], together.tensors["weight"])


@pytest.fixture(scope="module")
def tiny(make_checkpoint: Callable[..., Path]) -> Engine:
    return Engine.load(str(make_checkpoint(num_hidden_layers=LAYERS, eos=[3, 40, 77])), device="cpu")


@pytest.fixture(scope="module")
def answers(tiny: Engine) -> list[Answer]:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 20, (120,), generator=draw).tolist()
    prompts = [torch.randint(1, 96, (length,), generator=draw).tolist() for length in lengths]
    return answer_prompts(tiny, prompts, Sampling(max_new_tokens=24, temperature=1.0), 32, quiet)


def test_answers_are_the_full_models_and_those_without_a_decode_pass_are_left_out(
    make_checkpoint: Callable[..., Path], answers: list[Answer]
) -> None:
    """Every fourth token ends a text here, the first one of some answers too."""
    brief = Engine.load(str(make_checkpoint(num_hidden_layers=LAYERS, eos=list(range(0, 96, 4)))), device="cpu")
    prompts = [list(answer.prompt) for answer in answers]
    alone = [next(brief.generate([prompt], Sampling(max_new_tokens=24))) for prompt in prompts]
    assert 0 < sum(generation.generated_tokens == 1 for generation in alone) < len(prompts)
    found = answer_prompts(brief, prompts, Sampling(max_new_tokens=24), 32, quiet)
    assert [(list(answer.prompt), tuple(answer.tokens)) for answer in found] == [
        (prompt, generation.tokens)
        for prompt, generation in zip(prompts, alone, strict=True)
        if generation.generated_tokens > 1
    ]


def test_states_are_collected_whatever_the_chunks(tiny: Engine, answers: list[Answer]) -> None:
    moments = collect_moments(tiny, answers, {2: [4, 6]}, quiet)[2]
    kept: dict[int, Tensor] = {}
    with torch.inference_mode():
        forced = tiny.teacher_forced(answers)
        forced.hidden(Schedule.full_depth(LAYERS), Compiled(), observe=lambda place, x: kept.__setitem__(place, x))
    direct = Moments(4, (8, 12), tiny.shape.hidden, CPU)
    weights = 1 / kept[12].double().square().mean(-1)
    direct.add(kept[4], kept, weights)
    for end in (8, 12):
        torch.testing.assert_close(
            moments.fit(end, 1e-3).tensors["weight"], direct.fit(end, 1e-3).tensors["weight"], rtol=2e-3, atol=1e-3
        )


def test_a_judge_finds_no_fault_with_full_depth_and_more_with_more_skipping(
    tiny: Engine, answers: list[Answer]
) -> None:
    bridges = Bridges(collect_moments(tiny, answers[:80], {2: [3, 4, 5, 6, 7]}, quiet))
    with torch.inference_mode():
        judges = [Judge(tiny.teacher_forced(answers[80:]), places) for places in ((), (4,))]
        full = judges[0].judge(Schedule.full_depth(LAYERS), Compiled())
        assert full.mean_kl < 1e-4
        assert full.agreement == 1.0
        losses = []
        for skipped in (1, 3, 5):
            schedule = bridges.schedule(LAYERS, Candidate.constant(2, skipped, 1e-3, 1.0))
            quality, resumed = (judge.judge(schedule, tiny.compiled(schedule)) for judge in judges)
            torch.testing.assert_close(quality.kl, resumed.kl, rtol=1e-3, atol=1e-4)
            losses.append(quality.mean_kl)
    assert losses == sorted(losses)
    assert losses[0] > 0.01


def test_intervals_hold_the_mean_and_narrow_with_more_answers() -> None:
    draw = torch.Generator().manual_seed(0)
    kl, sample = torch.rand(4000, generator=draw), torch.arange(400).repeat_interleave(10)
    wide = Quality(kl[:400], kl[:400] < 0.5, sample[:400]).figures()
    narrow = Quality(kl, kl < 0.5, sample).figures()
    for name in ("kl", "agreement"):
        for figures in (wide, narrow):
            low, high = figures[f"{name}_interval"]  # type: ignore[misc]
            assert low < figures[name] < high
        assert np.ptp(narrow[f"{name}_interval"]) < 0.5 * np.ptp(wide[f"{name}_interval"])


def test_the_best_growth_is_the_best_of_all(tiny: Engine) -> None:
    """Held against every growth there is, priced with the ledger itself."""
    steps = np.tile(np.arange(6), 40)
    draw = np.random.default_rng(0)
    depths = [0, 1, 2, 4]
    losses = {
        depth: torch.tensor(draw.random(len(steps)) * depth * (1 + (depth > 1) * (steps < 2))) for depth in depths
    }
    qualities = {d: Quality(losses[d], losses[d] < 1, torch.zeros(len(steps), dtype=torch.long)) for d in depths}
    lengths = [(9, 7), (4, 3), (12, 5)]

    def ledger(growth: tuple[int, ...]) -> Ledger:
        order = tuple(unit for layer in range(2, 6) for unit in Block.of_layers(layer, layer + 1).units)
        plateaus = tuple(Plateau(step, 2 * skipped) for step, skipped in enumerate(growth))
        return Ledger(tiny.shape, Schedule(LAYERS, order, plateaus))

    def loss(growth: tuple[int, ...]) -> float:
        passes = [sum(generated - 1 > step for _, generated in lengths) for step in range(6)]
        return sum(passes[t] * float(losses[growth[t]].numpy()[steps == t].mean()) for t in range(6))

    full = sum(ledger((0,) * 6).decode(*sample) for sample in lengths)
    budget = int(full / 1.3)
    ledgers = {depth: ledger((depth,)) for depth in depths}
    [found] = best_growths(qualities, steps, ledgers, lengths, budget, count=1)
    found_steps = tuple(max(skipped for first, skipped in found if first <= step) for step in range(6))
    affordable = [
        growth
        for growth in combinations_with_replacement(depths, 6)
        if sum(ledger(growth).decode(*sample) for sample in lengths) <= budget
        and len(set(growth)) <= 4
        and growth[4] == growth[5]  # no plateau may start at step 5
    ]
    assert loss(found_steps) == pytest.approx(min(map(loss, affordable)))


def test_calibrated_schedules_meet_their_targets_and_beat_bare_skipping(tiny: Engine, answers: list[Answer]) -> None:
    calibration = Calibration(tiny, answers, [1.2, 1.5], quiet)
    lengths = [(len(answer.prompt), len(answer.tokens)) for answer in answers]
    losses = []
    for target, found in zip((1.2, 1.5), calibration.run(), strict=True):
        figures = found.provenance
        assert decode_flop_speedup(tiny.shape, found, lengths) >= target
        assert figures["decode_flop_speedup"] == pytest.approx(
            decode_flop_speedup(tiny.shape, found, lengths), abs=1e-4
        )
        found.check_fits(tiny.shape)
        losses.append(found.provenance["held_out"]["kl"])
        bare = replace(found, plateaus=tuple(p._replace(bridges=()) for p in found.plateaus), bridges={})
        with torch.inference_mode():
            judge = Judge(tiny.teacher_forced(answers[-18:]))
            assert judge.judge(bare, tiny.compiled(bare)).mean_kl > found.provenance["held_out"]["kl"]
    assert losses == sorted(losses)


def test_a_target_is_met_where_layers_attend_differently(make_checkpoint: Callable[..., Path]) -> None:
    """A block that begins above the layers that attend to all has to be deeper."""
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    model = make_checkpoint(family="qwen2", num_hidden_layers=LAYERS, eos=[3, 40, 77], **windows)
    engine = Engine.load(str(model), device="cpu")
    sampling = Sampling(max_new_tokens=16, min_new_tokens=6, temperature=1.0)
    answers = answer_prompts(engine, random_prompts([100] * 60), sampling, 32, quiet)
    [found] = Calibration(engine, answers, [1.3], quiet, whole_head=True).run()
    lengths = [(len(answer.prompt), len(answer.tokens)) for answer in answers]
    assert found.provenance["fit"]["warmup"] > 2
    assert decode_flop_speedup(engine.shape, found, lengths) >= 1.3


def test_a_head_preview_is_tried_and_kept_where_it_comes_closer(tiny: Engine, answers: list[Answer]) -> None:
    [whole] = Calibration(tiny, answers, [1.3], quiet, whole_head=True).run()
    [found] = Calibration(tiny, answers, [1.3], quiet).run()
    assert whole.head_preview is None
    assert whole.provenance["fit"]["head_rank"] is None
    assert found.head_preview is not None
    assert found.provenance["fit"]["head_rank"] == found.head_preview.rank
    lengths = [(len(answer.prompt), len(answer.tokens)) for answer in answers]
    assert decode_flop_speedup(tiny.shape, found, lengths) >= 1.3
    assert found.provenance["held_out"]["kl"] < whole.provenance["held_out"]["kl"]


def test_a_mix_is_chosen_by_bridges_of_some_prompts_and_fitted_to_all(
    tiny: Engine, answers: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    fit, taken = calibrate.fit_prompt_bridge, []

    def noted(engine: Engine, prompts: Sequence[Sequence[int]], *how: Any) -> PromptBridge:
        taken.append(list(prompts))
        return fit(engine, prompts, *how)

    monkeypatch.setattr(calibrate, "fit_prompt_bridge", noted)
    to_fit, to_choose, _ = calibrate.split(answers)
    for most in (30, 10_000):
        taken.clear()
        monkeypatch.setattr(calibrate, "CHOOSE_PROMPTS", most)
        [found] = Calibration(tiny, answers, [1.2], quiet, sample_targets=[1.4]).run()
        *trials, last = taken
        assert trials
        assert all(trial == [answer.prompt for answer in to_fit[:most]] for trial in trials)
        assert last == [answer.prompt for answer in (*to_fit, *to_choose)]
    assert len(last) == len(answers) - found.provenance["held_out"]["answers"]


def test_a_whole_sample_target_counts_what_prompts_share_as_jobs_do(tiny: Engine, answers: list[Answer]) -> None:
    prefix = list(range(4, 44))
    behind = [Answer([*prefix, *answer.prompt], answer.tokens) for answer in answers]
    with sharing(tiny, prefix) as flops:
        assert flops
        [found] = Calibration(tiny, behind, [1.2], quiet, sample_targets=[1.3]).run()
    ledger = Ledger(tiny.shape, found)
    scheduled, full = (
        sum(each.prompt(len(a.prompt), 40) + each.decode(len(a.prompt), len(a.tokens)) for a in behind)
        for each in (ledger, ledger.full_depth)
    )
    assert full / scheduled >= 1.3
    assert found.provenance["sample_flop_speedup"] == round(full / scheduled, 4)


def test_whole_sample_targets_out_of_reach_are_said_before_states_are_collected(
    tiny: Engine, answers: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    [found] = Calibration(tiny, answers, [1.2], quiet, sample_targets=[1.5]).run()
    most = found.provenance["sample_flop_speedup"]
    monkeypatch.setattr(calibrate, "collect_moments", lambda *_: pytest.fail("states are collected"))
    with pytest.raises(ScheduleError, match=r"9x of the whole sample cannot be met with 1\.2x in decoding"):
        Calibration(tiny, answers, [1.2], quiet, sample_targets=[1.1, most, 9.0])


def test_a_search_that_keeps_few_bridges_ends_with_the_same_schedule(
    tiny: Engine, answers: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    [kept] = Calibration(tiny, answers, [1.3], quiet).run()
    monkeypatch.setattr(bridged, "MOST_FITTED", 2)
    calibration = Calibration(tiny, answers, [1.3], quiet)
    [found] = calibration.run()
    assert found == kept
    assert len(calibration._final_bridges._fitted) <= 2


def test_distributions_that_are_no_numbers_are_not_written_as_a_schedule(
    tiny: Engine, answers: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration, judged = Calibration(tiny, answers, [1.2], quiet, whole_head=True), Calibration._judged
    lost = lambda *how: replace(quality := judged(*how), kl=torch.full_like(quality.kl, torch.inf))  # noqa: E731
    monkeypatch.setattr(Calibration, "_judged", lost)
    with pytest.raises(ScheduleError, match=r"at 1\.2x distributions on held-out answers are no numbers"):
        list(calibration.run())


def test_too_few_answers_or_too_high_a_target_are_said(tiny: Engine, answers: list[Answer]) -> None:
    with pytest.raises(ScheduleError, match=r"needs 20 answers .* got 5"):
        Calibration(tiny, answers[:5], [1.2], quiet)
    with pytest.raises(ScheduleError, match="of 9x cannot be met"):
        Calibration(tiny, answers, [9.0], quiet)
    for layers in (0, tiny.shape.layers):
        with pytest.raises(ScheduleError, match=f"layers, not {layers}"):
            Calibration(tiny, answers, [1.2], quiet, prompt_layers=layers)


@pytest.mark.parametrize("window", [None, 4, 9, 30])
def test_a_target_is_refused_before_answers_are_there_only_if_none_could_meet_it(
    tiny: Engine, window: int | None
) -> None:
    kinds = tuple(AttentionKind(1.0, window if layer < LAYERS - 1 else None) for layer in range(LAYERS))
    shape, prompts = replace(tiny.shape, attention_kinds=kinds), [[1] * 3, [1] * 19]
    for lengths in ([(3, 2)], [(3, 9)], [(19, 24)], [(3, 24), (19, 2)], [(3, 2), (19, 24)]):
        met = max(Candidate.constant(2, depth, 1e-2, 1.2).speedup(shape, lengths) for depth in range(1, LAYERS - 2))
        check_targets([1.01, met], shape, prompts, 24, whole_head=True)
    with pytest.raises(ScheduleError, match="of 9x cannot be met"):
        check_targets([1.01, 9.0], shape, prompts, 24)


def test_a_target_that_needs_a_head_preview_is_met_with_one(tiny: Engine, answers: list[Answer]) -> None:
    lengths = [(len(answer.prompt), len(answer.tokens)) for answer in answers]
    depths = range(1, LAYERS - 2)
    most = max(Candidate.constant(2, depth, 1e-2, 1.2).speedup(tiny.shape, lengths) for depth in depths)
    target = most + 0.01
    prompts = [answer.prompt for answer in answers]
    check_targets([target], tiny.shape, prompts, 24)
    [found] = Calibration(tiny, answers, [target], quiet).run()
    assert found.head_preview is not None
    assert found.provenance["decode_flop_speedup"] >= target
    with pytest.raises(ScheduleError, match="cannot be met"):
        Calibration(tiny, answers, [target], quiet, whole_head=True)


def test_bridges_above_the_first_are_fitted_to_what_reaches_them(tiny: Engine, answers: list[Answer]) -> None:
    own = OwnStates(tiny, [4])
    moments = collect_moments(tiny, answers[:80], {2: [4, 5]}, quiet, own)
    apart = (Block.before(Unit("a", 5)), Block.of_layers(6, 7))
    candidate = Candidate(2, ((0, 0), (2, 2), (4, 3)), 1e-3, 1.0, apart)
    schedule = Bridges(moments, own).schedule(LAYERS, candidate)
    assert [plateau.skipped for plateau in schedule.plateaus] == [0, 6, 8]
    assert schedule.plateaus[1].bridges == ("2-4", "before a5 over 2-4", "a6..m6 over 2-4")


def test_a_correction_is_the_ridge_regression_of_full_depth_on_the_schedules_own_states(
    tiny: Engine, answers: list[Answer]
) -> None:
    own = OwnStates(tiny, [4])
    moments = collect_moments(tiny, answers, {2: [4]}, quiet, own)
    below = Bridges(moments).schedule(LAYERS, Candidate.constant(2, 2, 1e-3, 1.0))
    block, states = Block.before(Unit("a", 6)), dict[str, Tensor]()
    with torch.inference_mode():
        forced = tiny.teacher_forced(answers)
        for name, schedule in (("own", below), ("full", Schedule.full_depth(LAYERS))):
            states[name] = forced.hidden(schedule, tiny.compiled(schedule), end=block.first.place)
    expected = Moments(12, (12,), tiny.shape.hidden, CPU)
    expected.add(states["own"], {12: states["full"]}, 1 / states["full"].double().square().mean(-1))
    found = own.fit(below, block, 1e-3)
    torch.testing.assert_close(found.tensors["weight"], expected.fit(12, 1e-3).tensors["weight"], rtol=2e-3, atol=1e-3)
    corrected = states["own"] + states["own"] @ found.tensors["weight"].float() + found.tensors["bias"].float()
    errors = [float((x - states["full"]).square().mean()) for x in (corrected, states["own"])]
    assert errors[0] < errors[1]


def test_no_more_answers_are_kept_than_there_is_room_for(
    tiny: Engine, answers: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_states, "KEPT_TOKENS", 100)
    few, one = OwnStates(tiny, [4]), OwnStates(tiny, [4])
    size = [len(answer.prompt) + len(answer.tokens) for answer in answers]
    for own, some in ((few, answers), (one, answers[:1])):
        for answer in some:
            collect_moments(tiny, [answer], {2: [4]}, quiet, own)
    held = next(count for count in range(len(size)) if sum(size[: count + 1]) > 100)
    schedule = Bridges(collect_moments(tiny, answers, {2: [4]}, quiet)).schedule(
        LAYERS, Candidate.constant(2, 2, 1e-3, 1.0)
    )
    again = OwnStates(tiny, [4])
    for answer in answers[:held]:
        collect_moments(tiny, [answer], {2: [4]}, quiet, again)
    block = Block.before(Unit("a", 6))
    assert few.fit(schedule, block, 1e-3) == again.fit(schedule, block, 1e-3)
    assert few.fit(schedule, block, 1e-3) != one.fit(schedule, block, 1e-3)
