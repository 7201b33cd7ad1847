"""Every family: what transformers generates at full depth, and a plain forward with masked layers under a schedule."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine import Engine, Ledger, ModelError, PromptError, Sampling, Schedule, decode_flop_speedup, describe
from engine.forward.teacher_forcing import Answer
from engine.kernels import Kernels
from engine.models.families import FAMILIES, family_of
from engine.parts.unit import Block, Unit, all_units
from engine.schedules.schedule import Plateau
from tests.engine.adapters import adapted, random_adapter
from tests.engine.conftest import random_bridge, random_head_preview, random_prompt_bridge
from tests.engine.models.test_full_depth import generated_by_engine, generated_by_transformers
from tests.engine.prompts import random_prompts, sharing

LAYERS = 5
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 16}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
GRANITE = {"embedding_multiplier": 2.5, "attention_multiplier": 0.5, "residual_multiplier": 0.6, "logits_scaling": 1.5}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.2, 1.5, 1.7, 2.0, 2.1], "long_factor": [2.0, 4.0, 6.0, 8.0, 9.0, 9.5],
}  # fmt: skip
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "mistral": {"family": "mistral", "sliding_window": None},
    "mistral, sliding window": {"family": "mistral", "sliding_window": 16},
    "qwen2": {"family": "qwen2"},
    "qwen2, tied": {"family": "qwen2", "seed": 1, "tie_word_embeddings": True},
    "qwen2, some windows": {
        "family": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2,
    },
    "qwen3": {"family": "qwen3", "head_dim": 16},
    "qwen3, narrow heads": {"family": "qwen3", "head_dim": 4, "attention_bias": True},
    "smollm3": {"family": "smollm3"},
    "smollm3, windows": {"family": "smollm3", "use_sliding_window": True, "sliding_window": 16},
    "gemma2": {"family": "gemma2", **GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma2, no caps": {
        "family": "gemma2", **GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "hidden_act": "relu",  # which counts for nothing beside hidden_activation
    },
    "gemma3": {"family": "gemma3_text", **GEMMA, "layer_types": ALTERNATING},
    "granite": {"family": "granite", **GRANITE},
    "granite, tied, biases": {
        "family": "granite", **GRANITE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
    },
    "phi3": {"family": "phi3"},
    "phi3, tied, sliding window": {"family": "phi3", "tie_word_embeddings": True, "sliding_window": 16},
    "phi3, longrope, heads turned in part": {
        "family": "phi3", "hidden_size": 64, "rope_parameters": LONGROPE, "original_max_position_embeddings": 160,
    },
    "opt": {"family": "opt", "tie_word_embeddings": False, **OPT},
    "opt, tied": {"family": "opt", **OPT},
    "opt, norm after, narrow embeddings": {
        "family": "opt", "tie_word_embeddings": False, "ffn_dim": 48, "word_embed_proj_dim": 16,
        "do_layer_norm_before": False,
    },
    "opt, no biases": {"family": "opt", **OPT, "enable_bias": False, "layer_norm_elementwise_affine": False},
    "opt, gelu": {"family": "opt", **OPT, "activation_function": "gelu", "tie_word_embeddings": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Callable[..., Path]) -> Callable[[str], Path]:
    return lambda variant: make_checkpoint(**VARIANTS[variant])


@cache
def reference(directory: Path) -> PreTrainedModel:
    """Loaded once: hooks have to go with their test. Eager attention: the only one that has soft caps."""
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


@cache
def loaded(directory: Path) -> Engine:
    """Loaded once: a prefix that is shared has to go with its test."""
    return Engine.load(str(directory), device="cpu")


def masked_logits(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], schedule: Schedule) -> Tensor:
    """[generated tokens, vocab] of a plain forward without a cache: x = where(the layer is active, layer(x), x).

    Generated tokens have the adapter's changes, if there is one, and the prompt's if it changes these.
    """
    layers = model.get_decoder().layers
    hooks = []
    for index, layer in enumerate(layers):
        runs = [True] * len(prompt) + [
            any(unit.layer == index for unit in schedule.active(step)) for step in range(len(tokens) - 1)
        ]
        mask = torch.tensor(runs)[None, :, None]

        def keep(_: Any, inputs: Any, output: Any, mask: Tensor = mask) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            kept = torch.where(mask, hidden, inputs[0])
            return (kept, *output[1:]) if isinstance(output, tuple) else kept

        hooks.append(layer.register_forward_hook(keep))
    try:
        with torch.no_grad(), adapted(model, schedule.adapter, len(prompt)):
            logits = model(torch.tensor([[*prompt, *tokens[:-1]]]), use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return logits[0, len(prompt) - 1 :].clone()


def test_every_family_has_a_variant_here() -> None:
    assert {settings["family"] for settings in VARIANTS.values()} == set(FAMILIES)


def test_every_family_stands_in_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    assert [family for family in FAMILIES if f"`{family}`" not in page] == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_family_generates_what_transformers_generates(checkpoint: Callable[[str], Path], variant: str) -> None:
    directory = checkpoint(variant)
    prompts = random_prompts([1, 2, 7, 15, 16, 17, 33, 50, 64, 65, 120])  # around the windows' 16 too
    settings = {"max_new_tokens": 24, "min_new_tokens": 24}
    expected = generated_by_transformers(reference(directory), prompts, **settings)
    assert len(set(expected)) > len(prompts) / 2, (
        "the model says the same to everything: the comparison is worth little"
    )
    assert generated_by_engine(loaded(directory), prompts, **settings) == expected


@pytest.mark.parametrize("adapts", ["nothing", "decode tokens", "prompts too"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_family_under_a_schedule_is_the_forward_with_masked_layers(
    checkpoint: Callable[[str], Path], variant: str, adapts: str
) -> None:
    directory = checkpoint(variant)
    schedule = Schedule.from_dict(
        {
            "format": 1,
            "layers": LAYERS,
            "skip_order": ["a2", "m2", "a1", "m1", "a3", "m3"],
            "skipped": [[0, 0], [2, 2], [7, 4], [15, 6]],
        }
    )
    prompts = random_prompts([1, 3, 12, 16, 17, 40])
    model, engine = reference(directory), loaded(directory)
    if adapts != "nothing":
        adapter = random_adapter(engine.decoder, map(Unit.parse, ("a0", "m1", "a3", "m3", "a4", "m4")))
        schedule = replace(schedule, adapter=replace(adapter, changes_prompts=adapts == "prompts too"))
    sampling = Sampling(max_new_tokens=20, min_new_tokens=20)
    found = list(engine.generate(prompts, sampling, schedule))
    assert len(found) == len(prompts)
    for generation in found:
        logits = masked_logits(model, prompts[generation.index], generation.tokens, schedule)
        logits[:, model.generation_config.eos_token_id] = -torch.inf  # as min_new_tokens does
        assert tuple(logits.argmax(-1).tolist()) == generation.tokens


def test_a_window_bounds_the_attention_that_the_ledger_counts(checkpoint: Callable[[str], Path]) -> None:
    shape = describe(str(checkpoint("mistral, sliding window")))
    ledger = Ledger(shape, Schedule.full_depth(LAYERS))
    weights = 2 * (LAYERS * shape.layer_parameters + shape.head_parameters)
    per_token = 4 * shape.query_width * LAYERS
    assert ledger.decode(14, 5) == 4 * weights + per_token * (15 + 16 + 16 + 16)
    assert ledger.decode(40, 2) == weights + per_token * 16
    prompt_matrices = 2 * 20 * LAYERS * shape.layer_parameters + 2 * shape.head_parameters
    assert ledger.prompt(20) == prompt_matrices + per_token * (sum(range(1, 17)) + 4 * 16)


def test_alternating_windows_are_counted_layer_by_layer(checkpoint: Callable[[str], Path]) -> None:
    shape = describe(str(checkpoint("gemma3")))
    skipping = Schedule.from_dict(
        {"format": 1, "layers": LAYERS, "skip_order": ["a2", "m2"], "skipped": [[0, 2]]}  # layer 2 has a window
    )
    full, less = Ledger(shape, Schedule.full_depth(LAYERS)), Ledger(shape, skipping)
    assert full.decode(99, 2) - less.decode(99, 2) == 2 * shape.layer_parameters + 4 * shape.query_width * 16
    assert decode_flop_speedup(shape, skipping, [(99, 2)]) == full.decode(99, 2) / less.decode(99, 2)


def test_the_context_of_longrope_in_a_phi3_is_the_original_one(checkpoint: Callable[[str], Path]) -> None:
    """Up to it rows have transformers' tokens; past it those get all their keys anew."""
    directory = checkpoint("phi3, longrope, heads turned in part")
    engine, prompts = loaded(directory), random_prompts([159, 150, 120])
    settings = {"max_new_tokens": 10, "min_new_tokens": 1}
    assert engine.shape.context == 160
    expected = generated_by_transformers(reference(directory), prompts, **settings)
    found = generated_by_engine(engine, prompts, **settings)
    assert found == [expected[0][:1], *expected[1:]]
    with pytest.raises(PromptError, match="prompt 0 has 160 tokens, the context is 160"):
        generated_by_engine(engine, random_prompts([160]), **settings)


