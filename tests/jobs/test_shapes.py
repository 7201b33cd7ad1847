"""Models without weights that speed is measured with: their schedules save what was asked for, texts are as long."""

import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors import safe_open
from transformers import LlamaConfig

from engine import Engine, Ledger, Sampling, Schedule, Tokenizer, describe
from jobs import command_line
from jobs.benchmarks import shapes


def test_a_shape_has_schedules_that_fit_it_and_texts_of_the_length_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"shapes --model Qwen2.5-1.5B --rows 3 --prompt-tokens 50 --output {tmp_path / 'qwen'}"
    monkeypatch.setattr(sys, "argv", command.split())
    assert command_line.start(shapes.WriteShape, shapes.PROGRAM, shapes.write) == 0
    shape = describe(str(tmp_path / "qwen" / "model"))
    assert (shape.layers, shape.hidden) == (28, 1536)
    full, decode, both = (
        Ledger(shape, schedule)
        for schedule in (
            Schedule.full_depth(28), *(Schedule.read(tmp_path / "qwen" / name) for name in ("decode", "both"))
        )
    )  # fmt: skip
    assert full.decode(50, 20) > 1.2 * decode.decode(50, 20) == 1.2 * both.decode(50, 20)
    assert full.prompt(50) == decode.prompt(50) > 1.6 * both.prompt(50)
    tokenizer = Tokenizer(tmp_path / "qwen" / "model")
    texts = pq.read_table(tmp_path / "qwen" / "texts.parquet")["text"].to_pylist()
    assert [len(tokenizer.encode(text)) for text in texts] == [50] * 3
    weights = safe_open(tmp_path / "qwen" / "model" / "model.safetensors", "pt")
    assert not list(weights.keys())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").touch()
    monkeypatch.setattr(sys, "argv", [*command.split()[:-1], str(tmp_path / "mine")])
    assert command_line.start(shapes.WriteShape, shapes.PROGRAM, shapes.write) == 1
    assert "letter.txt" in capsys.readouterr().err


def test_with_weights_our_engine_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = LlamaConfig(
        vocab_size=49152, hidden_size=32, intermediate_size=48, num_hidden_layers=12, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    monkeypatch.setitem(shapes.MODELS, "SmolLM2-360M", small)
    shapes.write(shapes.WriteShape(model="SmolLM2-360M", weights=True, prompt_tokens=20, rows=2, output=str(tmp_path)))
    engine, schedule = Engine.load(str(tmp_path / "model")), Schedule.read(tmp_path / "both")
    texts = pq.read_table(tmp_path / "texts.parquet")["text"].to_pylist()
    for answer in engine.generate(texts, Sampling(max_new_tokens=3), schedule):
        assert answer.prompt_tokens == 20
        assert answer.flops_prompt < 0.9 * (answer.flops_full_depth - answer.flops_decode_full_depth)
        assert answer.mean_active_layers < 12
