"""Tiny random models on disk, as transformers saves them, and random schedules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from engine import Block, Bridge, Plateau, Schedule, Unit
from engine.unit import all_units

ASCII = [chr(code) for code in range(33, 127)] + ["Ġ"]  # the byte-level alphabet writes a space as Ġ


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> None:
    """Two threads for the packaged model; for a tiny one they would mostly wait for each other."""
    torch.set_num_threads(2 if "packaged" in request.fixturenames else 1)


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte. Id 0 ends a text; ids 1 to 95 are printable ASCII, the other bytes come after."""
    alphabet = ASCII + sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(ASCII))
    vocab = {token: id for id, token in enumerate(["<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@pytest.fixture(scope="session")
def make_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: PreTrainedTokenizerFast
) -> Callable[..., Path]:
    """Save a random model, a Llama unless another family is asked for; keywords override its config.

    Every parameter is drawn, biases and norms too. Queries and keys are large enough for attention to look at single
    tokens, and logits large enough for greedy decoding not to hang on rounding.
    """

    def make(
        seed: int = 0,
        eos: int | list[int] = 0,
        max_shard_size: str = "1GB",
        family: str = "llama",
        **overrides: Any,
    ) -> Path:
        config = AutoConfig.for_model(
            family, **{**TINY, "eos_token_id": eos, "bos_token_id": None, "pad_token_id": None, **overrides}
        )
        model = AutoModelForCausalLM.from_config(config)
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0, 0.2, generator=draw)
                elif "q_norm" in name or "k_norm" in name:
                    parameter.uniform_(1, 3, generator=draw)
                elif "norm" in name:
                    parameter.uniform_(0.5, 1.5, generator=draw)
                elif "embed" in name:  # small, so that a tied head does not just repeat the last token
                    parameter.normal_(0, 0.3, generator=draw)
                elif "lm_head" in name:
                    parameter.normal_(0, 1, generator=draw)
                else:
                    gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
                    parameter.normal_(0, gain * parameter.shape[1] ** -0.5, generator=draw)
        directory = tmp_path_factory.mktemp(family)
        model.generation_config.eos_token_id = eos
        model.save_pretrained(directory, max_shard_size=max_shard_size)
        byte_tokenizer.save_pretrained(directory)
        return directory

    return make


TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="session")
def schedules() -> Callable[..., st.SearchStrategy[Schedule]]:
    """Strategy for any valid schedule of a model of so many layers: any order of any units, any plateaus.

    Given a hidden width, some skipped blocks of some plateaus are bridged.
    """

    @st.composite
    def draw_schedule(draw: st.DrawFn, layers: int, hidden: int = 0) -> Schedule:
        skippable: list[Unit] = [unit for unit in all_units(layers) if unit.layer > 0]
        order = draw(st.permutations(skippable))[: draw(st.integers(0, len(skippable)))]
        skipped = sorted(draw(st.lists(st.integers(0, len(order)), min_size=1, max_size=5)))
        starts = draw(st.sets(st.integers(1, 12), min_size=len(skipped) - 1, max_size=len(skipped) - 1))
        plateaus = list(map(Plateau, [0, *sorted(starts)], skipped))
        bridges: dict[str, Bridge] = {}
        for index, plateau in enumerate(plateaus if hidden else []):
            names = []
            for block in draw_blocks(draw, set(order[: plateau.skipped])):
                name = f"{index} {block}"
                names.append(name)
                bridges[name] = random_bridge(block, hidden, rank=draw(st.integers(0, 3)), seed=len(bridges))
            plateaus[index] = plateau._replace(bridges=tuple(names))
        return Schedule(layers, tuple(order), tuple(plateaus), bridges=bridges)

    return draw_schedule


def draw_blocks(draw: st.DrawFn, skipped: set[Unit]) -> list[Block]:
    """Blocks of skipped units that do not overlap."""
    blocks: list[Block] = []
    last_end = -1
    for start in sorted(unit.place for unit in skipped):
        if start > last_end and draw(st.booleans()):
            longest = next(n for n in range(1, len(skipped) + 2) if Unit.at(start + n) not in skipped)
            last_end = start + draw(st.integers(1, longest)) - 1
            blocks.append(Block(Unit.at(start), Unit.at(last_end)))
    return blocks


def random_bridge(block: Block, hidden: int, rank: int, seed: int) -> Bridge:
    """Affine for rank 0, else low-rank; it moves the hidden state about as far as a layer does."""
    draw = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draw) * rows**-0.5

    bias = torch.randn(hidden, generator=draw) * 0.1
    if rank == 0:
        return Bridge.affine(block, matrix(hidden, hidden), bias)
    return Bridge(block, {"down": matrix(hidden, rank), "up": matrix(rank, hidden), "bias": bias})
