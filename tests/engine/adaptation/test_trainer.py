"""Training bridges is exact, helps, leaves the model alone, and ends in time where it does not help."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import Block, Engine, Plateau, Sampling, Schedule, ScheduleError
from engine.adaptation.trainer import Trainer
from engine.calibration.collect import answer_prompts
from engine.calibration.prompts import counted_prompt_bridge, prompt_cut
from engine.forward.quality import Judge
from engine.forward.teacher_forcing import Answer
from engine.kernels import FrozenHalfKernels, Kernels, training_kernels_for
from engine.schedules import recipes
from tests.engine.adaptation.training import RECIPE, bridged, train, trainer_of
from tests.engine.adapters import random_adapter
from tests.engine.conftest import random_prompt_bridge, silent_bridge
from tests.engine.prompts import random_prompts
from tests.engine.quiet import quiet

CPU = torch.device("cpu")
STORED = 1e-3  # relative error of what is kept in half precision


@pytest.mark.parametrize("fast", [FrozenHalfKernels(), training_kernels_for(CPU)], ids=["a GPU's", "this CPU's"])
def test_training_with_fast_products_ends_where_training_with_exact_ones_does(
    fast: Kernels, engine: Engine, make_checkpoint: Callable[..., Path], schedule: Schedule, answers: list[Answer]
) -> None:
    recipe, ends = replace(RECIPE, tokens_per_step=500, adapter_rank=3), []
    for each in (Engine.load(str(make_checkpoint()), device="cpu", kernels=fast), engine):
        trainer = Trainer(each, [schedule], answers[6:], answers[:6], recipe, quiet)
        curve = list(trainer.run())
        ends.append(trainer.best()[0][1].mean_kl / curve[0].kl)
    assert ends[0] == pytest.approx(ends[1], rel=0.05)
    assert ends[0] < 0.97


def assert_decoding_runs(best: Schedule, engine: Engine, answers: list[Answer], directory: Path) -> None:
    """Greedy answers under the trained schedule are, token by token, what its teacher-forced pass finds likeliest."""
    best.write(directory)
    read = Schedule.read(directory)
    prompts = [list(answer.prompt) for answer in answers[:6]]
    generated = sorted(engine.generate(prompts, Sampling(max_new_tokens=12), read), key=lambda g: g.index)
    with torch.no_grad():
        forced = engine.teacher_forced([Answer(prompts[g.index], g.tokens) for g in generated if len(g.tokens) > 1])
        x = forced.hidden(read, engine.compiled(read))
        likeliest = torch.cat([logits.argmax(-1) for _, logits in forced.logits(x)])
    assert likeliest.tolist() == forced.next_token.tolist()


def test_training_brings_held_out_answers_closer_and_leaves_the_model_alone(
    engine: Engine, schedule: Schedule, answers: list[Answer]
) -> None:
    prompts = [list(answer.prompt) for answer in answers[:6]]
    before = [g.tokens for g in engine.generate(prompts, Sampling(max_new_tokens=10))]
    recipe = replace(RECIPE, tokens_per_step=500, steps=80)
    trainer = Trainer(engine, [schedule], answers[6:], answers[:6], recipe, quiet)
    points = list(trainer.run())
    ((best, quality),) = trainer.best()
    assert (points[0].step, points[0].loss) == (0, None)
    assert points[-1].loss < 0.9 * points[0].kl
    # Judged as stored, in half precision: no longer to the last digit what the best point was.
    assert quality.mean_kl == pytest.approx(min(point.kl for point in points), rel=STORED)
    assert quality.mean_kl < 0.97 * points[0].kl  # a random model has little that carries over
    assert [g.tokens for g in engine.generate(prompts, Sampling(max_new_tokens=10))] == before
    assert best.bridges.keys() == schedule.bridges.keys()
    assert all(bridge.form == "affine, gated" for bridge in best.bridges.values())
    assert {tensor.dtype for bridge in best.bridges.values() for tensor in bridge.tensors.values()} == {torch.float16}
    with torch.no_grad():
        judge = Judge(engine.teacher_forced(answers[:6]))
        found, untrained = (judge.judge(one, engine.compiled(one)).kl for one in (best, schedule))
    # A judge keeps full depth in half precision, where a last bit of the logits may turn into a thousandth.
    assert torch.allclose(found, quality.kl, rtol=STORED, atol=STORED)
    assert not torch.allclose(untrained, quality.kl, rtol=10 * STORED, atol=10 * STORED)


def test_a_prompt_that_learns_is_passed_once_for_all_of_its_answers(
    engine: Engine, schedule: Schedule, answers: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.adaptation.trainer.PROMPT_TOKENS", 50)
    learns = replace(
        schedule, prompt_bridge=counted_prompt_bridge(engine.shape, prompt_cut(engine.shape, 3, [schedule]))
    )
    thrice = [Answer(answer.prompt, (first, *answer.tokens[1:])) for answer in answers[4:24] for first in (5, 6, 7)]
    made = Trainer(engine, [learns], thrice, answers[:4], replace(RECIPE, tokens_per_step=10_000), quiet)
    [lesson] = made._lessons
    held = [{tuple(answer.prompt) for answer in part.answers} for part in lesson]
    assert len(held) > 1
    assert sum(map(len, held)) == 20
    assert [answer for part in lesson for answer in part.answers] == thrice
    assert all(sum(map(len, prompts)) <= 50 for prompts in held)


def test_a_judgement_that_is_no_number_ends_training_with_its_best_so_far(
    engine: Engine, schedule: Schedule, answers: list[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judging(*factors: float) -> Trainer:
        made, each = trainer_of(engine, [schedule], answers), iter(factors)
        untrained = made.untrained
        monkeypatch.setattr(made, "_qualities", lambda: [replace(q, kl=q.kl * next(each)) for q in untrained])
        return made

    assert [point.step for point in judging(0.5, torch.inf).run(tmp_path / "state")] == [0, 10]
    assert [point.step for point in judging(torch.inf).run(tmp_path / "state")] == [0, 10]  # from what was kept
    with pytest.raises(ScheduleError, match=r"distributions after step 10 are no numbers.* lower learning rate"):
        list(judging(torch.inf).run(tmp_path / "other"))
    assert not (tmp_path / "other").exists()
    made = judging(torch.inf)
    made.untrained = made._qualities()
    with pytest.raises(ScheduleError, match="before any training distributions"):
        list(made.run())


def test_training_that_brings_nothing_ends_but_not_while_steps_are_large(
    engine: Engine, schedule: Schedule, answers: list[Answer]
) -> None:
    recipe = replace(RECIPE, steps=40, learning_rate=0.3, warmup_steps=1, judge_every=2, patience=3)
    _, points = train(engine, schedule, answers, recipe)
    assert min(points, key=lambda point: point.kl).step == 0
    assert points[-1].step == 20 + 3 * 2


def test_an_adapter_learns_what_bridges_alone_cannot(engine: Engine, schedule: Schedule, answers: list[Answer]) -> None:
    """On the answers it trains on: a random model has little that carries over."""
    recipe = replace(RECIPE, steps=60, judge_every=60)
    bridges, adapter = (train(engine, schedule, answers, replace(recipe, adapter_rank=rank))[1] for rank in (0, 8))
    assert bridges[0].kl == adapter[0].kl  # it starts at nothing
    assert adapter[-1].loss < 0.95 * bridges[-1].loss


def test_a_schedule_that_has_an_adapter_goes_on_from_it(
    engine: Engine, schedule: Schedule, answers: list[Answer]
) -> None:
    kept = random_adapter(engine.decoder, [unit for unit in schedule.active_units(1) if unit.layer > 2])
    trainer, points = train(engine, replace(schedule, adapter=kept), answers, replace(RECIPE, steps=1, adapter_rank=3))
    ((best, _),) = trainer.best()
    assert best.adapter is not None
    assert {name: x.shape for name, x in best.adapter.tensors.items()} == {n: x.shape for n, x in kept.tensors.items()}
    assert points[0].kl != train(engine, schedule, answers, replace(RECIPE, steps=1))[1][0].kl  # with what it begins


def test_the_adapter_covers_what_runs_above_the_first_bridge(
    engine: Engine, schedule: Schedule, answers: list[Answer]
) -> None:
    best, _ = train(engine, schedule, answers, replace(RECIPE, steps=1, adapter_rank=2))[0].best()[0]
    assert best.adapter is not None
    above = {unit for unit in schedule.active_units(0) if unit.place >= schedule.first_place}
    assert best.adapter.changes.keys() == above


def test_bridges_that_act_at_once_share_the_step(engine: Engine, answers: list[Answer]) -> None:
    """AdamW's first step is the learning rate for every number that has a gradient, but for what multiplies a state."""
    blocks = {f"{layer}": Block.of_layers(layer, layer + 1) for layer in (2, 4)}
    bridges = {name: silent_bridge(block, engine.shape.hidden) for name, block in blocks.items()}
    order = tuple(unit for block in blocks.values() for unit in block.units)
    plateaus = (Plateau(0, 2, ("2",)), Plateau(3, 4, ("2", "4")))
    recipe = replace(RECIPE, steps=1, warmup_steps=1, gate_width=0, adapter_rank=2)
    both, alone = (
        train(engine, Schedule(engine.shape.layers, order, some, bridges=bridges), answers, recipe)[0].best()[0][0]
        for some in (plateaus, plateaus[:1])
    )
    for schedule, share in ((both, 1 / 2), (alone, 1)):
        assert schedule.adapter is not None
        step = max(
            float(tensor.abs().max()) for name, tensor in schedule.adapter.tensors.items() if name.endswith(".up")
        )
        bias = schedule.bridges["2"].tensors["bias"].float()  # it was zero
        assert step == pytest.approx(recipe.learning_rate, rel=1e-2)
        assert float(bias.abs().max()) == pytest.approx(share * recipe.learning_rate, rel=1e-2)
    halved, whole = (float(each.bridges["2"].tensors["weight"].float().abs().max()) for each in (both, alone))
    assert halved == pytest.approx(whole / 2, rel=1e-2)


