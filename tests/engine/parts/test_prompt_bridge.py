"""Prompts whose tokens stop below the upper layers, all but the last: keys and values there come from a linear map."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine import Block, Engine, Plateau, PromptBridge, Sampling, Schedule, ScheduleError, Unit
from engine.calibration.prompts import PromptCut, counted_prompt_bridge, fit_prompt_bridge, prompt_cut
from engine.forward.ledger import Ledger
from engine.forward.quality import Judge
from engine.forward.teacher_forcing import Answer
from engine.models.opt import OPTDecoder
from engine.parts.prompt_bridge import ROLES, WITHIN
from engine.schedules import recipes
from tests.engine.conftest import random_bridge, random_prompt_bridge
from tests.engine.models.test_families import LAYERS, VARIANTS, loaded, masked_logits, reference
from tests.engine.prompts import random_prompts, sharing
from tests.engine.quiet import quiet

FIRST = 3
STOPS = PromptCut(FIRST, range(0), False)
SAMPLING = Sampling(max_new_tokens=12, min_new_tokens=12)


def bridged(engine: Engine, schedule: Schedule | None = None, seed: int = 0, skips: Block | None = None) -> Schedule:
    plain = schedule or Schedule.full_depth(LAYERS)
    kept = skips is not None and not set(skips.units) <= plain.skipped_units(0)
    layers = range(skips.first.layer, skips.last.layer + 1) if skips is not None and kept else range(0)
    bridge = random_prompt_bridge(engine.shape, FIRST, seed, layers)
    if skips is not None:
        bridge = replace(bridge, skips=random_bridge(skips, engine.shape.hidden, rank=0, seed=seed))
    return Schedule(LAYERS, plain.skip_order, plain.plateaus, prompt_bridge=bridge)


@contextmanager
def replaced_keys_and_values(
    model: PreTrainedModel, engine: Engine, bridge: PromptBridge, prompt: list[int]
) -> Iterator[None]:
    """transformers' model with the upper layers' projections overridden for all prompt tokens but the first and the
    last, and the skipped layers for all but the first.
    """
    layers = model.get_decoder().layers
    inputs: dict[int, Tensor] = {}
    begin, hooks = int(len(prompt) > 1), []
    for layer in bridge.skipped_layers:

        def skip(_: Any, args: tuple[Tensor], output: Any, layer: int = layer) -> Any:
            assert bridge.skips is not None
            hidden = output[0] if isinstance(output, tuple) else output
            before = args[0][:, begin : len(prompt)]
            if layer == bridge.skipped_layers[-1]:
                before = before + before @ bridge.skips.tensors["weight"] + bridge.skips.tensors["bias"]
            hidden = torch.cat([hidden[:, :begin], before, hidden[:, len(prompt) :]], 1)
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        hooks.append(layers[layer].register_forward_hook(skip))
    starts = [bridge.first, *bridge.skipped_layers[:1]]
    looks = [
        layers[start].register_forward_pre_hook(lambda _, args, start=start: inputs.update({start: args[0][0]}))
        for start in starts
    ]
    with torch.no_grad():
        model(torch.tensor([prompt]), use_cache=False)
    for look in looks:
        look.remove()
    mapped: dict[int, Tensor] = {}  # by layer, keys and values of prompt tokens from the second on
    within = bridge.skipped_layers if bridge.keeps_skipped else range(0)
    for (weight, bias), own_layers, states in (
        (ROLES, range(bridge.first, LAYERS), inputs[bridge.first][begin:-1]),
        (WITHIN, within, inputs[starts[-1]][begin:]),
    ):
        if own_layers:
            both = states @ bridge.tensors[weight] + bridge.tensors[bias]
            shaped = both.view(-1, len(own_layers), 2, engine.shape.kv_heads, engine.shape.head_dim)
            mapped |= dict(zip(own_layers, shaped.unbind(1), strict=True))
    heads_first = model.config.model_type == "gemma3_text"
    for layer, both in mapped.items():
        attention = layers[layer].self_attn
        keys, values = both.unbind(1)
        if not isinstance(engine.decoder, OPTDecoder):  # ours lie as rotary embeddings like them: pairs side by side
            turned, others = keys.tensor_split([engine.shape.rotary_dim or keys.shape[-1]], -1)
            keys = torch.cat([turned[..., 0::2], turned[..., 1::2], others], -1)
        if (fused := getattr(attention, "qkv_proj", None)) is not None:
            width = engine.shape.cache_elements(1) // 2
            places = [(fused, keys, slice(-2 * width, -width)), (fused, values, slice(-width, None))]
        else:
            k_last = getattr(attention, "k_norm", attention.k_proj)
            places = [(k_last, keys, slice(None)), (attention.v_proj, values, slice(None))]
        for module, own, columns in places:

            def override(_: Any, __: Any, output: Tensor, own: Tensor = own, columns: slice = columns) -> Tensor:
                output = output.clone()
                # Gemma 3 norms its keys with the heads before the tokens.
                by_token = output[0].transpose(0, 1) if heads_first and output.dim() == 4 else output[0]
                into = by_token[begin : begin + len(own), ..., columns]
                into.copy_(own.reshape(into.shape))
                return output

            hooks.append(module.register_forward_hook(override))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize(
    ("skips", "skipped"),
    [(None, 4), (Block.of_layers(1, 3), 4), (Block.of_layers(1, 3), 0), (Block.of_layers(1, 3), 2)],
    ids=["all below", "all below but two", "that decoding runs", "of which decoding runs one"],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_family_with_it_is_the_forward_with_other_keys_and_values(
    make_checkpoint: Callable[..., Path], variant: str, skips: Block | None, skipped: int
) -> None:
    directory = make_checkpoint(**VARIANTS[variant])
    model, engine = reference(directory), loaded(directory)
    order = tuple(unit for layer in (1, 2, 4) for unit in (Unit("a", layer), Unit("m", layer)))
    schedule = bridged(engine, Schedule(LAYERS, order, (Plateau(0, skipped), Plateau(5, 6))), skips=skips)
    assert schedule.prompt_bridge is not None
    prompts = random_prompts([1, 2, 15, 17, 40])
    found = list(engine.generate(prompts, SAMPLING, schedule))
    assert len(found) == len(prompts)
    for generation in found:
        prompt = prompts[generation.index]
        with replaced_keys_and_values(model, engine, schedule.prompt_bridge, prompt):
            logits = masked_logits(model, prompt, generation.tokens, schedule)
        logits[:, model.generation_config.eos_token_id] = -torch.inf  # as min_new_tokens does
        assert tuple(logits.argmax(-1).tolist()) == generation.tokens


@pytest.fixture(scope="module")
def tiny(make_checkpoint: Callable[..., Path]) -> Engine:
    return Engine.load(str(make_checkpoint(num_hidden_layers=LAYERS)), device="cpu")


def test_a_prefix_is_shared_at_full_depth_and_costs_what_it_did(tiny: Engine) -> None:
    """What all prompts begin with is computed once: nothing is gained by stopping there."""
    prefix, rest = random_prompts([8, 6])
    schedule = bridged(tiny)
    [alone] = tiny.generate([prefix + rest], SAMPLING, schedule)
    with sharing(tiny, prefix) as flops:
        [shared] = tiny.generate([prefix + rest], SAMPLING, schedule)
        [twin] = tiny.generate([prefix + rest], SAMPLING, bridged(tiny))
    assert flops == tiny._ledger(None).prefix(len(prefix))
    assert (shared.shared_prefix_tokens, twin.tokens) == (len(prefix), shared.tokens)
    assert shared.flops_prompt < alone.flops_prompt < alone.flops_full_depth - alone.flops_decode


def test_schedules_that_treat_prompts_alike_share_a_pass_and_others_do_not(tiny: Engine) -> None:
    prompts = random_prompts([5, 9, 14])
    skipping = recipes.unified_layer_skipping(LAYERS, active=3)
    schedules = [None, bridged(tiny), skipping, bridged(tiny, skipping), bridged(tiny, seed=1)]
    skips, later = Block.of_layers(1, 3), replace(SKIPPING, skip_order=Block.of_layers(1, 4).units)
    schedules += [bridged(tiny, SKIPPING, skips=skips), bridged(tiny, later, skips=skips)]
    together = {
        (index, generation.index): generation
        for index, generation in tiny.generate_each(prompts, SAMPLING, schedules, batch_size=2)
    }
    assert together == {
        (index, generation.index): generation
        for index, schedule in enumerate(schedules)
        for generation in tiny.generate(prompts, SAMPLING, schedule, batch_size=2)
    }
    assert len({together[index, 2].tokens for index in range(len(schedules))}) > 1


def test_scores_are_under_the_prompts_own_keys_and_values(tiny: Engine) -> None:
    prompts = random_prompts([5, 9])
    found = sorted(tiny.generate(prompts, SAMPLING), key=lambda generation: generation.index)
    full, plain, other = tiny.score(
        prompts, [g.tokens for g in found], [Schedule.full_depth(LAYERS), bridged(tiny), bridged(tiny, seed=1)]
    ).schedules
    assert all(max(score.kl) < 1e-6 for score in full)
    assert min(max(score.kl) for score in plain) > 1e-4
    assert [score.kl for score in plain] != [score.kl for score in other]


def kl_of(
    engine: Engine, prompts: list[list[int]], bridges: Sequence[PromptBridge | None], schedule: Schedule
) -> list[float]:
    """Of full depth's answers under a schedule with each of the bridges, in all."""
    found = sorted(engine.generate(prompts, SAMPLING), key=lambda generation: generation.index)
    schedules = [replace(schedule, prompt_bridge=bridge) for bridge in bridges]
    scored = engine.score(prompts, [generation.tokens for generation in found], schedules).schedules
    return [sum(sum(score.kl) for score in scores) for scores in scored]


