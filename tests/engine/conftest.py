"""Tiny random models on disk, as transformers saves them, and random schedules."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from engine import Block, Bridge, HeadPreview, ModelShape, Plateau, PromptBridge, Schedule, Unit
from engine.models.decoder import Decoder
from engine.parts.adapter import Adapter
from engine.parts.prompt_bridge import ROLES, WITHIN
from engine.parts.unit import all_units
from tests.engine.adapters import random_adapter

# Plain attention; sliding windows with soft caps; learned positions.
THREE_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "gemma2": {
        "family": "gemma2", "sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 3.0,
    },
    "opt": {"family": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32},
}  # fmt: skip


@pytest.fixture(scope="session")
def schedules() -> Callable[..., st.SearchStrategy[Schedule]]:
    """Strategy for any valid schedule of a model of so many layers: any order of any units, any plateaus.

    Given a hidden width, some skipped blocks of some plateaus are bridged, and some units that run have corrections
    before them; given a shape, some prompts are bridged too; given a decoder, some units are adapted, and with
    `previews` some heads previewed.
    """

    @st.composite
    def draw_schedule(
        draw: st.DrawFn,
        layers: int,
        hidden: int = 0,
        shape: ModelShape | None = None,
        adaptable: Decoder | None = None,
        previews: bool = False,
    ) -> Schedule:
        skippable: list[Unit] = [unit for unit in all_units(layers) if unit.layer > 0]
        order = draw(st.permutations(skippable))[: draw(st.integers(0, len(skippable)))]
        skipped = sorted(draw(st.lists(st.integers(0, len(order)), min_size=1, max_size=5)))
        starts = draw(st.sets(st.integers(1, 12), min_size=len(skipped) - 1, max_size=len(skipped) - 1))
        plateaus = list(map(Plateau, [0, *sorted(starts)], skipped))
        bridges: dict[str, Bridge] = {}
        for index, plateau in enumerate(plateaus if hidden else []):
            names = []
            for block in draw_blocks(draw, set(order[: plateau.skipped]), layers):
                name = f"{index} {block}"
                names.append(name)
                bridges[name] = random_bridge(block, hidden, rank=draw(st.integers(0, 3)), seed=len(bridges))
            plateaus[index] = plateau._replace(bridges=tuple(names))
        first = draw(st.integers(1, layers)) if shape else layers
        prompts = random_prompt_bridge(shape, first) if shape and first < layers else None
        skipped_first = set(order[: plateaus[0].skipped])
        if (
            prompts
            and shape
            and (block := draw_skip(draw, set(skippable) if draw(st.booleans()) else skipped_first, first))
        ):
            kept = range(block.first.layer, block.last.layer + 1)
            prompts = random_prompt_bridge(shape, first, kept=kept if set(block.units) - skipped_first else range(0))
            prompts = replace(prompts, skips=random_bridge(block, hidden, rank=draw(st.integers(0, 3)), seed=9))
        adapter = draw_adapter(draw, adaptable) if adaptable else None
        preview = draw_head_preview(draw, adaptable) if adaptable and previews else None
        return Schedule(layers, tuple(order), tuple(plateaus), {}, bridges, prompts, adapter, preview)

    return draw_schedule


def draw_skip(draw: st.DrawFn, skipped: set[Unit], end: int) -> Block | None:
    """Whole layers below `end` that are skipped, one after the other, or none."""
    starts = [layer for layer in range(1, end) if {Unit("a", layer), Unit("m", layer)} <= skipped]
    if not starts or draw(st.booleans()):
        return None
    first = last = draw(st.sampled_from(starts))
    while last + 1 in starts and draw(st.booleans()):
        last += 1
    return Block.of_layers(first, last + 1)


def draw_adapter(draw: st.DrawFn, decoder: Decoder) -> Adapter | None:
    """Changes of any units, whether a schedule runs them or not, or none."""
    units = sorted(draw(st.sets(st.sampled_from(all_units(decoder.shape.layers)), max_size=4)))
    if not units:
        return None
    adapter = random_adapter(decoder, units, rank=draw(st.integers(1, 3)), seed=draw(st.integers(0, 3)))
    return replace(adapter, changes_prompts=draw(st.booleans()))


def draw_head_preview(draw: st.DrawFn, decoder: Decoder) -> HeadPreview | None:
    if draw(st.booleans()):
        return None
    return random_head_preview(decoder, rank=draw(st.integers(1, 8)), candidates=draw(st.integers(1, 40)))


def draw_blocks(draw: st.DrawFn, skipped: set[Unit], layers: int) -> list[Block]:
    """Blocks of skipped units that do not overlap, and empty ones before units that run."""
    blocks: list[Block] = []
    last_end = -1
    for start in sorted(unit.place for unit in skipped):
        if start > last_end and draw(st.booleans()):
            longest = next(n for n in range(1, len(skipped) + 2) if Unit.at(start + n) not in skipped)
            last_end = start + draw(st.integers(1, longest)) - 1
            blocks.append(Block(Unit.at(start), Unit.at(last_end)))
    running = [unit for unit in all_units(layers) if unit.layer > 0 and unit not in skipped]
    corrected = draw(st.sets(st.sampled_from(running), max_size=2)) if running else set()
    return [*blocks, *map(Block.before, corrected)]


def random_bridge(block: Block, hidden: int, rank: int, seed: int) -> Bridge:
    """Affine for rank 0, else low-rank; it moves the hidden state about as far as a layer does."""
    draw = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draw) * rows**-0.5

    bias = torch.randn(hidden, generator=draw) * 0.1
    if rank == 0:
        return Bridge.affine(block, matrix(hidden, hidden), bias)
    return Bridge(block, {"down": matrix(hidden, rank), "up": matrix(rank, hidden), "bias": bias})


def silent_bridge(block: Block, hidden: int) -> Bridge:
    """One that does nothing yet."""
    return Bridge.affine(block, torch.zeros(hidden, hidden), torch.zeros(hidden))


def random_prompt_bridge(shape: ModelShape, first: int, seed: int = 0, kept: range = range(0)) -> PromptBridge:
    """Keys and values about as large as a layer's own, also of layers that are skipped."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for (weight, bias), layers in ((ROLES, shape.layers - first), (WITHIN, len(kept))):
        if layers:
            width = layers * shape.cache_elements(1)
            tensors[weight] = torch.randn(shape.hidden, width, generator=draw) * shape.hidden**-0.5
            tensors[bias] = torch.randn(width, generator=draw) * 0.1
    skips = random_bridge(Block.of_layers(kept.start, kept.stop), shape.hidden, rank=0, seed=seed) if kept else None
    return PromptBridge(first, tensors, skips)


def random_head_preview(decoder: Decoder, rank: int, candidates: int, seed: int = 0) -> HeadPreview:
    """Rough logits of about the exact ones' size, which tell little of them."""
    draw, (vocab, width) = torch.Generator().manual_seed(seed), decoder.head_weight().shape
    down = torch.randn(width, rank, generator=draw) * width**-0.5
    up, bias = torch.randn(rank, width, generator=draw), torch.randn(vocab, generator=draw)
    return HeadPreview(candidates, {"down": down, "up": up, "bias": bias})