def test_the_gated_part_starts_at_nothing(engine: Engine, schedule: Schedule, answers: list[Answer]) -> None:
    bare = train(engine, schedule, answers, replace(RECIPE, steps=1, gate_width=0))[1][0]
    gated = train(engine, schedule, answers, replace(RECIPE, steps=1))[1][0]
    assert (bare.kl, bare.agreement) == (gated.kl, gated.agreement)


@pytest.mark.parametrize("adapter_rank", [0, 3])
def test_what_is_trained_is_what_decoding_runs(
    engine: Engine, schedule: Schedule, answers: list[Answer], tmp_path: Path, adapter_rank: int
) -> None:
    best, _ = train(engine, schedule, answers, replace(RECIPE, adapter_rank=adapter_rank))[0].best()[0]
    assert_decoding_runs(best, engine, answers, tmp_path)


def test_schedules_trained_together_share_an_adapter_and_each_is_what_decoding_runs(
    engine: Engine, schedule: Schedule, deeper: Schedule, answers: list[Answer], tmp_path: Path
) -> None:
    recipe = replace(RECIPE, adapter_rank=3, tokens_per_step=500)
    trainer = Trainer(engine, [schedule, deeper], answers[6:], answers[:6], recipe, quiet)
    points = list(trainer.run())
    found = trainer.best()
    assert points[-1].loss < 0.9 * points[0].kl
    assert sum(quality.mean_kl for _, quality in found) / 2 == pytest.approx(min(point.kl for point in points), STORED)
    first, second = (best for best, _ in found)
    assert first.adapter == second.adapter
    assert first.adapter is not None
    assert {unit.place for unit in first.adapter.changes} == set(range(4, 2 * engine.shape.layers))
    for best, before in ((first, schedule), (second, deeper)):
        assert best.plateaus == before.plateaus
        assert all(bool(best.bridges[name].tensors["weight"].any()) for name in before.bridges)  # all zero before
        assert_decoding_runs(best, engine, answers, tmp_path)


