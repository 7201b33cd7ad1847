"""Training bridges is exact, helps, leaves the model alone, and goes on from a checkpoint as if never interrupted."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine import Block, Bridge, Engine, Plateau, Sampling, Schedule, ScheduleError
from engine.adaptation import trainable
from engine.adaptation.curve import Point, is_early_look, reachable_kl
from engine.adaptation.recipe import Recipe
from engine.adaptation.trainer import Trainer
from engine.calibration.collect import answer_prompts
from engine.calibration.prompts import counted_prompt_bridge, prompt_cut
from engine.forward.quality import Judge
from engine.forward.teacher_forcing import Answer
from engine.kernels import FrozenHalfKernels, Kernels, training_kernels_for
from engine.schedules import recipes
from engine.schedules.orders import lowest_first
from tests.engine.adapters import random_adapter
from tests.engine.conftest import random_prompt_bridge
from tests.engine.prompts import random_prompts

RECIPE = Recipe(
    steps=40, tokens_per_step=120, learning_rate=3e-3, warmup_steps=5, gate_width=8, adapter_rank=0, judge_every=10
)

CPU = torch.device("cpu")
STORED = 1e-3  # relative error of what is kept in half precision


def quiet(stage: str, done: int, total: int) -> None:
    """Nobody watches."""


@pytest.fixture(scope="module")
def engine(make_checkpoint: Callable[..., Path]) -> Engine:
    """With exact products, which every CPU has; those of training itself differ from one to another."""
    return Engine.load(str(make_checkpoint()), device="cpu", kernels=Kernels())


@pytest.fixture(scope="module")
def answers(engine: Engine) -> list[Answer]:
    draw = torch.Generator().manual_seed(7)
    prompts = [torch.randint(1, 96, (length,), generator=draw).tolist() for length in (*range(4, 28), *[6] * 176)]
    return answer_prompts(engine, prompts, Sampling(max_new_tokens=14, min_new_tokens=6), 8, quiet)


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("half", [False, True])
def test_gradients_pass_frozen_weights_as_plain_ones(rows: int, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if half and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this CPU does not multiply bfloat16 numbers")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: half)
    draw = torch.Generator().manual_seed(rows)
    weight, bias, x, pull = (torch.randn(size, generator=draw) for size in ((48, 32), (48,), (rows, 32), (rows, 48)))
    found = []
    for kernels in (Kernels(), training_kernels_for(CPU)):
        linear, leaf = kernels.linear(weight, bias), x.clone().requires_grad_()
        out = linear(leaf)
        (out * pull).sum().backward()
        assert leaf.grad is not None
        found.append((out.detach(), leaf.grad))
        assert torch.equal(linear(x), out)  # of full depth, to learn from
        with torch.no_grad():
            torch.testing.assert_close(linear(x), x @ weight.T + bias)  # to judge by
    for plain, ours in zip(*found, strict=True):
        if half:
            assert (ours - plain).norm() < 2e-2 * plain.norm()
        else:
            torch.testing.assert_close(ours, plain)


def test_products_of_half_precision_have_gradients_as_close_as_themselves() -> None:
    """As a GPU has them; with weights that are of these numbers, as those of most checkpoints."""
    draw = torch.Generator().manual_seed(1)
    weight, bias, x, pull = (torch.randn(size, generator=draw) for size in ((48, 32), (48,), (7, 32), (7, 48)))
    found = []
    weight = weight.bfloat16().float()
    with torch.no_grad():  # logits to judge by are exact
        assert torch.equal(FrozenHalfKernels().linear(weight, bias)(x), Kernels().linear(weight, bias)(x))
    for kernels in (Kernels(), FrozenHalfKernels()):
        linear, leaf = kernels.linear(weight, bias), x.clone().requires_grad_()
        out = linear(leaf)
        assert out.dtype == torch.float32
        (out * pull).sum().backward()
        assert leaf.grad is not None
        found.append((out.detach(), leaf.grad))
    for plain, ours in zip(*found, strict=True):
        assert 1e-5 < (ours - plain).norm() / plain.norm() < 1e-2


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


@pytest.fixture
def schedule(engine: Engine) -> Schedule:
    """Layers 1 and, from step 4 on, 2 give way to bridges that do nothing yet."""
    width, layers = engine.shape.hidden, engine.shape.layers
    bridges = {
        f"1-{end}": Bridge.affine(Block.of_layers(1, end), torch.zeros(width, width), torch.zeros(width))
        for end in (2, 3)
    }
    order = tuple(unit for group in lowest_first(layers, 1)[:2] for unit in group)
    return Schedule(layers, order, (Plateau(0, 2, ("1-2",)), Plateau(4, 4, ("1-3",))), bridges=bridges)


@pytest.fixture
def deeper(engine: Engine) -> Schedule:
    """Layers 2 and 3 give way to a bridge that does nothing yet."""
    width, layers = engine.shape.hidden, engine.shape.layers
    bridges = {"2-4": Bridge.affine(Block.of_layers(2, 4), torch.zeros(width, width), torch.zeros(width))}
    order = tuple(unit for group in lowest_first(layers, 2)[:2] for unit in group)
    return Schedule(layers, order, (Plateau(0, 4, ("2-4",)),), bridges=bridges)


def train(
    engine: Engine, schedule: Schedule, answers: list[Answer], recipe: Recipe = RECIPE, checkpoint: Path | None = None
) -> tuple[Trainer, list[Point]]:
    trainer = Trainer(engine, [schedule], answers[6:24], answers[:6], recipe, quiet)
    return trainer, list(trainer.run(checkpoint))


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
    recipe = replace(RECIPE, tokens_per_step=500)
    trainer = Trainer(engine, [schedule], answers[6:], answers[:6], recipe, quiet)
    points = list(trainer.run())
    ((best, quality),) = trainer.best()
    assert points[0].step == 0
    assert points[-1].loss < 0.9 * points[0].loss
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


def test_the_rate_rises_and_falls_however_few_the_steps_are() -> None:
    for steps in (1, 3, 10, 12, 200):
        rates = [Recipe(steps=steps).rate(step) for step in range(steps)]
        assert max(rates) <= 1e-3
        assert sorted(rates[min(10, steps // 4) :], reverse=True) == rates[min(10, steps // 4) :]
        assert steps < 10 or rates[-1] < 0.2 * max(rates)
    assert Recipe().rate(4) == 5e-4  # of ten steps of warm-up


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
        made, each = Trainer(engine, [schedule], answers[6:24], answers[:6], RECIPE, quiet), iter(factors)
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
    """AdamW's first step is the learning rate for every number that has a gradient."""
    width, layers = engine.shape.hidden, engine.shape.layers
    bridges = {
        f"{layer}": Bridge.affine(Block.of_layers(layer, layer + 1), torch.zeros(width, width), torch.zeros(width))
        for layer in (2, 4)
    }
    order = tuple(unit for layer in (2, 4) for unit in Block.of_layers(layer, layer + 1).units)
    plateaus = (Plateau(0, 2, ("2",)), Plateau(3, 4, ("2", "4")))
    recipe = replace(RECIPE, steps=1, warmup_steps=1, gate_width=0, adapter_rank=2)
    both, alone = (
        train(engine, Schedule(layers, order, some, bridges=bridges), answers, recipe)[0].best()[0][0]
        for some in (plateaus, plateaus[:1])
    )
    for schedule, share in ((both, 1 / 2), (alone, 1)):
        assert schedule.adapter is not None
        step = max(
            float(tensor.abs().max()) for name, tensor in schedule.adapter.tensors.items() if name.endswith(".up")
        )
        weight = schedule.bridges["2"].tensors["weight"].float()  # it was zero
        assert step == pytest.approx(recipe.learning_rate, rel=1e-2)
        assert float(weight.abs().max()) == pytest.approx(share * recipe.learning_rate, rel=1e-2)


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
    assert points[-1].loss < 0.9 * points[0].loss
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
    alone, twice = (
        Trainer(engine, schedules, answers[6:24], answers[:6], recipe, quiet)
        for schedules in ([schedule], [schedule, schedule])
    )
    curves = [[value for p in trainer.run() for value in (p.loss, p.kl)] for trainer in (alone, twice)]
    assert curves[0] == pytest.approx(curves[1])
    other = list(Trainer(engine, [schedule, deeper], answers[6:24], answers[:6], recipe, quiet).run())
    assert other[-1].kl != pytest.approx(curves[0][-1])


