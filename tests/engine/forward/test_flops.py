"""The ledger is what the hardware-independent counter of torch counts, sample by sample, to the last operation."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from engine import (
    BatchStats,
    Block,
    Bridge,
    Engine,
    Generation,
    Ledger,
    ModelShape,
    Plateau,
    Sampling,
    Schedule,
    kernels,
)
from engine.calibration.prompts import PromptCut, counted_prompt_bridge
from engine.kernels import KeptRows, Kernels, OneDnnKernels
from engine.schedules import decays, orders, recipes
from engine.shape import AttentionKind
from tests.engine import prompts
from tests.engine.prompts import sharing

Schedules = Callable[..., st.SearchStrategy[Schedule]]


class CountableKernels(Kernels):
    """Attention in products that the counter sees, each prompt token with exactly the tokens it may look at.

    Soft caps, which cost nothing, are left out.
    """

    def kept_attention(self, q: Tensor, k: Tensor, v: Tensor, kept: KeptRows, kind: AttentionKind) -> Tensor:
        grouped = q.view(len(q), k.shape[1], -1, k.shape[3])
        weights = (grouped @ k.transpose(-1, -2) * kind.scale + kept.mask(k.dtype)).softmax(-1)
        return (weights @ v).reshape(len(q), -1)

    def prompt_attention(self, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind) -> Tensor:
        before, window = len(k) - len(q) + 1, kind.window or len(k)
        seen = [slice(max(0, before + t - window), before + t) for t in range(len(q))]
        return torch.cat([self._attend(q[t], k[seen[t]], v[seen[t]], kind) for t in range(len(q))])

    @staticmethod
    def _attend(q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind) -> Tensor:
        """One token, [heads, head_dim], to keys and values [t, kv_heads, head_dim]; -> [1, heads * head_dim]."""
        grouped = q.unflatten(0, (k.shape[1], -1))  # [kv_heads, group, head_dim]
        scores = torch.bmm(grouped, k.permute(1, 2, 0)) * kind.scale
        return torch.bmm(scores.softmax(-1), v.transpose(0, 1)).reshape(1, -1)


class UnpaddedKernels(CountableKernels):
    """Each decode token too with exactly the tokens it may look at: what nobody's output needs is not computed."""

    def kept_attention(self, q: Tensor, k: Tensor, v: Tensor, kept: KeptRows, kind: AttentionKind) -> Tensor:
        rows = zip(q, k.transpose(1, 2), v.transpose(1, 2), map(slice, kept.first, kept.end), strict=True)
        return torch.cat([self._attend(query, keys[seen], values[seen], kind) for query, keys, values, seen in rows])