def test_a_step_takes_the_mean_of_the_schedules_gradients(
    engine: Engine, schedule: Schedule, deeper: Schedule, answers: list[Answer]
) -> None:
    """A schedule beside itself learns what it learns alone."""
    recipe = replace(RECIPE, adapter_rank=3, steps=10)
    alone, twice = (trainer_of(engine, schedules, answers, recipe) for schedules in ([schedule], [schedule, schedule]))
    curves = [[value for p in trainer.run() for value in (p.loss, p.kl)] for trainer in (alone, twice)]
    assert curves[0] == pytest.approx(curves[1])
    other = list(trainer_of(engine, [schedule, deeper], answers, recipe).run())
    assert other[-1].kl != pytest.approx(curves[0][-1])


def test_a_bridge_to_the_top_learns(engine: Engine, answers: list[Answer]) -> None:
    """Above it nothing attends to prompts."""
    _, points = train(engine, bridged(engine.shape, 3, engine.shape.layers), answers)
    assert points[-1].loss < 0.9 * points[0].kl


def test_a_lesson_that_ends_before_the_first_bridge_changes_nothing(engine: Engine, answers: list[Answer]) -> None:
    schedule = replace(bridged(engine.shape, 1, 3), plateaus=(Plateau(0, 0), Plateau(4, 4, ("bridge",))))
    short = [Answer(answer.prompt, answer.tokens[:3]) for answer in answers[6:24]]
    recipe = replace(RECIPE, steps=10, tokens_per_step=2, gate_width=0)
    trainer = Trainer(engine, [schedule], short, answers[:6], recipe, quiet)
    first, last = trainer.run()
    assert last.kl == first.kl > 0
    assert last.loss < 0.1 * first.kl  # they are full depth's own


