"""The demo's schedules in vLLM on real texts: our own engine's tokens, unless two are as likely as each other."""

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from torch import Tensor

from engine import Engine, Generation, Sampling, Schedule

pytest.importorskip("vllm.config", exc_type=ImportError)

from engine.vllm.engine import VllmEngine

DEMO = Path(__file__).parents[3] / "infra" / "demo"
PROMPTS = int(os.environ.get("SKIPDECODE_VLLM_PROMPTS", "12"))
SAMPLING = Sampling(max_new_tokens=24)  # the last of their plateaus begins at step 16
TIE = 1e-4  # of two logits: vLLM's float32 results change with the batch in their last bits
MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def prompts(packaged: Engine) -> list[list[int]]:
    files = (DEMO / f"{name}.parquet" for name in ("package_descriptions", "more_package_descriptions"))
    texts = [text for file in files for text in pq.read_table(file, columns=["text"])["text"].to_pylist()]
    question = "Summarise this text in one sentence.\n\n"
    return [packaged.tokenizer.encode_chat(question + text) for text in texts[:PROMPTS]]


@pytest.fixture(scope="module")
def vllm() -> Iterator[VllmEngine]:
    engine = VllmEngine(MODEL, "float32", "cpu", max_model_len=1024, max_num_batched_tokens=512)
    yield engine
    engine.close()


def gap(own: Engine, prompt: list[int], wanted: Generation, found: Generation, schedule: Schedule | None) -> float:
    """Between the logits of the first two tokens that differ, in our own engine."""
    step = next(at for at, pair in enumerate(zip(wanted.tokens, found.tokens, strict=False)) if pair[0] != pair[1])
    seen: list[Tensor] = []
    logits = own.decoder.logits

    def noted(x: Tensor) -> Tensor:
        seen.append(logits(x))
        return seen[-1].clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own.decoder, "logits", noted)
        list(own.generate([prompt], replace(SAMPLING, max_new_tokens=step + 1), schedule))
    return float(seen[step][0, wanted.tokens[step]] - seen[step][0, found.tokens[step]])


CALIBRATED = [f"calibrated/{target}" for target in ("1.25x", "1.45x", "1.65x", "2x")]
SCHEDULES = ["full depth", *CALIBRATED, "adapted", "whole_sample_2x", "whole_sample_1.5x"]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.timeout(3600)
def test_the_demos_schedules(name: str, packaged: Engine, prompts: list[list[int]], vllm: VllmEngine) -> None:
    schedule = None if name == "full depth" else replace(Schedule.read(DEMO / name), head_preview=None)
    prefix = [tokens[0] for tokens in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False))]
    assert vllm.share_prefix(prefix) == packaged.share_prefix(prefix) > 0
    wanted = sorted(packaged.generate(prompts, SAMPLING, schedule, 16), key=lambda each: each.index)
    found = sorted(vllm.generate(prompts, SAMPLING, schedule, 16), key=lambda each: each.index)
    others = [index for index in range(len(prompts)) if found[index] != wanted[index]]
    assert len(others) <= 0.01 * len(prompts) + 1
    assert all(gap(packaged, prompts[at], wanted[at], found[at], schedule) <= TIE for at in others)