WINDOW = 8  # shorter than most prompts here
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": WINDOW}
MODELS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "one key/value head, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "all heads, wide, with biases": {
        "num_key_value_heads": 4,
        "head_dim": 16,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "deep and narrow": {"num_hidden_layers": 8, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 50},
    "mistral, windows": {"family": "mistral", "sliding_window": WINDOW},
    "qwen2, some windows": {
        "family": "qwen2", "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2,
    },
    "qwen3": {"family": "qwen3", "head_dim": 16},
    "gemma2, alternating windows": {"family": "gemma2", **GEMMA},
    "gemma3, alternating windows": {"family": "gemma3_text", **GEMMA, "layer_types": ALTERNATING},
    "granite": {"family": "granite", "attention_multiplier": 0.5, "residual_multiplier": 0.6, "logits_scaling": 1.5},
    "phi3, windows": {"family": "phi3", "sliding_window": WINDOW},
    "opt, narrow embeddings": {
        "family": "opt", "ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def load(make_checkpoint: Callable[..., Path]) -> Callable[..., Engine]:
    loaded: dict[tuple[str, type[Kernels]], Engine] = {}

    def load_model(name: str, kernels: type[Kernels] = CountableKernels) -> Engine:
        if (name, kernels) not in loaded:
            directory = str(make_checkpoint(eos=[3, 19, 35], **MODELS[name]))
            loaded[name, kernels] = Engine.load(directory, device="cpu", kernels=kernels())
        return loaded[name, kernels]

    return load_model


random_prompts = partial(prompts.random_prompts, vocab=50)


def generate_counted(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, schedule: Schedule | None, batch_size: int
) -> tuple[list[Generation], BatchStats, int]:
    """Generations, what their passes cost, and the FLOPs that torch counted."""
    stats: list[BatchStats] = []
    if schedule is not None:
        engine.compiled(schedule)  # merging an adapter is loading, not generating
    with FlopCounterMode(display=False) as counter:
        generations = list(engine.generate(prompts, sampling, schedule, batch_size, on_batch=stats.append))
    return generations, sum(stats, BatchStats()), counter.get_total_flops()


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=12)
@given(
    data=st.data(),
    length=st.integers(1, 20),
    new_tokens=st.integers(1, 12),
    seed=st.integers(0, 100),
    shared=st.one_of(st.just(0), st.integers(1, 20)),
)
def test_a_sample_is_charged_what_it_costs(
    load: Callable[..., Engine],
    schedules: Schedules,
    model: str,
    data: st.DataObject,
    length: int,
    new_tokens: int,
    seed: int,
    shared: int,
) -> None:
    engine, [prompt] = load(model, UnpaddedKernels), random_prompts([length], seed)
    schedule = data.draw(schedules(engine.shape.layers, engine.shape.hidden, engine.shape, engine.decoder, True))
    sampling = Sampling(max_new_tokens=new_tokens, temperature=1.0)
    prefix = prompt[:shared]
    with sharing(engine, prefix):
        [sample], stats, counted = generate_counted(engine, [prompt], sampling, schedule, 1)
        prompt_alone = Sampling(max_new_tokens=1)
        [first], _, counted_prompt = generate_counted(engine, [prompt], prompt_alone, schedule, 1)
    assert sample.shared_prefix_tokens == (shared if shared < length else 0), "all of it or nothing"
    assert sample.flops_prompt + sample.flops_decode == counted
    if all(engine.shape.attention_kind(layer).window is None for layer in range(engine.shape.layers)):
        assert stats.flops_padding == 0
    assert (first.flops_prompt, first.flops_decode) == (counted_prompt, 0)
    assert sample.flops_prompt == counted_prompt


@pytest.mark.parametrize(
    "model", ["grouped heads", "all heads, wide, with biases", "mistral, windows", "gemma3, alternating windows"]
)
@settings(max_examples=12)
@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    new_tokens=st.integers(1, 12),
    samples=st.integers(1, 3),
    batch_size=st.integers(1, 12),
)
def test_what_a_ragged_batch_computes_for_nobody_is_reported_as_padding(
    load: Callable[..., Engine],
    schedules: Schedules,
    model: str,
    data: st.DataObject,
    lengths: list[int],
    new_tokens: int,
    samples: int,
    batch_size: int,
) -> None:
    engine = load(model)
    schedule = data.draw(schedules(engine.shape.layers, engine.shape.hidden, engine.shape, engine.decoder, True))
    sampling = Sampling(max_new_tokens=new_tokens, temperature=1.0, samples_per_prompt=samples)
    generations, stats, counted = generate_counted(engine, random_prompts(lengths), sampling, schedule, batch_size)
    charged = sum(generation.flops_prompt + generation.flops_decode for generation in generations)
    assert stats.flops_padding == counted - charged >= 0


def test_a_shared_prefix_is_counted_once_and_charged_to_nobody(load: Callable[..., Engine]) -> None:
    engine = load("grouped heads")
    prefix, *rest = random_prompts([9, 4, 1, 11])
    prompts = [prefix + tokens for tokens in rest]
    with FlopCounterMode(display=False) as counter, sharing(engine, prefix) as cost:
        # The pass over the prefix is a whole pass, but nobody asks for its logits.
        assert counter.get_total_flops() == cost
        generations, stats, counted = generate_counted(engine, prompts, Sampling(max_new_tokens=1), None, 3)
    counted -= stats.flops_padding
    assert sum(generation.flops_prompt for generation in generations) == counted
    assert [generation.shared_prefix_tokens for generation in generations] == [9] * 3
    assert stats.prompt_tokens == 16
    ledger = Ledger(engine.shape, Schedule.full_depth(engine.shape.layers))
    for generation in generations:
        assert generation.flops_prompt + cost == ledger.prompt(generation.prompt_tokens)


