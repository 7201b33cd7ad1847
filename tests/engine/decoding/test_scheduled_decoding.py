"""With a schedule, the engine computes what a plain uncached forward with per-token layer masks computes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from engine import Block, Bridge, Engine, Generation, Sampling, Schedule, Unit
from engine.checkpoints import checkpoint
from engine.schedules import decays, orders, recipes
from tests.conftest import PACKAGED
from tests.engine.adapters import adapted
from tests.engine.prompts import random_prompts
from tests.engine.tapped import tapped

Schedules = Callable[..., st.SearchStrategy[Schedule]]
LAYERS = 5
TOLERANCE = 1e-5  # of the largest logit, in float32
MOST_ROUNDING = 4e-5  # of the largest logit
ROUNDINGS = 4  # a pass may be off, beyond that, by so many roundings of its embeddings (3.3 seen over 4,200 texts)


def generate_tapped(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, schedule: Schedule, batch_size: int
) -> tuple[list[Generation], dict[str, list[Tensor]]]:
    """Generations in the order of their prompts, and the logits by sample id and step."""
    with tapped() as logits:
        generations = list(engine.generate(prompts, sampling, schedule, batch_size))
    return sorted(generations, key=lambda g: (g.index, g.sample)), logits


@torch.inference_mode()
def masked_forward(model: LlamaForCausalLM, prompt: Sequence[int], tokens: Sequence[int], schedule: Schedule) -> Tensor:
    """Logits [generated tokens, vocab] that each generated token was chosen from, by one forward over the whole text.

    No cache: x = where(the unit is active for this token, block(x), x), attention is plainly causal. Prompt tokens
    run every unit; generated token i, once it is fed back, runs active(i). Where a token's plateau has a bridge, the
    bridge's map stands before the units it replaces. The adapter's changes are for generated tokens alone.
    """
    ids = torch.tensor([*prompt, *tokens[:-1]])
    positions = torch.arange(len(ids))[None]
    x = model.model.embed_tokens(ids)[None]
    rotary = model.model.rotary_emb(x, positions)
    causal = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]

    def active(unit: Unit) -> Tensor:
        runs = [True] * len(prompt) + [unit in schedule.active(step) for step in range(len(tokens) - 1)]
        return torch.tensor(runs)[None, :, None]

    def cross_bridges(x: Tensor, unit: Unit) -> Tensor:
        """Whichever bridge a token's plateau has over a block that starts with this unit."""
        rows = x[0].clone()
        for step in range(len(tokens) - 1):
            for bridge in schedule.bridges_on(schedule.plateau_at(step)):
                if bridge.block.first == unit:
                    t = {role: tensor.to(x.dtype) for role, tensor in bridge.tensors.items()}
                    row = x[0, len(prompt) + step]
                    linear = row @ t["weight"] if "weight" in t else row @ t["down"] @ t["up"]
                    rows[len(prompt) + step] = row + linear + t["bias"]
        return rows[None]

    with adapted(model, schedule.adapter, len(prompt)):
        for index, layer in enumerate(model.model.layers):
            x = cross_bridges(x, Unit("a", index))
            attended, _ = layer.self_attn(layer.input_layernorm(x), position_embeddings=rotary, attention_mask=causal)
            x = torch.where(active(Unit("a", index)), x + attended, x)
            x = cross_bridges(x, Unit("m", index))
            x = torch.where(active(Unit("m", index)), x + layer.mlp(layer.post_attention_layernorm(x)), x)
    return model.lm_head(model.model.norm(x))[0, len(prompt) - 1 :]


def moved_by_rounding(
    model: LlamaForCausalLM, prompt: Sequence[int], tokens: Sequence[int], schedule: Schedule, exact: Tensor
) -> Tensor:
    """By how much float32's rounding of the embeddings alone moves each token's float64 logits, the most of 4 draws."""
    weight = model.model.embed_tokens.weight
    embeddings, draw = weight.data, torch.Generator().manual_seed(0)
    moved = torch.zeros(len(exact), dtype=exact.dtype)
    for _ in range(4):
        noise = torch.empty_like(embeddings).uniform_(-1, 1, generator=draw)
        weight.data = embeddings * (1 + torch.finfo(torch.float32).eps * noise)
        moved = moved.maximum((masked_forward(model, prompt, tokens, schedule) - exact).abs().amax(-1))
    weight.data = embeddings
    return moved