def test_the_fit_is_least_squares(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.calibration.prompts.RIDGE", 1e-9)
    prompts = random_prompts([60] * 12)
    stop = torch.ones(12, 60, dtype=torch.bool)
    stop[:, [0, -1]] = False  # the first and the last token of each run every layer
    stops = stop.flatten()
    keys_and_values: dict[int, list[Tensor]] = {layer: [] for layer in range(FIRST, LAYERS)}
    states: list[Tensor] = []

    def observe(place: int, x: Tensor) -> None:
        layer = place // 2
        if place == 2 * FIRST:
            states.append(x[stops].double())
        if layer >= FIRST and place == 2 * layer:
            k, v = tiny.decoder.keys_and_values(layer, x[stops])
            keys_and_values[layer].append(torch.cat([k.flatten(1), v.flatten(1)], 1))

    with torch.inference_mode():
        tiny.observe_prompts(prompts, observe)
        x = torch.cat([torch.cat(states), torch.ones(int(stops.sum()), 1)], 1)
        y = torch.cat([torch.cat(parts).double() for parts in keys_and_values.values()], 1)
        best = torch.linalg.lstsq(x, y).solution
    fitted = fit_prompt_bridge(tiny, prompts, STOPS, quiet)
    found = torch.cat([fitted.tensors["weight"], fitted.tensors["bias"][None]]).double()
    assert found.shape == best.shape
    error, least = ((x @ each - y).square().mean() for each in (found, best))
    assert least > 0
    assert error < 1.001 * least  # it is stored in half precision


CUTS = [STOPS, PromptCut(LAYERS - 1, range(1, 3), True)]


@pytest.mark.parametrize("cut", CUTS, ids=["stops", "stops and skips"])
def test_the_fit_passes_over_prompts_of_which_no_token_stops(
    tiny: Engine, cut: PromptCut, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A pass for each of the long ones, and one for the short one.
    monkeypatch.setattr("engine.calibration.prompts.PROMPT_TOKENS", 60)
    long = random_prompts([60] * 4)
    assert fit_prompt_bridge(tiny, [*long, [5, 6]], cut, quiet) == fit_prompt_bridge(tiny, long, cut, quiet)


@pytest.mark.parametrize("cut", CUTS, ids=["stops", "stops and skips"])
@pytest.mark.parametrize("short", [[], [[5, 6], [7]], [[5, 6, 7]]])
def test_prompts_with_too_little_to_fit_to_are_refused(tiny: Engine, short: list[list[int]], cut: PromptCut) -> None:
    with pytest.raises(ScheduleError, match="name more prompts, or longer ones"):
        fit_prompt_bridge(tiny, short, cut, quiet)


def test_a_fitted_one_skips_half_of_what_prompts_leave_out(tiny: Engine) -> None:
    """By a bridge fitted to prompt tokens, and the maps above to the states that this leaves."""
    prompts = random_prompts([30] * 40)
    skipping = recipes.skipdecode(LAYERS, warmup=1, max_active=LAYERS - 2, min_active=LAYERS - 3, horizon=4)
    cut = prompt_cut(tiny.shape, LAYERS - 3, [skipping])
    assert cut == (LAYERS - 2, range(1, 2), False)
    assert prompt_cut(tiny.shape, LAYERS - 1, [skipping]) == (LAYERS - 1, range(1, 1), False)
    fitted = fit_prompt_bridge(tiny, prompts, cut, quiet)
    assert (fitted.first, fitted.layers, fitted.skipped_layers) == (LAYERS - 2, LAYERS - 3, range(1, 2))
    assert fitted == replace(fitted, tensors={role: fitted.tensors[role] for role in ROLES})
    random = random_bridge(Block.of_layers(1, 2), tiny.shape.hidden, rank=0, seed=1)
    ours, other = kl_of(tiny, prompts, [fitted, replace(fitted, skips=random)], skipping)
    assert ours < other


def test_a_fitted_one_stays_closer_to_full_depth_than_a_random_one(tiny: Engine) -> None:
    prompts = random_prompts([30] * 40)
    bridges = fit_prompt_bridge(tiny, prompts, STOPS, quiet), bridged(tiny).prompt_bridge
    fitted, random = kl_of(tiny, prompts, bridges, Schedule(LAYERS))
    assert fitted < 0.5 * random


SKIPPING = Schedule(LAYERS, Block.of_layers(1, 3).units, (Plateau(0, 4),))


@pytest.mark.parametrize("skips", [None, Block.of_layers(1, 3)], ids=["stops", "stops and skips"])
def test_it_is_written_beside_its_schedule_and_missed_there(tiny: Engine, tmp_path: Path, skips: Block | None) -> None:
    schedule = bridged(tiny, SKIPPING, skips=skips)
    schedule.write(tmp_path)
    again = Schedule.read(tmp_path)
    assert again == schedule
    assert not again.is_full_depth
    assert again != Schedule.full_depth(LAYERS)
    described = json.loads((tmp_path / "schedule.json").read_text())
    assert described["prompts"]["bridged_from"] == FIRST
    assert described["prompts"].get("skips", {}).get("replaces") == (skips and ["a1", "m2"])
    bridged(tiny, SKIPPING, seed=1, skips=skips).write(tmp_path / "other")
    (tmp_path / "bridges.safetensors").write_bytes((tmp_path / "other/bridges.safetensors").read_bytes())
    with pytest.raises(ScheduleError, match="not those the schedule was made with"):
        Schedule.read(tmp_path)
    (tmp_path / "bridges.safetensors").unlink()
    with pytest.raises(ScheduleError, match=r"bridges\.safetensors"):
        Schedule.read(tmp_path)


@pytest.mark.parametrize(
    ("first", "tensors", "complaint"),
    [
        (0, {"weight": torch.zeros(4, 6), "bias": torch.zeros(6)}, "starts at 1, not 0"),
        (1, {"weight": torch.zeros(4, 6)}, "it needs weight and bias"),
        (1, {"weight": torch.zeros(4, 6), "bias": torch.zeros(5)}, "do not fit together"),
        (1, {"weight": torch.full((4, 6), torch.nan), "bias": torch.zeros(6)}, "no finite number"),
        (1, {"weight": torch.zeros(4, 6, dtype=torch.int8), "bias": torch.zeros(6)}, "no finite number"),
    ],
)
def test_what_cannot_be_one_is_refused(first: int, tensors: dict[str, Tensor], complaint: str) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        PromptBridge(first, tensors)


@pytest.mark.parametrize("block", [Block(Unit("m", 1), Unit("m", 2)), Block.of_layers(2, 4), Block.of_layers(0, 1)])
def test_prompts_skip_whole_layers_below_their_stop(tiny: Engine, block: Block) -> None:
    with pytest.raises(ScheduleError, match="can skip whole layers from 1 to 2, not"):
        bridged(tiny, skips=block)


def test_what_decode_tokens_run_has_keys_and_values(tiny: Engine) -> None:
    """They would attend to some that nobody has computed."""
    later = replace(SKIPPING, plateaus=(Plateau(0, 2), Plateau(3, 4)))
    prompts = bridged(tiny, later, skips=Block.of_layers(1, 3)).prompt_bridge
    assert prompts is not None
    with pytest.raises(ScheduleError, match=r"prompts skip a1\.\.m2, but decode tokens run a2, m2 at step 0"):
        replace(later, prompt_bridge=replace(prompts, tensors={role: prompts.tensors[role] for role in ROLES}))
    with pytest.raises(ScheduleError, match="of a block, but prompts skip none"):
        replace(prompts, skips=None)


def test_prompts_and_decode_tokens_may_skip_by_one_bridge(tiny: Engine, tmp_path: Path) -> None:
    schedule = bridged(tiny, replace(SKIPPING, plateaus=(Plateau(0, 2), Plateau(3, 4))), skips=Block.of_layers(1, 3))
    assert schedule.prompt_bridge is not None
    assert schedule.prompt_bridge.skips is not None
    outcomes = []
    for prompts_own in (schedule.prompt_bridge.skips, replace(schedule.prompt_bridge.skips)):
        bridge, plateaus = schedule.prompt_bridge.skips, (Plateau(0, 2), Plateau(3, 4, ("b",)))
        both = replace(
            schedule,
            plateaus=plateaus,
            bridges={"b": bridge},
            prompt_bridge=replace(schedule.prompt_bridge, skips=prompts_own),
        )
        found = tiny.generate(random_prompts([9, 4]), SAMPLING, both)
        outcomes.append({generation.index: generation.tokens for generation in found})
        both.write(tmp_path)
        assert Schedule.read(tmp_path) == both
    assert outcomes[0] == outcomes[1]


def test_prompts_may_skip_more_than_decoding_does(tiny: Engine) -> None:
    """Beginning where it begins, or above the warm-up; keys and values of the block come from a map fitted to them."""
    prompts, full = random_prompts([30] * 40), Schedule.full_depth(LAYERS)
    one = Schedule(LAYERS, Block.of_layers(1, 2).units, (Plateau(0, 2),))
    cut = prompt_cut(tiny.shape, 1, [one])
    assert cut == prompt_cut(tiny.shape, 1, [one, SKIPPING]) == (3, range(1, 3), True)
    assert prompt_cut(tiny.shape, 1, [SKIPPING]) == (3, range(1, 3), False)
    assert prompt_cut(tiny.shape, 3, [full]) == (4, range(3, 4), True)
    fitted = fit_prompt_bridge(tiny, prompts, cut, quiet)
    counted = counted_prompt_bridge(tiny.shape, cut)
    assert {role: list(tensor.shape) for role, tensor in fitted.tensors.items()} == {
        role: list(tensor.shape) for role, tensor in counted.tensors.items()
    }
    ledgers = [Ledger(tiny.shape, replace(one, prompt_bridge=bridge)) for bridge in (fitted, counted)]
    assert ledgers[0].prompt(30) == ledgers[1].prompt(30)
    draw = torch.Generator().manual_seed(0)
    blurred = {**fitted.tensors, WITHIN[0]: torch.randn(fitted.tensors[WITHIN[0]].shape, generator=draw) * 0.2}
    ours, other = kl_of(tiny, prompts, [fitted, replace(fitted, tensors=blurred)], one)
    assert ours < other


@pytest.mark.parametrize("skipped", [0, 2, 4])
def test_a_judge_goes_on_from_where_prompts_begin_to_differ(tiny: Engine, skipped: int) -> None:
    """Be it by what they skip or by where they stop."""
    schedule = bridged(tiny, replace(SKIPPING, plateaus=(Plateau(0, skipped),)), skips=Block.of_layers(1, 3))
    assert schedule.changed_from == 2
    assert bridged(tiny).changed_from == 2 * FIRST
    draw = torch.Generator().manual_seed(3)
    answers = [Answer(*torch.randint(1, 96, (2, 9), generator=draw).tolist()) for _ in range(4)]
    with torch.inference_mode():
        found = [
            Judge(tiny.teacher_forced(answers), places).judge(schedule, tiny.compiled(schedule))
            for places in ((), tuple(range(2, 2 * LAYERS)))
        ]
    assert found[0].mean_kl > 1e-3
    torch.testing.assert_close(found[0].kl, found[1].kl, rtol=1e-4, atol=1e-6)


def test_a_judge_hears_the_first_tokens_that_bridged_prompts_give(tiny: Engine) -> None:
    """All that there is to hear of an answer of one word."""
    schedule, prompts = bridged(tiny), random_prompts([9, 14, 20], seed=4)
    answers = [Answer(prompt, [7, 3]) for prompt in prompts]
    with torch.inference_mode():
        compiled = tiny.compiled(schedule)
        found = Judge(tiny.teacher_forced(answers)).judge(schedule, compiled)
        passes = tiny.teacher_forced(answers), tiny.teacher_forced(answers, schedule.prompt_plan, compiled)
        logits = [tiny.decoder.logits(each.first_hidden) for each in passes]
    full, ours = (each.log_softmax(-1) for each in logits)
    assert found.sample.tolist() == [0, 1, 2, 0, 1, 2]
    torch.testing.assert_close(found.kl[3:], (full.exp() * (full - ours)).sum(-1), rtol=1e-2, atol=1e-4)
    assert found.agrees[3:].tolist() == (full.argmax(-1) == ours.argmax(-1)).tolist()


def test_one_of_another_model_is_refused(tiny: Engine) -> None:
    fitting = random_prompt_bridge(tiny.shape, FIRST)
    for wrong in (PromptBridge(FIRST - 1, fitting.tensors), PromptBridge(LAYERS, fitting.tensors)):
        with pytest.raises(ScheduleError, match=f"starts at layer {wrong.first}"):
            Schedule(LAYERS, prompt_bridge=wrong).check_fits(tiny.shape)
    narrow = replace(fitting, skips=random_bridge(Block.of_layers(1, 3), tiny.shape.hidden - 1, rank=0, seed=0))
    with pytest.raises(ScheduleError, match="skip a block by a bridge of width"):
        replace(SKIPPING, prompt_bridge=narrow).check_fits(tiny.shape)
    for described in ("first", {"bridged_from": "3"}):
        with pytest.raises(ScheduleError, match="bridged_from"):
            Schedule.from_dict({**Schedule.full_depth(LAYERS).to_dict(), "prompts": described})