def test_equal_rows_pad_nothing(load: Callable[..., Engine]) -> None:
    engine = load("grouped heads")
    sampling = Sampling(max_new_tokens=9, min_new_tokens=9)
    _, stats, _ = generate_counted(engine, random_prompts([7] * 4), sampling, Schedule.full_depth(5), 4)
    assert stats.flops_padding == 0


def test_rows_that_each_read_what_they_keep_pad_nothing(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "RAGGED_THREADS", torch.get_num_threads())
    sampling, padding = Sampling(max_new_tokens=9, min_new_tokens=9), {}
    for each in (Kernels, OneDnnKernels):
        _, stats, _ = generate_counted(load("grouped heads", each), random_prompts([3, 20]), sampling, None, 2)
        padding[each] = stats.flops_padding
    assert padding[Kernels] > 0 == padding[OneDnnKernels]


def test_a_batch_reports_its_samples_tokens_and_steps(load: Callable[..., Engine]) -> None:
    engine = load("grouped heads")
    sampling = Sampling(max_new_tokens=9, temperature=1.0, samples_per_prompt=2)
    generations, stats, _ = generate_counted(engine, random_prompts([7, 12]), sampling, Schedule.full_depth(5), 4)
    assert stats.samples == 4
    assert stats.prompt_tokens == 7 + 12, "samples of one prompt share its pass"
    assert stats.generated_tokens == sum(generation.generated_tokens for generation in generations)
    assert stats.steps == max(generation.generated_tokens for generation in generations), (
        "one of them takes the prompts"
    )
    assert stats.live_rows == stats.generated_tokens
    assert stats.seats == 4 * stats.steps
    assert stats.prefill_seconds > 0
    assert stats.decode_seconds > 0


def test_samples_of_one_prompt_pay_for_it_once(load: Callable[..., Engine]) -> None:
    engine = load("grouped heads")
    sampling = Sampling(max_new_tokens=4, min_new_tokens=4, temperature=1.0, samples_per_prompt=3)
    generations, _, _ = generate_counted(engine, random_prompts([9, 9]), sampling, Schedule.full_depth(5), 6)
    price = Ledger(engine.shape, Schedule.full_depth(5)).prompt(9)
    for index in (0, 1):
        ours = [generation for generation in generations if generation.index == index]
        assert sorted(generation.flops_prompt for generation in ours) == [0, 0, price]
        assert all(g.flops_full_depth == g.flops_prompt + g.flops_decode for g in ours)


@settings(max_examples=12)
@given(data=st.data(), length=st.integers(1, 20), new_tokens=st.integers(1, 16))
def test_the_full_depth_price_is_that_of_the_same_tokens_with_nothing_skipped(
    load: Callable[..., Engine], schedules: Schedules, data: st.DataObject, length: int, new_tokens: int
) -> None:
    engine = load("grouped heads")
    schedule = data.draw(schedules(5))
    [sample], _, _ = generate_counted(engine, random_prompts([length]), Sampling(new_tokens), schedule, 1)
    full = Ledger(engine.shape, Schedule.full_depth(5))
    assert sample.flops_full_depth == full.prompt(length) + full.decode(length, sample.generated_tokens)
    assert sample.flops_prompt + sample.flops_decode <= sample.flops_full_depth
    if schedule.is_full_depth:
        assert sample.flops_prompt + sample.flops_decode == sample.flops_full_depth


SHAPE = ModelShape(
    family="llama",
    layers=4,
    hidden=8,
    heads=2,
    kv_heads=1,
    head_dim=3,
    vocab=50,
    context=100,
    attention_parameters=8 * 3 * (2 + 1 + 1 + 2),
    mlp_parameters=3 * 8 * 20,
    head_parameters=50 * 8,
)