def assert_matches_masked_forward(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    schedule: Schedule,
    generations: Sequence[Generation],
    logits: dict[str, list[Tensor]],
) -> None:
    for generation in generations:
        prompt = prompts[generation.index]
        sample_id = f"{generation.index}\0{generation.sample}" if generation.sample else str(generation.index)
        ours = torch.stack(logits[sample_id][: generation.generated_tokens])
        expected = masked_forward(model, prompt, generation.tokens, schedule)
        assert ours.shape == expected.shape
        scale = expected.abs().max()
        worst = (ours - expected).abs().amax(-1) / scale
        if worst.max() >= TOLERANCE:  # the text may be ill-conditioned: hold ours against float64, and measure that
            exact = masked_forward(model.double(), prompt, generation.tokens, schedule)
            rounding = ROUNDINGS * moved_by_rounding(model, prompt, generation.tokens, schedule, exact) / scale
            worst = (ours - exact).abs().amax(-1) / scale - rounding.clamp(max=MOST_ROUNDING)
            model.float()
        assert worst.max() < TOLERANCE, f"sample {sample_id}: difference by step {worst.tolist()}"


def reference(directory: Path) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def tiny(make_checkpoint: Callable[..., Path]) -> tuple[Engine, LlamaForCausalLM]:
    """Ends a text with any of six tokens, so that rows leave their batch at different steps."""
    directory = make_checkpoint(num_hidden_layers=LAYERS, eos=[3, 19, 35, 51, 67, 83], head_dim=8)
    return Engine.load(str(directory), device="cpu"), reference(directory)


@settings(max_examples=60)
@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=9),
    seed=st.integers(0, 1000),
    new_tokens=st.integers(1, 20),
    batch_size=st.integers(1, 9),
)
def test_every_logit_is_that_of_the_masked_forward(
    tiny: tuple[Engine, LlamaForCausalLM],
    schedules: Schedules,
    data: st.DataObject,
    lengths: list[int],
    seed: int,
    new_tokens: int,
    batch_size: int,
) -> None:
    engine, model = tiny
    schedule = data.draw(schedules(LAYERS, hidden=engine.shape.hidden, adaptable=engine.decoder))
    prompts = random_prompts(lengths, seed)
    sampling = Sampling(max_new_tokens=new_tokens, temperature=1.5)
    generations, logits = generate_tapped(engine, prompts, sampling, schedule, batch_size)
    assert_matches_masked_forward(model, prompts, schedule, generations, logits)


ORDERS = {
    "lowest first": orders.lowest_first(LAYERS),
    "top first": orders.top_first(LAYERS),
    "evenly spaced": orders.evenly_spaced(LAYERS),
    "unit by unit": orders.of_units(orders.lowest_first(LAYERS)),
    "all attention blocks": tuple((Unit("a", layer),) for layer in range(1, LAYERS)),
    "all MLP blocks": tuple((Unit("m", layer),) for layer in range(1, LAYERS)),
}


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_down_to_its_last_group(tiny: tuple[Engine, LlamaForCausalLM], order: str) -> None:
    engine, model = tiny
    groups = ORDERS[order]
    schedule = Schedule.build(LAYERS, groups, decays.linear(0, len(groups), 8), horizon=8)
    prompts = random_prompts([1, 2, 5, 9, 14, 17, 23, 30], seed=7)
    generations, logits = generate_tapped(engine, prompts, Sampling(max_new_tokens=16), schedule, batch_size=8)
    assert max(generation.generated_tokens for generation in generations) > 10
    assert_matches_masked_forward(model, prompts, schedule, generations, logits)