@pytest.mark.parametrize("share", [0.01, 0.4, 1.5])
def test_heads_that_positions_turn_in_no_pairs_are_refused(share: float) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
    config = AutoConfig.for_model("phi3", hidden_size=32, num_attention_heads=4, rope_parameters=rope)
    with pytest.raises(ModelError, match=f"partial_rotary_factor {share} turns no even part of the 8"):
        family_of(config).shape(config)


def test_narrow_embeddings_are_counted_where_they_are_projected(checkpoint: Callable[[str], Path]) -> None:
    shape = describe(str(checkpoint("opt, norm after, narrow embeddings")))
    assert shape.input_parameters == 32 * 16
    assert shape.head_parameters == 96 * 16 + 32 * 16
    ledger = Ledger(shape, Schedule.full_depth(LAYERS))
    matrices = 2 * (16 * 32 + LAYERS * (4 * 32 * 32 + 2 * 32 * 48) + 32 * 16 + 16 * 96)
    assert ledger.decode(9, 2) == matrices + 4 * 10 * 32 * LAYERS


@pytest.mark.parametrize("variant", ["gemma2", "gemma3"])
def test_a_gemmas_norms_are_of_weights_that_are_not_rounded(checkpoint: Callable[[str], Path], variant: str) -> None:
    """A checkpoint holds how far they are from 1, which bfloat16 has fewer digits for than for the difference."""
    directory = checkpoint(variant)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_decoder().norm.weight += 0.01 * torch.arange(1, 33)
    engine = Engine.load(str(directory), device="cpu", dtype="bfloat16", kernels=Kernels())
    decoder: Any = engine.decoder
    weight = model.get_decoder().norm.weight.float() + 1
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(decoder._norm(x, weight), model.get_decoder().norm(x))
    assert decoder._final_norm.dtype == torch.float32
    assert engine.decoder.head_input(x).dtype == torch.bfloat16