def test_a_bridge_to_the_top_learns(engine: Engine, answers: list[Answer]) -> None:
    """Above it nothing attends to prompts."""
    width, layers = engine.shape.hidden, engine.shape.layers
    block = Block.of_layers(3, layers)
    bridges = {"top": Bridge.affine(block, torch.zeros(width, width), torch.zeros(width))}
    schedule = Schedule(layers, block.units, (Plateau(0, len(block.units), ("top",)),), bridges=bridges)
    points = train(engine, schedule, answers)[1]
    assert points[-1].loss < 0.9 * points[0].loss


def test_a_lesson_that_ends_before_the_first_bridge_changes_nothing(engine: Engine, answers: list[Answer]) -> None:
    width, layers = engine.shape.hidden, engine.shape.layers
    block = Block.of_layers(1, 3)
    bridges = {"late": Bridge.affine(block, torch.zeros(width, width), torch.zeros(width))}
    schedule = Schedule(layers, block.units, (Plateau(0, 0), Plateau(4, 4, ("late",))), bridges=bridges)
    short = [Answer(answer.prompt, answer.tokens[:3]) for answer in answers[6:24]]
    recipe = replace(RECIPE, steps=10, tokens_per_step=2, gate_width=0)
    trainer = Trainer(engine, [schedule], short, answers[:6], recipe, quiet)
    first, last = trainer.run()
    assert last.kl == first.kl > 0
    assert last.loss < 0.1 * first.kl  # they are full depth's own