def test_rows_that_leave_the_batch_do_not_disturb_the_others(tiny: tuple[Engine, LlamaForCausalLM]) -> None:
    engine, model = tiny
    schedule = recipes.skipdecode(LAYERS, warmup=1, max_active=5, min_active=2, horizon=12)
    prompts = random_prompts([3, 4, 8, 8, 12, 15, 16, 21, 25, 28, 30, 30], seed=3)
    sampling = Sampling(max_new_tokens=60, temperature=1.0, samples_per_prompt=2)
    generations, logits = generate_tapped(engine, prompts, sampling, schedule, batch_size=24)
    assert len(logits) == 24
    assert len({len(rows) for rows in logits.values()}) > 3, "no row left before others: the test is worth little"
    assert_matches_masked_forward(model, prompts, schedule, generations, logits)


def test_biases_and_grouped_heads_are_skipped_with_their_block(make_checkpoint: Callable[..., Path]) -> None:
    directory = make_checkpoint(
        attention_bias=True, mlp_bias=True, num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True
    )
    schedule = Schedule.build(5, orders.of_units(orders.top_first(5)), decays.cosine(1, 7, 10), horizon=10)
    prompts = random_prompts([2, 9, 33], seed=1)
    sampling = Sampling(max_new_tokens=16)
    generations, logits = generate_tapped(Engine.load(str(directory), device="cpu"), prompts, sampling, schedule, 3)
    assert_matches_masked_forward(reference(directory), prompts, schedule, generations, logits)


def test_a_single_token_needs_no_schedule(tiny: tuple[Engine, LlamaForCausalLM]) -> None:
    """The first generated token comes from the prompt pass, which runs at full depth."""
    engine, _ = tiny
    prompts = random_prompts([4, 9, 20], seed=5)
    shallow = Schedule.build(LAYERS, orders.lowest_first(LAYERS), decays.constant(LAYERS - 1), horizon=0)
    first = [[g.tokens for g in engine.generate(prompts, Sampling(max_new_tokens=1), s)] for s in (None, shallow)]
    assert first[0] == first[1]


def test_a_bridge_of_zeros_is_a_bare_skip(tiny: tuple[Engine, LlamaForCausalLM]) -> None:
    engine, _ = tiny
    width = engine.shape.hidden
    bare = recipes.skipdecode(LAYERS, warmup=1, max_active=4, min_active=2, horizon=6)
    blocks = {f"b{p.skipped}": Block.of_layers(1, 1 + p.skipped // 2) for p in bare.plateaus}
    zeros = replace(
        bare,
        plateaus=tuple(p._replace(bridges=(f"b{p.skipped}",)) for p in bare.plateaus),
        bridges={n: Bridge.affine(b, torch.zeros(width, width), torch.zeros(width)) for n, b in blocks.items()},
    )
    prompts, sampling = random_prompts([3, 9, 20], seed=2), Sampling(max_new_tokens=12, temperature=1.0)
    tokens, logits = generate_tapped(engine, prompts, sampling, bare, 3)
    bridged_tokens, bridged_logits = generate_tapped(engine, prompts, sampling, zeros, 3)
    assert [g.tokens for g in tokens] == [g.tokens for g in bridged_tokens]
    for sample_id, steps in logits.items():
        assert torch.equal(torch.stack(steps), torch.stack(bridged_logits[sample_id]))


def test_the_packaged_model_under_skipdecode(packaged: Engine, chats: list[list[int]]) -> None:
    model = reference(checkpoint.prepare(PACKAGED))
    schedule = recipes.skipdecode(layers=30, warmup=4, max_active=28, min_active=14, horizon=12)
    prompts = sorted(chats, key=len)[::33]
    sampling = Sampling(max_new_tokens=20)
    generations, logits = generate_tapped(packaged, prompts, sampling, schedule, batch_size=4)
    assert max(generation.generated_tokens for generation in generations) == 20
    assert_matches_masked_forward(model, prompts, schedule, generations, logits)
