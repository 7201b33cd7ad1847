"""What goes wrong inside vLLM costs the rows that it has to, and no other: each time it starts anew."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Generation, Sampling, Schedule, StreamLost
from pipeline.rows.row_generator import RowGenerator
from pipeline.rows.shared_engine import SharedEngine
from tests.engine.prompts import random_prompts

pytest.importorskip("vllm.config", exc_type=ImportError)

from engine.vllm.engine import VllmEngine
from tests.engine.vllm.both_engines import VARIANTS, Pair, generations, pair, schedule
from tests.engine.vllm.faulty_vllm import ROOM, failing

SAMPLING = Sampling(max_new_tokens=10)
PROMPTS = random_prompts((12, 40, 7, 25, 18), seed=8)
BAD = 3  # of them


@pytest.fixture(scope="module")
def both(make_checkpoint: Callable[..., Path]) -> Iterator[Pair]:
    found = pair(make_checkpoint(**VARIANTS["llama"]))
    yield found
    found[1].close()


def test_a_stream_whose_rows_were_in_anothers_pass_that_broke_does_not_wait_for_them(
    both: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, vllm = both
    stream, audit = vllm.decoding(SAMPLING, schedule(), 4), vllm.decoding(SAMPLING, None, 4)
    stream.add(PROMPTS[0], "0", 0)
    stream.step()
    audit.add(PROMPTS[1], "1", 0)

    def fails(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert vllm._running is not None
    monkeypatch.setattr(vllm._running.llm.engine_core.engine_core.model_executor, "execute_model", fails)
    with pytest.raises(torch.OutOfMemoryError):
        audit.step()
    with pytest.raises(StreamLost):
        stream.step()
    again, wanted = (generations(engine, PROMPTS[:1], SAMPLING, schedule()) for engine in (vllm, own))
    assert [each.tokens for each in again] == [each.tokens for each in wanted]


@pytest.mark.parametrize("fault", ["memory", "row"])
def test_a_pass_that_fails(fault: str, both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    own, vllm = both
    start, failures = VllmEngine._start, list[int]()

    def started(engine: VllmEngine, *args: Any) -> Any:
        return failing(start(engine, *args), fault, lambda prompt: prompt == PROMPTS[BAD], failures.append)

    monkeypatch.setattr(VllmEngine, "_start", started)
    vllm.close()
    rows = RowGenerator(SharedEngine(lambda: vllm), SAMPLING, schedule(), batch_size=4)
    found = rows.generate(PROMPTS, [str(index) for index in range(len(PROMPTS))])
    wanted = generations(own, PROMPTS, SAMPLING, schedule())
    assert failures
    for index, (given, expected) in enumerate(zip(found, wanted, strict=True)):
        if fault == "row" and index == BAD:
            assert given == "ValueError: this row cannot be"
        else:
            assert not isinstance(given, str), given
            assert (given.tokens, given.flops_decode) == (expected.tokens, expected.flops_decode)
    assert rows.batch_size == (ROOM if fault == "memory" else 4)


@pytest.mark.parametrize("sampling", [SAMPLING, replace(SAMPLING, temperature=1.0)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("under", [None, schedule()], ids=["full depth", "schedule"])
def test_a_row_whose_logits_are_not_numbers_is_an_error(
    sampling: Sampling, under: Schedule | None, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = shutil.copytree(make_checkpoint(**VARIANTS["llama"], tie_word_embeddings=False), tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    never = next(token for token in range(90) if not any(token in prompt for prompt in PROMPTS))
    weights["model.embed_tokens.weight"][never] = torch.nan
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    own, vllm = pair(model)
    prompts = [*PROMPTS[:BAD], [*PROMPTS[BAD], never, 5], *PROMPTS[BAD + 1 :]]
    ids = [str(index) for index in range(len(prompts))]
    try:
        found, wanted = (
            RowGenerator(each, sampling, under, batch_size=4).generate(prompts, ids) for each in (vllm, own)
        )
    finally:
        vllm.close()
    assert str(found[BAD]).startswith("FloatingPointError: the model's logits are not numbers")
    tokens = [[row.tokens if isinstance(row, Generation) else row for row in rows] for rows in (found, wanted)]
    assert tokens[0] == tokens[1]
