"""Decode tokens whose logits are rough, but for those that look likeliest."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import Engine, HeadPreview, Ledger, Sampling, Schedule, ScheduleError
from engine.calibration.head import HeadStates
from engine.forward.compiled_parts import _largest, compile_head
from engine.forward.operations import Compiled
from engine.forward.teacher_forcing import Answer
from engine.kernels import Kernels, OneDnnKernels
from engine.memory import batch_bytes
from engine.schedules import recipes
from tests.engine.conftest import random_head_preview
from tests.engine.models.test_families import LAYERS, VARIANTS, loaded, masked_logits, reference
from tests.engine.prompts import random_prompts

CPU = torch.device("cpu")
SAMPLING = Sampling(max_new_tokens=12, min_new_tokens=12)
WIDTH, VOCAB = 32, 96  # of the tiny models


def states(engine: Engine, count: int, seed: int = 0) -> Tensor:
    """Hidden states [count, hidden], spread unevenly as those of real models."""
    draw = torch.Generator().manual_seed(seed)
    mixed = torch.randn(engine.shape.hidden, engine.shape.hidden, generator=draw)
    return torch.randn(count, engine.shape.hidden, generator=draw) * torch.logspace(0, -2, engine.shape.hidden) @ mixed


def tensors_of(down: Tensor, up: Tensor, bias: Tensor | None = None) -> dict[str, Tensor]:
    return {"down": down, "up": up, "bias": torch.zeros(VOCAB) if bias is None else bias}


with_both_kernels = pytest.mark.parametrize("kernels", [Kernels(), OneDnnKernels()], ids=["plain", "oneDNN"])


@pytest.fixture(scope="module")
def tiny(make_checkpoint: Callable[..., Path]) -> Engine:
    return Engine.load(str(make_checkpoint()), device="cpu", kernels=Kernels())


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_familys_logits_are_its_heads_matrix_times_what_it_says(
    make_checkpoint: Callable[..., Path], variant: str
) -> None:
    decoder = loaded(make_checkpoint(**VARIANTS[variant])).decoder
    x = torch.randn(7, decoder.shape.hidden, generator=torch.Generator().manual_seed(0))
    products = decoder.head_input(x) @ decoder.head_weight().T
    torch.testing.assert_close(decoder.capped(products.clone()), decoder.logits(x))
    if VARIANTS[variant].get("final_logit_softcapping"):
        assert not torch.allclose(products, decoder.logits(x))


@with_both_kernels
def test_products_with_chosen_rows_are_those_of_the_whole_matrix(kernels: Kernels) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, WIDTH, generator=draw), torch.randn(VOCAB, WIDTH, generator=draw)
    chosen = torch.stack([torch.randperm(VOCAB, generator=draw)[:7] for _ in x])
    products = kernels.chosen_products(x, weight, chosen)
    torch.testing.assert_close(products, (x @ weight.T).gather(1, chosen))
    for row in range(len(x)):
        alone = kernels.chosen_products(x[row : row + 1], weight, chosen[row : row + 1])
        assert torch.equal(products[row : row + 1], alone)


@with_both_kernels
def test_rough_products_are_a_hundredth_off_and_each_row_stands_alone(kernels: Kernels) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=draw) for shape in [(6, 192), (VOCAB, 192), (VOCAB,)])
    x[1], x[2], weight[3] = 0, 1000 * x[2], 0
    rough = kernels.rough_linear(weight, bias)
    products = rough(x)
    assert torch.equal(products[1], bias)
    assert torch.equal(products[:, 3], bias[3].expand(6))
    off = (products - bias - x @ weight.T).std(1)
    assert bool((off <= 0.012 * (x @ weight.T).std(1)).all())
    for row in range(len(x)):
        torch.testing.assert_close(rough(x[row : row + 1])[0], products[row], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_family_with_it_chooses_from_exact_logits_where_rough_ones_are_largest(
    make_checkpoint: Callable[..., Path], variant: str
) -> None:
    directory = make_checkpoint(**VARIANTS[variant])
    model, engine = reference(directory), Engine.load(str(directory), device="cpu", kernels=Kernels())
    preview = random_head_preview(engine.decoder, rank=6, candidates=9)
    schedule = replace(recipes.unified_layer_skipping(LAYERS, active=4), head_preview=preview)
    inputs: list[Tensor] = []
    prompts, changed = random_prompts([1, 3, 12, 17, 40]), 0
    found = list(engine.generate(prompts, SAMPLING, schedule))
    assert len(found) == len(prompts)
    for generation in found:
        with model.get_output_embeddings().register_forward_pre_hook(lambda _, args: inputs.append(args[0])):
            masked_logits(model, prompts[generation.index], generation.tokens, schedule)
        h = inputs[-1][0, len(prompts[generation.index]) - 1 :]
        weight = model.get_output_embeddings().weight
        down, up, bias = (preview.tensors[role] for role in ("down", "up", "bias"))
        exact, rough = h @ weight.T, h @ down @ up @ weight.T + bias
        chosen = torch.zeros_like(rough, dtype=torch.bool).scatter_(1, rough.topk(9).indices, True)
        chosen[0] = True  # the first token comes from the prompt, whose head is whole
        for products in (looked_at := torch.where(chosen, exact, rough)), exact:
            products[:, model.generation_config.eos_token_id] = -torch.inf  # as min_new_tokens does
        assert generation.tokens == tuple(looked_at.argmax(-1).tolist())
        changed += sum(ours != whole for ours, whole in zip(generation.tokens, exact.argmax(-1).tolist(), strict=True))
    assert changed, "the whole head chooses the same tokens: the comparison is worth little"


@pytest.mark.parametrize("all_of", ["rank", "candidates"])
def test_with_all_directions_or_all_candidates_it_is_the_whole_head(tiny: Engine, all_of: str) -> None:
    everything = HeadPreview(5, tensors_of(torch.eye(WIDTH), torch.eye(WIDTH)))
    preview = everything if all_of == "rank" else random_head_preview(tiny.decoder, 3, VOCAB)
    prompts = random_prompts([3, 9, 20, 31])
    expected = [g.tokens for g in tiny.generate(prompts, SAMPLING)]
    assert [g.tokens for g in tiny.generate(prompts, SAMPLING, Schedule(LAYERS, head_preview=preview))] == expected
    x = states(tiny, 40)
    head = compile_head(preview, tiny.decoder, Kernels(), torch.float32, CPU)
    torch.testing.assert_close(head(x), tiny.decoder.logits(x))


@with_both_kernels
@pytest.mark.parametrize(("vocab", "count"), [(96, 9), (96, 12), (96, 13), (96, 96), (97, 9), (49152, 256)])
def test_the_candidates_are_those_with_the_largest_rough_logits(vocab: int, count: int, kernels: Kernels) -> None:
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(0))
    expected = logits.topk(count).indices.sort().values
    assert torch.equal(_largest(logits, count, kernels).sort().values, expected)


@pytest.mark.parametrize(
    "variant", [VARIANTS["llama"], {**VARIANTS["granite"], "logits_scaling": 6.0}], ids=["llama", "granite"]
)
def test_the_fit_has_the_least_error_of_all_logits(
    make_checkpoint: Callable[..., Path], variant: dict[str, Any]
) -> None:
    engine = Engine.load(str(make_checkpoint(**variant)), device="cpu", kernels=Kernels())
    decoder, x, rank = engine.decoder, states(engine, 500), 5
    fitted = HeadStates(decoder)
    for part in x.split(180):
        fitted.add(part)
    _, preview = fitted.fit([rank + 3, rank])
    tensors = {role: tensor.double() for role, tensor in preview.tensors.items()}
    h, weight = decoder.head_input(x).double(), decoder.head_weight().double()
    logits = h @ weight.T  # but for the factor of a Granite

    def error(rough: Tensor) -> float:
        return float((logits - rough).square().sum())

    u, s, v = torch.linalg.svd(logits, full_matrices=False)
    least = error(u[:, :rank] * s[:rank] @ v[:rank])  # of any matrix of that rank: Eckart and Young
    rough = h @ tensors["down"] @ tensors["up"] @ weight.T
    assert least < error(rough) < 1.01 * least
    left_out = decoder.capped(logits.clone()) - decoder.capped(rough.clone())
    bias = decoder.capped(tensors["bias"].clone())
    torch.testing.assert_close(bias, left_out.square().mean(0) / 2, rtol=2e-3, atol=1e-4)
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    assert error(h @ (u[:, :rank] * s[:rank] @ v[:rank]).T) > 1.3 * least  # SVD-softmax, blind to the states


def test_scores_are_those_of_the_logits_it_gives(tiny: Engine) -> None:
    prompts = random_prompts([5, 11])
    answers = [g.tokens for g in sorted(tiny.generate(prompts, SAMPLING), key=lambda g: g.index)]
    preview = random_head_preview(tiny.decoder, 2, 3)
    whole, rough = tiny.score(prompts, answers, [Schedule(LAYERS), Schedule(LAYERS, head_preview=preview)]).schedules
    head = compile_head(preview, tiny.decoder, Kernels(), torch.float32, CPU)
    with torch.inference_mode():
        for prompt, tokens, exact, score in zip(prompts, answers, whole, rough, strict=True):
            x = tiny.teacher_forced([Answer(prompt, tokens)]).hidden(Schedule(LAYERS), Compiled())
            full, ours = tiny.decoder.logits(x).log_softmax(-1), head(x).log_softmax(-1)
            assert score.kl == pytest.approx((full.exp() * (full - ours)).sum(-1).tolist(), rel=1e-3, abs=1e-5)
            assert max(exact.kl) < 1e-5 < 0.01 < min(score.kl)


def test_decode_tokens_cost_less_and_prompts_what_they_did(tiny: Engine) -> None:
    preview = random_head_preview(tiny.decoder, rank=6, candidates=9)
    whole, less = (Ledger(tiny.shape, Schedule(LAYERS, head_preview=p)) for p in (None, preview))
    assert less.prompt(20) == whole.prompt(20)
    saved = 2 * (VOCAB * WIDTH - 6 * (VOCAB + WIDTH) - 9 * WIDTH)
    assert whole.decode(20, 5) - less.decode(20, 5) == 4 * saved
    assert not Schedule(LAYERS, head_preview=preview).is_full_depth


def test_the_candidates_rows_of_the_matrix_take_memory(tiny: Engine) -> None:
    sizes = (tiny.shape, Schedule(LAYERS), 8, 20, 10, 4)
    more = replace(sizes[1], head_preview=random_head_preview(tiny.decoder, rank=6, candidates=9))
    assert batch_bytes(sizes[0], more, *sizes[2:]) - batch_bytes(*sizes) == 8 * 9 * WIDTH * 4


def test_it_is_written_beside_its_schedule_and_missed_there(tiny: Engine, tmp_path: Path) -> None:
    schedule = Schedule(LAYERS, head_preview=random_head_preview(tiny.decoder, rank=6, candidates=9))
    schedule.write(tmp_path)
    assert Schedule.read(tmp_path) == schedule
    assert Schedule.read(tmp_path).to_dict() == schedule.to_dict()
    other = Schedule(LAYERS, head_preview=random_head_preview(tiny.decoder, rank=6, candidates=9, seed=1))
    assert other != schedule
    assert other.to_dict() != schedule.to_dict()
    file = tmp_path / "schedule.json"
    file.write_text(json.dumps(other.to_dict()))
    with pytest.raises(ScheduleError, match="tensors of the head preview are not those"):
        Schedule.read(tmp_path)
    (tmp_path / "bridges.safetensors").unlink()
    with pytest.raises(ScheduleError, match=r"bridges\.safetensors"):
        Schedule.read(tmp_path)
    for described in ("rough", {"candidates": "9"}):
        with pytest.raises(ScheduleError, match="as candidates, got"):
            Schedule.from_dict({**Schedule.full_depth(LAYERS).to_dict(), "head": described})
    with pytest.raises(ScheduleError, match="no tensors for the head preview"):
        Schedule.from_dict(schedule.to_dict())


@pytest.mark.parametrize(
    ("candidates", "tensors", "complaint"),
    [
        (0, tensors_of(torch.zeros(4, 2), torch.zeros(2, 4)), "a candidate at the least, got 0"),
        (3, {"down": torch.zeros(4, 2), "up": torch.zeros(2, 4)}, "it needs down, up and bias"),
        (3, tensors_of(torch.zeros(4, 2), torch.zeros(3, 4)), "do not fit together"),
        (3, tensors_of(torch.zeros(4), torch.zeros(4)), "do not fit together"),
        (3, tensors_of(torch.zeros(4, 2), torch.zeros(2, 4), torch.zeros(7, 1)), "do not fit together"),
        (3, tensors_of(torch.full((4, 2), torch.inf), torch.zeros(2, 4)), "no finite number"),
    ],
)
def test_what_cannot_be_one_is_refused(candidates: int, tensors: dict[str, Tensor], complaint: str) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        HeadPreview(candidates, tensors)


@pytest.mark.parametrize(
    ("candidates", "width", "vocab"), [(9, WIDTH + 1, VOCAB), (9, WIDTH, VOCAB - 1), (VOCAB + 1, WIDTH, VOCAB)]
)
def test_one_of_another_model_is_refused(tiny: Engine, candidates: int, width: int, vocab: int) -> None:
    preview = HeadPreview(candidates, tensors_of(torch.zeros(width, 2), torch.zeros(2, width), torch.zeros(vocab)))
    with pytest.raises(ScheduleError, match="calibrate a schedule for it"):
        tiny.generate([[5]], schedule=Schedule(LAYERS, head_preview=preview))