@pytest.mark.parametrize("beside_bridges", [False, True])
def test_a_prompt_bridge_learns_through_the_answers(
    engine: Engine, schedule: Schedule, answers: list[Answer], beside_bridges: bool
) -> None:
    """Alone or with the schedule's bridges; what it was judged as is what its prompts give when they run anew."""
    prompts = random_prompt_bridge(engine.shape, 3)
    others = schedule if beside_bridges else Schedule.full_depth(engine.shape.layers)
    trained, points = train(engine, replace(others, prompt_bridge=prompts), answers)
    ((best, quality),) = trained.best()
    assert points[-1].loss < 0.9 * points[0].kl
    assert best.prompt_bridge is not None
    assert best.prompt_bridge.first == 3
    changes = best.prompt_bridge.tensors["weight"] - prompts.tensors["weight"]
    assert float(changes.abs().max()) > 1e-2
    with torch.no_grad():
        held_out = answers[:6]
        judge = Judge(engine.teacher_forced(held_out))
        again = judge.judge(best, engine.compiled(best))
    assert again.mean_kl == pytest.approx(quality.mean_kl, rel=1e-3)


def test_what_takes_an_entry_of_a_state_that_varies_much_moves_little(
    engine: Engine, schedule: Schedule, answers: list[Answer]
) -> None:
    """A first step of Adam moves all parameters alike; here what they take moves what they give alike."""
    schedule = replace(schedule, prompt_bridge=random_prompt_bridge(engine.shape, 3))
    trainer = trainer_of(engine, [schedule], answers)
    before = trainer._trainable.snapshot()
    trainer._step(0)
    maps = trainer._trainable.affine_maps()
    assert [*maps.values()] == [(2, True), (2, True), (6, False)]  # of two bridges and the prompt bridge
    prompts = [answer.prompt for answer in answers[:6]]  # the held-out ones
    for name, (place, gives_state) in maps.items():
        with torch.no_grad():
            spread = engine.stop_prompts(prompts, place // 2).states.std(0)
        assert spread.max() > 1.5 * spread.min()
        if gives_state:
            spread /= spread.median()
        moved = (trainer._trainable.parameters[name] - before[name]).abs().amax(1) * spread
        assert moved.tolist() == pytest.approx([RECIPE.rate(0)] * len(moved), rel=0.05)


def test_a_training_that_diverges_ends_at_once_with_the_way_out(
    engine: Engine, schedule: Schedule, answers: list[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or with its best so far; no checkpoint is left that holds no numbers."""
    checkpoint = tmp_path / "training.safetensors"
    trainer = trainer_of(engine, [schedule], answers)
    points = trainer.run(checkpoint)
    with monkeypatch.context() as patch:
        next(points)
        patch.setattr(Trainer, "_loss", lambda _, full, ours, tokens: ours.sum() * torch.nan)
        with pytest.raises(ScheduleError, match=r"the loss of step 1 is nan: .* a lower learning rate"):
            list(points)
    trainer = trainer_of(engine, [schedule], answers)
    points = trainer.run(checkpoint)
    better = [next(points), next(points)]
    assert better[1].kl < better[0].kl
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_loss", lambda _, full, ours, tokens: ours.sum() * torch.nan)
        assert list(points) == []
    ((_, quality),) = trainer.best()
    assert quality.mean_kl == pytest.approx(better[1].kl, rel=1e-2)
    trainer = trainer_of(engine, [schedule], answers)
    points = trainer.run(checkpoint)
    with monkeypatch.context() as patch:  # gradients that are no numbers, of a loss that is one
        kept = [next(points), next(points)]
        patch.setattr(Trainer, "_loss", lambda _, full, ours, tokens: (ours - ours.detach()).abs().sqrt().sum())
        assert list(points) == []
    ((_, quality),) = trainer.best()
    assert quality.mean_kl == pytest.approx(kept[1].kl, rel=1e-2)
    assert list(trainer_of(engine, [schedule], answers).run(checkpoint))


def test_what_has_nothing_to_learn_is_refused(engine: Engine, answers: list[Answer]) -> None:
    with pytest.raises(ScheduleError, match="skips nothing"):
        trainer_of(engine, [Schedule.full_depth(engine.shape.layers)], answers)
    layers = engine.shape.layers
    bare, top = recipes.unified_layer_skipping(layers, active=4), recipes.early_termination(layers, active=3)
    for schedule, rank in ((bare, 0), (top, 4)):  # above an exit nothing runs that an adapter could change
        with pytest.raises(ScheduleError, match="no bridges, and there is nothing to adapt"):
            trainer_of(engine, [schedule], answers, replace(RECIPE, adapter_rank=rank))


def test_a_schedule_without_bridges_learns_by_an_adapter_alone(engine: Engine, answers: list[Answer]) -> None:
    """As rivals do, for a fair comparison."""
    bare = recipes.unified_layer_skipping(engine.shape.layers, active=4)
    trained, points = train(engine, bare, answers, replace(RECIPE, adapter_rank=4))
    assert points[-1].loss < 0.95 * points[0].kl
    ((best, _),) = trained.best()
    assert best.adapter is not None
    assert not best.bridges


def test_schedules_that_stop_prompts_elsewhere_are_trained_together(
    engine: Engine, schedule: Schedule, answers: list[Answer]
) -> None:
    """One leaves prompts alone: an adapter of both still changes them, each learns with its own."""
    shorter = replace(schedule, prompt_bridge=random_prompt_bridge(engine.shape, 3))
    trainer = trainer_of(engine, [schedule, shorter], answers, replace(RECIPE, adapter_rank=4))
    points = list(trainer.run())
    assert points[-1].loss < 0.9 * points[0].kl
    (whole, _), (short, _) = trainer.best()
    assert whole.adapter == short.adapter
    assert whole.prompt_plan.adapter == whole.adapter
    assert whole.prompt_plan != short.prompt_plan


def test_gradients_pass_capped_logits(make_checkpoint: Callable[..., Path], schedule: Schedule) -> None:
    """Of Gemma 2."""
    family = {"sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0}
    path = make_checkpoint(family="gemma2", num_hidden_layers=schedule.layers, **family)
    gemma = Engine.load(str(path), device="cpu", kernels=training_kernels_for(CPU))
    answers = answer_prompts(gemma, random_prompts([9] * 24), Sampling(max_new_tokens=8, min_new_tokens=6), 8, quiet)
    _, points = train(gemma, schedule, answers, replace(RECIPE, steps=20))
    assert points[-1].loss < points[0].kl