@pytest.mark.parametrize("variant", VARIANTS)
def test_where_a_cpu_multiplies_bfloat16_numbers_it_says_nearly_the_same(
    variant: str, checkpoint: Callable[[str], Path]
) -> None:
    """Under a schedule that has all that there is, prompts that share a prefix and others."""
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this CPU does not multiply bfloat16 numbers")
    exact, half = loaded(checkpoint(variant)), Engine.load(str(checkpoint(variant)), "cpu", "bfloat16")
    prompt_bridge = random_prompt_bridge(exact.shape, 4, kept=range(1, 3))
    block, every = Block.of_layers(2, 3), all_units(LAYERS)
    schedule = Schedule(
        LAYERS, block.units, (Plateau(0, 0), Plateau(1, 2, ("over",))), {},
        {"over": random_bridge(block, exact.shape.hidden, rank=0, seed=1)}, prompt_bridge,
        replace(random_adapter(exact.decoder, every), changes_prompts=True),
        random_head_preview(exact.decoder, 8, 16),
    )  # fmt: skip
    prompts = random_prompts([1, 3, 9] * 10 + [40, 25] * 10)
    prefix = prompts[-1][:12]
    prompts += [prefix + prompt for prompt in prompts[::5]]
    found = []
    for engine in (exact, half):
        with sharing(engine, prefix):
            answers = engine.generate(prompts, Sampling(6, 6), schedule, batch_size=16)
            found.append([list(each.tokens) for each in sorted(answers, key=lambda each: each.index)])
    wanted, said = (
        torch.tensor([kl for each in engine.score(prompts, found[0], [schedule]).schedules[0] for kl in each.kl])
        for engine in (exact, half)
    )
    assert (said - wanted).norm() < 0.3 * wanted.norm()
    assert sum(a[0] == b[0] for a, b in zip(*found, strict=True)) > 0.8 * len(prompts)
    # What decoding chose is what a pass over the whole answers finds likeliest: in float32 in all but a few places.
    ours = [Answer(prompt, tokens) for prompt, tokens in zip(prompts, found[1], strict=True)]
    half.share_prefix(prefix)  # behind which prompts are bridged
    compiled = half.compiled(schedule)
    forced = half.teacher_forced(ours, schedule.prompt_plan, compiled)
    with torch.inference_mode():
        logits = forced.scheduled_logits(forced.hidden(schedule, compiled), schedule, compiled)
        likeliest = torch.cat([part[:, 1:].argmax(-1) + 1 for _, part in logits])  # 0 ends a text, and was held back
    assert (likeliest == forced.next_token).float().mean() > 0.85
