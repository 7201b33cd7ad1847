"""Shapes of known models, and schedules that skip in them: what speed can be measured with, though not quality.

    .venv/bin/python -m jobs.benchmarks.shapes --model Llama-3.1-8B --output out/llama
    .venv/bin/python -m jobs.benchmarks.job --device cuda --dtype bfloat16 --contenders vllm --random-weights \
        --gpu-memory-share 0.3 --model out/llama/model --schedules out/llama/decode out/llama/both \
        --input out/llama/texts.parquet --prompt '{text}' --prompt-format raw --max-new-tokens 128 --full-length \
        --rows 128 --batch-size 128

Contenders share the card: look in their logs whether the cache has room for all rows. vLLM makes weights up itself,
all other contenders need `--weights` here, and there no `--random-weights`.
"""

import random
import sys
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PretrainedConfig, Qwen2Config

from engine import Block, Bridge, ModelShape, Plateau, PromptBridge, Schedule, checkpoint_directory
from engine.calibration.prompts import counted_prompt_bridge, prompt_cut
from engine.models.families import family_of
from jobs import command_line
from pipeline.storage.ownership import claim_directory
from pipeline.storage.settings import LocalPlace

PROGRAM = "jobs.benchmarks.shapes"
TOKENIZER = "smollm2-135m-instruct"
WARM_UP = 4  # layers below the block that decoding skips
MODELS: dict[str, PretrainedConfig] = {
    "SmolLM2-360M": LlamaConfig(
        vocab_size=49152, hidden_size=960, intermediate_size=2560, num_hidden_layers=32, num_attention_heads=15,
        num_key_value_heads=5, max_position_embeddings=8192, tie_word_embeddings=True,
    ),
    "Qwen2.5-1.5B": Qwen2Config(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True,
    ),
    "Llama-3.1-8B": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=32768,
    ),
}  # fmt: skip


class WriteShape(BaseModel):
    """Write a model's config, two schedules for it and texts: `decode` skips in decoding, `both` on prompts as well."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field("Llama-3.1-8B", description=f"one of {', '.join(MODELS)}", pattern=f"^({'|'.join(MODELS)})$")
    decode_skipped: float = Field(1 / 3, ge=0.05, le=0.8, description="share of the layers that decoding skips")
    prompt_skipped: float = Field(1 / 2, ge=0.05, le=0.8, description="share of the layers that prompts are spared")
    weights: bool = Field(False, description="random weights too, in bfloat16")
    prompt_tokens: int = Field(1024, ge=1, description="tokens of each text")
    rows: int = Field(256, ge=1, description="texts")
    output: LocalPlace = Field(..., description="directory for model, decode, both and texts.parquet")


def skipping(shape: ModelShape, decode_skipped: float, prompt_skipped: float) -> tuple[Schedule, Schedule]:
    """Schedules that skip such shares of the layers in decoding, and on prompts too; what their maps hold is random."""
    end = WARM_UP + round(decode_skipped * shape.layers)
    block, draw = Block.of_layers(WARM_UP, end), torch.Generator().manual_seed(0)

    def affine(over: Block) -> Bridge:
        weight = torch.randn(shape.hidden, shape.hidden, generator=draw) / shape.hidden
        return Bridge.affine(over, weight.half(), torch.zeros(shape.hidden).half())

    plateau = Plateau(0, len(block.units), ("block",))
    decode = Schedule(shape.layers, tuple(block.units), (plateau,), bridges={"block": affine(block)})
    counted = counted_prompt_bridge(
        shape, prompt_cut(shape, shape.layers - round(prompt_skipped * shape.layers), [decode])
    )
    tensors = {
        role: (torch.randn(tensor.shape, generator=draw) / shape.hidden).half()
        for role, tensor in counted.tensors.items()
    }
    skips = None if counted.skips is None else affine(counted.skips.block)
    return decode, replace(decode, prompt_bridge=PromptBridge(counted.first, tensors, skips))


def write(config: WriteShape) -> None:
    """Raises JobError for a directory that something else has written to."""
    claim_directory(config.output, PROGRAM, ())
    described = MODELS[config.model]
    described.architectures = [f"{type(described).__name__.removesuffix('Config')}ForCausalLM"]
    if config.weights:
        AutoModelForCausalLM.from_config(described, dtype=torch.bfloat16).save_pretrained(config.output / "model")
    else:
        described.save_pretrained(config.output / "model")
        save_file({}, config.output / "model" / "model.safetensors")  # a checkpoint has one
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_directory(TOKENIZER))
    tokenizer.save_pretrained(config.output / "model")
    shape = family_of(described).shape(described)
    for name, schedule in zip(
        ("decode", "both"), skipping(shape, config.decode_skipped, config.prompt_skipped), strict=True
    ):
        schedule.write(config.output / name)
    words = [word for word in tokenizer.get_vocab() if word[:1] == "Ġ" and word[1:].isascii() and word[1:].isalpha()]
    draw = random.Random(0)
    texts = [
        "".join(f" {word[1:]}" for word in draw.choices(words, k=config.prompt_tokens)) for _ in range(config.rows)
    ]
    pq.write_table(pa.table({"text": texts, "reference": [""] * config.rows}), config.output / "texts.parquet")


if __name__ == "__main__":
    sys.exit(command_line.start(WriteShape, PROGRAM, write))