@pytest.mark.parametrize("bridged", [False, True])
def test_a_prompt_bridge_learns_through_the_answers(
    engine: Engine, schedule: Schedule, answers: list[Answer], bridged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone or with the schedule's bridges; what it was judged as is what its prompts give when they run anew."""
    monkeypatch.setattr(trainable, "PROMPT_PACE", 1.0)  # a random model's states are small all the way up
    prompts = random_prompt_bridge(engine.shape, 3)
    schedule = replace(schedule if bridged else Schedule.full_depth(engine.shape.layers), prompt_bridge=prompts)
    trained, points = train(engine, schedule, answers)
    ((best, quality),) = trained.best()
    assert points[-1].loss < 0.9 * points[0].loss
    assert best.prompt_bridge is not None
    assert best.prompt_bridge.first == 3
    changes = best.prompt_bridge.tensors["weight"] - prompts.tensors["weight"]
    assert float(changes.abs().max()) > 1e-2
    with torch.no_grad():
        held_out = answers[:6]
        judge = Judge(engine.teacher_forced(held_out))
        again = judge.judge(best, engine.compiled(best))
    assert again.mean_kl == pytest.approx(quality.mean_kl, rel=1e-3)


@pytest.mark.parametrize(("adapter_rank", "together"), [(0, False), (3, False), (3, True)])
def test_a_killed_training_goes_on_to_the_same_curve(
    engine: Engine,
    schedule: Schedule,
    deeper: Schedule,
    answers: list[Answer],
    tmp_path: Path,
    adapter_rank: int,
    together: bool,
) -> None:
    recipe = replace(RECIPE, adapter_rank=adapter_rank)
    schedules = [schedule, deeper] if together else [schedule]
    whole, killed, resumed = (Trainer(engine, schedules, answers[6:24], answers[:6], recipe, quiet) for _ in range(3))
    points = list(whole.run())
    checkpoint = tmp_path / "training.safetensors"
    for point in killed.run(checkpoint):
        if point.step > 20:
            break  # after this step's judgement, before its checkpoint
    again = list(resumed.run(checkpoint))

    def curve(points: list[Point]) -> list[tuple[int, float, float, float]]:
        return [(p.step, p.loss, p.kl, p.agreement) for p in points]

    assert curve(again) == curve(points)
    assert [best for best, _ in resumed.best()] == [best for best, _ in whole.best()]


def test_a_prompt_bridge_that_was_fitted_anew_on_another_machine_goes_on(
    engine: Engine, schedule: Schedule, answers: list[Answer], tmp_path: Path
) -> None:
    bridge = random_prompt_bridge(engine.shape, 3)
    last_bits = {role: tensor.nextafter(tensor + 1) for role, tensor in bridge.tensors.items()}
    begun, again = (replace(schedule, prompt_bridge=each) for each in (bridge, replace(bridge, tensors=last_bits)))
    recipe, checkpoint = replace(RECIPE, steps=10), tmp_path / "training.safetensors"
    first, _ = train(engine, begun, answers, recipe, checkpoint)
    second, _ = train(engine, again, answers, recipe, checkpoint)
    assert [best for best, _ in second.best()] == [best for best, _ in first.best()]


def test_a_training_that_diverges_ends_at_once_with_the_way_out(
    engine: Engine, schedule: Schedule, answers: list[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or with its best so far; no checkpoint is left that holds no numbers."""
    recipe, checkpoint = replace(RECIPE, steps=40, judge_every=10), tmp_path / "training.safetensors"
    trainer = Trainer(engine, [schedule], answers[6:24], answers[:6], recipe, quiet)
    points = trainer.run(checkpoint)
    with monkeypatch.context() as patch:
        next(points)
        patch.setattr(Trainer, "_loss", lambda _, full, ours, tokens: ours.sum() * torch.nan)
        with pytest.raises(ScheduleError, match=r"the loss of step 1 is nan: .* a lower learning rate"):
            list(points)
    trainer = Trainer(engine, [schedule], answers[6:24], answers[:6], recipe, quiet)
    points = trainer.run(checkpoint)
    better = [next(points), next(points)]
    assert better[1].kl < better[0].kl
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_loss", lambda _, full, ours, tokens: ours.sum() * torch.nan)
        assert list(points) == []
    ((_, quality),) = trainer.best()
    assert quality.mean_kl == pytest.approx(better[1].kl, rel=1e-2)
    trainer = Trainer(engine, [schedule], answers[6:24], answers[:6], recipe, quiet)
    points = trainer.run(checkpoint)
    with monkeypatch.context() as patch:  # gradients that are no numbers, of a loss that is one
        kept = [next(points), next(points)]
        patch.setattr(Trainer, "_loss", lambda _, full, ours, tokens: (ours - ours.detach()).abs().sqrt().sum())
        assert list(points) == []
    ((_, quality),) = trainer.best()
    assert quality.mean_kl == pytest.approx(kept[1].kl, rel=1e-2)
    assert [
        point.step for point in Trainer(engine, [schedule], answers[6:24], answers[:6], recipe, quiet).run(checkpoint)
    ]


def test_a_checkpoint_of_another_training_is_refused(
    engine: Engine, schedule: Schedule, answers: list[Answer], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "training.safetensors"
    recipe = replace(RECIPE, steps=10)
    train(engine, schedule, answers, recipe, checkpoint)
    with pytest.raises(ScheduleError, match="of another training"):
        train(engine, schedule, answers, replace(recipe, learning_rate=1e-4), checkpoint)
    other = [*answers[:9], *answers[10:], answers[9]]
    with pytest.raises(ScheduleError, match="of another training"):
        train(engine, schedule, other, recipe, checkpoint)
    checkpoint.write_bytes(b"no tensors")
    with pytest.raises(ScheduleError, match="delete it to start anew"):
        train(engine, schedule, answers, recipe, checkpoint)


@pytest.mark.parametrize(
    "damage",
    [{"seconds": 10**400}, {"seconds": True}, {"seconds": "1"}, {"curve": {}}],
    ids=["beyond any float", "a truth", "a text", "no list"],
)
def test_a_checkpoint_whose_state_is_no_state_is_damaged(
    engine: Engine, schedule: Schedule, answers: list[Answer], tmp_path: Path, damage: dict[str, object]
) -> None:
    checkpoint, recipe = tmp_path / "training.safetensors", replace(RECIPE, steps=10)
    train(engine, schedule, answers, recipe, checkpoint)
    with safe_open(checkpoint, "pt") as file:
        metadata = file.metadata()
    state = json.dumps(json.loads(metadata["state"]) | damage)
    save_file(load_file(checkpoint), checkpoint, metadata | {"state": state})
    with pytest.raises(ScheduleError, match="delete it to start anew"):
        train(engine, schedule, answers, recipe, checkpoint)


def test_a_checkpoint_with_a_bit_of_a_tensor_flipped_or_without_a_digest_is_damaged(
    engine: Engine, schedule: Schedule, answers: list[Answer], tmp_path: Path
) -> None:
    checkpoint, recipe = tmp_path / "training.safetensors", replace(RECIPE, steps=10)
    train(engine, schedule, answers, recipe, checkpoint)
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ScheduleError, match=r"digest .* delete it to start anew"):
        train(engine, schedule, answers, recipe, checkpoint)
    checkpoint.write_bytes(whole.replace(b'"digest":', b'"digust":', 1))
    with pytest.raises(ScheduleError, match=r"digest .* delete it to start anew"):
        train(engine, schedule, answers, recipe, checkpoint)
    checkpoint.write_bytes(whole)
    train(engine, schedule, answers, recipe, checkpoint)


def test_what_has_nothing_to_learn_is_refused(engine: Engine, answers: list[Answer]) -> None:
    with pytest.raises(ScheduleError, match="skips nothing"):
        Trainer(engine, [Schedule.full_depth(engine.shape.layers)], answers[6:24], answers[:6], RECIPE, quiet)
    layers = engine.shape.layers
    bare, top = recipes.unified_layer_skipping(layers, active=4), recipes.early_termination(layers, active=3)
    for schedule, rank in ((bare, 0), (top, 4)):  # above an exit nothing runs that an adapter could change
        with pytest.raises(ScheduleError, match="no bridges, and there is nothing to adapt"):
            Trainer(engine, [schedule], answers[6:24], answers[:6], replace(RECIPE, adapter_rank=rank), quiet)


def test_a_schedule_without_bridges_learns_by_an_adapter_alone(engine: Engine, answers: list[Answer]) -> None:
    """As rivals do, for a fair comparison."""
    bare = recipes.unified_layer_skipping(engine.shape.layers, active=4)
    trained, points = train(engine, bare, answers, replace(RECIPE, adapter_rank=4))
    assert points[-1].loss < 0.95 * points[0].loss
    ((best, _),) = trained.best()
    assert best.adapter is not None
    assert not best.bridges


def test_schedules_that_stop_prompts_elsewhere_are_trained_together(
    engine: Engine, schedule: Schedule, answers: list[Answer]
) -> None:
    """One leaves prompts alone: an adapter of both still changes them, each learns with its own."""
    shorter = replace(schedule, prompt_bridge=random_prompt_bridge(engine.shape, 3))
    trainer = Trainer(engine, [schedule, shorter], answers[6:24], answers[:6], replace(RECIPE, adapter_rank=4), quiet)
    points = list(trainer.run())
    assert points[-1].loss < 0.9 * points[0].loss
    (whole, _), (short, _) = trainer.best()
    assert whole.adapter == short.adapter
    assert whole.prompt_plan.adapter == whole.adapter
    assert whole.prompt_plan != short.prompt_plan


def test_the_early_estimate_goes_on_along_a_power_law() -> None:
    def after(step: int) -> Point:
        return Point(step, 1.0, 0.5 * (1 + step / 2) ** -0.1, 0.8, 1.0)

    points = [after(step) for step in (0, 20, 40, 60)]
    assert reachable_kl(points[:2], 300) == pytest.approx(after(300).kl)
    assert [is_early_look(points[: count + 1], 300) for count in range(4)] == [False, False, True, False]
    assert not is_early_look([after(0), after(20)], 20)
    assert reachable_kl(points[:2], 20) == pytest.approx(points[1].kl)


def test_gradients_pass_capped_logits(make_checkpoint: Callable[..., Path], schedule: Schedule) -> None:
    """Of Gemma 2."""
    family = {"sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0}
    path = make_checkpoint(family="gemma2", num_hidden_layers=schedule.layers, **family)
    gemma = Engine.load(str(path), device="cpu", kernels=training_kernels_for(CPU))
    answers = answer_prompts(gemma, random_prompts([9] * 24), Sampling(max_new_tokens=8, min_new_tokens=6), 8, quiet)
    _, points = train(gemma, schedule, answers, replace(RECIPE, steps=20))
    assert points[-1].loss < points[0].loss


def test_what_a_schedule_brings_is_made_once_whatever_runs_at_full_depth_in_between(
    engine: Engine, schedule: Schedule
) -> None:
    schedule = replace(schedule, adapter=random_adapter(engine.decoder, schedule.active_units(1)))
    first = engine.compiled(schedule)
    assert not engine.compiled(Schedule.full_depth(engine.shape.layers)).adapted
    assert engine.compiled(schedule).adapted[schedule.adapter] is first.adapted[schedule.adapter]