def test_the_formulas_by_hand() -> None:
    """Four layers; from step 1 on both blocks of layer 1 are skipped, from step 3 on the MLP of layer 2 too."""
    order = orders.of_units(orders.lowest_first(4, warmup=1))
    order = (order[0] + order[1], order[3], order[2])
    schedule = Schedule.build(4, order, decays.step([(0, 0), (1, 1), (3, 2)]), horizon=3)
    ledger = Ledger(SHAPE, schedule)
    pa, pm, h, q = 144, 480, 400, 6
    assert ledger.prompt(5) == 2 * 5 * 4 * (pa + pm) + 2 * h + 4 * 4 * q * (1 + 2 + 3 + 4 + 5)
    assert ledger.decode(5, 1) == 0
    first = 2 * (4 * pa + 4 * pm + h) + 4 * 6 * q * 4
    assert ledger.decode(5, 2) == first
    second = 2 * (3 * pa + 3 * pm + h) + 4 * 7 * q * 3
    third = 2 * (3 * pa + 3 * pm + h) + 4 * 8 * q * 3
    fourth = 2 * (3 * pa + 2 * pm + h) + 4 * 9 * q * 3
    assert ledger.decode(5, 5) == first + second + third + fourth


def test_a_bridge_costs_its_matrices() -> None:
    """Layers 1 and 2 are replaced by one low-rank map of 2 x 8 x 3 parameters."""
    tensors = {"down": torch.zeros(8, 3), "up": torch.zeros(3, 8), "bias": torch.zeros(8)}
    bridge = Bridge(Block.of_layers(1, 3), tensors)
    order = tuple(unit for group in orders.lowest_first(4) for unit in group)
    ledger = Ledger(SHAPE, Schedule(4, order, (Plateau(0, 4, ("b",)),), bridges={"b": bridge}))
    assert ledger.decode(5, 2) == 2 * (2 * (144 + 480) + 48 + 400) + 4 * 6 * 6 * 2
    assert ledger.mean_active_layers(3) == pytest.approx((4 + 2 + 2) / 3), "a bridge is no layer"


@pytest.mark.parametrize(
    ("generated", "mean"),
    [
        (0, 0.0),
        (1, 4.0),  # the prompt pass gives the first token
        (2, 4.0),
        (3, (4 + 4 + 3) / 3),
        (5, (4 + 4 + 3 + 3 + 2.5) / 5),  # half a layer: its attention block still runs
        (7, (4 + 4 + 3 + 3 + 2.5 + 2.5 + 2.5) / 7),
    ],
)
def test_mean_active_layers_by_hand(generated: int, mean: float) -> None:
    order = orders.of_units(orders.lowest_first(4, warmup=1))
    order = (order[0] + order[1], order[3], order[2])
    schedule = Schedule.build(4, order, decays.step([(0, 0), (1, 1), (3, 2)]), horizon=3)
    assert Ledger(SHAPE, schedule).mean_active_layers(generated) == pytest.approx(mean, abs=1e-12)


def test_the_first_token_has_not_run_what_prompts_skip() -> None:
    """Nor has it stopped where its prompt did."""
    bridge = counted_prompt_bridge(SHAPE, PromptCut(3, range(1, 2), keeps_skipped=True))
    ledger = Ledger(SHAPE, replace(Schedule.full_depth(4), prompt_bridge=bridge))
    assert ledger.mean_active_layers(1) == 3
    assert ledger.mean_active_layers(3) == pytest.approx((3 + 4 + 4) / 3)


def test_a_generation_reports_its_own_mean_active_layers(load: Callable[..., Engine]) -> None:
    engine = load("grouped heads")
    schedule = recipes.skipdecode(layers=5, warmup=1, max_active=5, min_active=3, horizon=2)
    sampling = Sampling(max_new_tokens=5, min_new_tokens=5)
    [sample] = engine.generate(random_prompts([6]), sampling, schedule)
    assert sample.mean_active_layers == pytest.approx((5 + 5 + 4 + 3 + 3) / 5)


def test_the_packaged_model_has_the_parameters_its_shape_says(packaged: Engine) -> None:
    shape = packaged.shape
    assert shape.attention_parameters == 576 * 576 * 2 + 576 * 192 * 2
    assert shape.mlp_parameters == 3 * 576 * 1536
    assert shape.head_parameters == 49152 * 576
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (30, 9, 3, 64)
    assert shape.cache_elements(10) == 2 * 10 * 3 * 64
