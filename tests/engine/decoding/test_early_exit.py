"""Token-level early exit: nothing changes where nothing may exit, and FLOPs are those of the layers really run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from engine import EarlyExit, Engine, Ledger, Sampling, Schedule
from engine.decoding.early_exit import Kind, cheapest_check
from tests.engine.prompts import random_prompts

LAYERS = 5
KINDS: list[Kind] = ["CALM-DEC", "multi-layer exit"]


@pytest.fixture(scope="module")
def tiny(make_checkpoint: Callable[..., Path]) -> tuple[Engine, LlamaForCausalLM]:
    directory = make_checkpoint(num_hidden_layers=LAYERS, eos=[3, 19, 35], head_dim=8, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    return Engine.load(str(directory), device="cpu"), model


@pytest.mark.parametrize("kind", KINDS)
def test_a_threshold_that_forbids_exits_gives_full_depth_exactly(
    packaged: Engine, chats: list[list[int]], kind: Kind
) -> None:
    prompts, sampling = chats[:6], Sampling(max_new_tokens=12)
    rule = EarlyExit(kind, (10, 20), threshold=1.1)
    full = list(packaged.generate(prompts, sampling, batch_size=4))
    exits = list(packaged.generate_with_exits(prompts, sampling, rule, batch_size=4))
    assert [generation.tokens for generation in exits] == [generation.tokens for generation in full]
    assert [generation.text for generation in exits] == [generation.text for generation in full]
    assert {generation.mean_active_layers for generation in exits} == {30.0}
    heads = 2 * 2 * packaged.shape.head_parameters  # of the two checks in vain
    for ours, theirs in zip(exits, full, strict=True):
        assert ours.flops_decode == theirs.flops_decode + (ours.generated_tokens - 1) * heads


@torch.inference_mode()
def exit_one_by_one(model: LlamaForCausalLM, prompt: list[int], steps: int, rule: EarlyExit) -> tuple[list[int], int]:
    """Tokens and depth, summed over steps, by the definition: one sample, one token at a time, no cache of ours."""
    body, keys = model.model, [_keys_of_prompt(model, prompt, layer) for layer in range(LAYERS)]
    tokens, depth = [int(model(torch.tensor([prompt])).logits[0, -1].argmax())], 0
    while len(tokens) < steps and tokens[-1] not in (3, 19, 35):
        position = len(prompt) + len(tokens) - 1
        x, left = body.embed_tokens(torch.tensor([[tokens[-1]]])), None
        for index, layer in enumerate(body.layers):
            k, v = _key_value(model, layer, x, position)
            keys[index] = (torch.cat([keys[index][0], k]), torch.cat([keys[index][1], v]))
            attended = x + _attend(model, layer, x, position, *keys[index])
            if left is None:
                x = attended + layer.mlp(layer.post_attention_layernorm(attended))
            elif rule.kind == "multi-layer exit":
                x = attended
            if left is None and index + 1 in rule.checks:
                logits = model.lm_head(body.norm(x))[0, 0]
                top = logits.softmax(-1).topk(2).values
                if top[0] - top[1] >= rule.threshold:
                    left = logits
                    depth += index + 1
        if left is None:
            left = model.lm_head(body.norm(x))[0, 0]
            depth += LAYERS
        tokens.append(int(left.argmax()))
    return tokens, depth


def _keys_of_prompt(model: LlamaForCausalLM, prompt: list[int], layer: int) -> tuple[Tensor, Tensor]:
    cache = model(torch.tensor([prompt]), use_cache=True).past_key_values
    return cache.layers[layer].keys[0].transpose(0, 1), cache.layers[layer].values[0].transpose(0, 1)


def _rotated(model: LlamaForCausalLM, x: Tensor, position: int) -> Tensor:
    """[1, heads, head_dim] turned to its position."""
    cos, sin = model.model.rotary_emb(x, torch.tensor([[position]]))
    first, second = x.chunk(2, -1)
    return x * cos[0] + torch.cat([-second, first], -1) * sin[0]


def _key_value(model: LlamaForCausalLM, layer: Any, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
    normed = layer.input_layernorm(x)
    k, v = (project(normed)[0].view(1, 2, 8) for project in (layer.self_attn.k_proj, layer.self_attn.v_proj))
    return _rotated(model, k, position), v


def _attend(model: LlamaForCausalLM, layer: Any, x: Tensor, position: int, k: Tensor, v: Tensor) -> Tensor:
    q = _rotated(model, layer.self_attn.q_proj(layer.input_layernorm(x))[0].view(1, 4, 8), position)[0]
    k, v = (part.repeat_interleave(2, 1) for part in (k, v))  # [t, heads, head_dim]
    weights = (torch.einsum("hd,thd->ht", q, k) * 8**-0.5).softmax(-1)
    return layer.self_attn.o_proj(torch.einsum("ht,thd->hd", weights, v).reshape(1, 1, -1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.2, 0.5])
def test_a_batch_gives_what_running_sample_by_sample_gives(
    tiny: tuple[Engine, LlamaForCausalLM], kind: Kind, threshold: float
) -> None:
    engine_, model = tiny
    rule = EarlyExit(kind, (1, 3), threshold)
    prompts = random_prompts([4, 9, 2, 14, 7, 21], seed=4)
    found = list(engine_.generate_with_exits(prompts, Sampling(max_new_tokens=16), rule, batch_size=6))
    depths = set()
    for generation in found:
        prompt = prompts[generation.index]
        tokens, depth = exit_one_by_one(model, prompt, 16, rule)
        assert list(generation.tokens) == tokens
        passes = len(tokens) - 1
        assert generation.mean_active_layers == pytest.approx((LAYERS + depth) / (passes + 1))
        depths.add(generation.mean_active_layers)
    if threshold in (0.05, 0.2):
        assert len(depths) > 2, "all tokens left at the same layer: the test is worth little"


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_leaves_is_charged_layers_heads_and_the_keys_above(
    tiny: tuple[Engine, LlamaForCausalLM], kind: Kind
) -> None:
    shape = tiny[0].shape
    context, width = 12, shape.heads * shape.head_dim
    rule = EarlyExit(kind, (2, 4), 0.3)
    keys_and_values = 2 * 2 * shape.hidden * shape.kv_heads * shape.head_dim
    blocks = 2 * shape.attention_parameters + 4 * context * width
    above = keys_and_values if kind == "CALM-DEC" else blocks
    layer = 2 * shape.mlp_parameters + blocks
    head = 2 * shape.head_parameters
    assert rule.token_flops(shape, 2, context) == 2 * layer + 3 * above + head
    assert rule.token_flops(shape, 4, context) == 4 * layer + 1 * above + 2 * head
    full = Ledger(shape, Schedule.full_depth(LAYERS)).plateaus[0].tokens(context, context)
    assert rule.token_flops(shape, LAYERS, context) == full + 2 * head


def test_one_check_is_placed_where_three_exits_in_four_meet_the_target(packaged: Engine) -> None:
    shape = packaged.shape
    layers = [cheapest_check(shape, "CALM-DEC", target, context=200) for target in (1.25, 1.45, 1.65)]
    assert layers == sorted(layers, reverse=True)
    full = Ledger(shape, Schedule.full_depth(30)).plateaus[0].tokens(200, 200)
    for layer, target in zip(layers, (1.25, 1.45, 1.65), strict=True):
        for at, meets in ((layer, True), (layer + 1, False)):
            rule = EarlyExit("CALM-DEC", (at,), 0.5)
            mean = 0.75 * rule.token_flops(shape, at, 200) + 0.25 * rule.token_flops(shape, 30, 200)
            assert (full / mean >= target) is meets


def test_a_rule_without_sense_is_refused() -> None:
    for checks in ((), (0,), (4, 2), (3, 3)):
        with pytest.raises(ValueError, match="increasing numbers of layers"):
            EarlyExit("CALM-DEC", checks, 0.5)
