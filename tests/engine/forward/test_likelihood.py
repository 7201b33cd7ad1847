"""How likely full depth finds an answer is what transformers computes of it, whoever wrote it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import Engine, PromptError, Sampling, ScheduleError
from engine.forward import quality
from engine.forward.prompt_pass import PromptPass
from engine.forward.teacher_forcing import KeptPrompts
from engine.schedules import recipes
from tests.engine.conftest import THREE_FAMILIES
from tests.engine.prompts import random_prompts

LAYERS = 3


@pytest.fixture(scope="module", params=THREE_FAMILIES)
def checkpoint(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint(num_hidden_layers=LAYERS, **THREE_FAMILIES[request.param])


def by_transformers(
    checkpoint: Path, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[float]:
    """Negative log-likelihoods, from the logits of prompt and answer in one call each."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    sums = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0].log_softmax(-1)
        labels = torch.tensor(answer)
        sums.append(-float(logits[len(prompt) - 1 : -1].gather(1, labels[:, None]).sum()))
    return sums


def test_it_is_that_of_transformers_first_token_included(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several answers to a prompt, answers of one token, and more than a pass holds."""
    monkeypatch.setattr(quality, "PACK_TOKENS", 20)
    engine = Engine.load(str(checkpoint), device="cpu")
    prompts = random_prompts([5, 1, 17, 5, 9], seed=1)
    prompts += [prompts[2], prompts[0]]
    written = [random_prompts([7, 1, 12, 3, 1, 4, 30], seed=2), random_prompts([1, 2, 1, 9, 40, 3, 5], seed=3)]
    for answers, found in zip(written, engine.score(prompts, written[0], [], written[1:]).nll, strict=True):
        assert found == pytest.approx(by_transformers(checkpoint, prompts, answers), rel=1e-4)


def test_a_shared_prefix_changes_nothing(checkpoint: Path) -> None:
    engine = Engine.load(str(checkpoint), device="cpu")
    prompts, answers = [[4, 5, 6, 7, 8], [4, 5, 6, 9]], [[1, 2, 7], [8]]
    [alone] = engine.score(prompts, answers).nll
    engine.share_prefix([4, 5, 6])
    [found] = engine.score(prompts, answers).nll
    assert found == pytest.approx(alone)


def test_an_empty_answer_has_no_tokens_and_an_empty_prompt_is_refused(checkpoint: Path) -> None:
    engine = Engine.load(str(checkpoint), device="cpu")
    assert engine.score([[5], [6]], [[], []]).nll == [[0.0] * 2]
    with pytest.raises(PromptError, match="empty"):
        engine.score([[]], [[1]])


def test_full_depth_finds_what_a_worse_schedule_writes_less_likely(packaged: Engine, chats: list[list[int]]) -> None:
    prompts = sorted(chats, key=len)[::25]
    nll = []
    for active in (30, 26, 18):
        schedule = recipes.skipdecode(30, warmup=4, max_active=active, min_active=active, horizon=1)
        found = sorted(packaged.generate(prompts, Sampling(max_new_tokens=16), schedule), key=lambda each: each.index)
        [likely] = packaged.score(prompts, [each.tokens for each in found]).nll
        nll.append(sum(likely) / sum(len(each.tokens) for each in found))
    assert nll == sorted(nll)
    assert nll[0] < 1
    assert nll[2] > nll[0] + 1


def test_few_answer_tokens_behind_long_prompts_do_not_all_run_at_once(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their keys and values would fill the memory."""
    monkeypatch.setattr(quality, "PACK_TOKENS", 20)
    engine = Engine.load(str(checkpoint), device="cpu")
    prompts, answers = random_prompts([60] * 9, seed=1), random_prompts([2] * 9, seed=2)
    packed: list[int] = []

    class Counted(KeptPrompts):
        def __init__(self, model: PromptPass, tokens: Sequence[Sequence[int]], *others: Any) -> None:
            packed.append(sum(map(len, tokens)))
            super().__init__(model, tokens, *others)

    monkeypatch.setattr(quality, "KeptPrompts", Counted)
    [found] = engine.score(prompts, answers).nll
    assert found == pytest.approx(by_transformers(checkpoint, prompts, answers), rel=1e-4)
    assert sum(packed) == 9 * 60
    assert max(packed) <= 20 * (quality.PROMPT_SHARE + 1)


def test_answers_without_a_decode_step_have_no_similarity(checkpoint: Path) -> None:
    with pytest.raises(ScheduleError, match="no answer has a decode step"):
        Engine.load(str(checkpoint), device="cpu").unit_similarity([[5], [6]], [[7], []])


def test_a_distribution_that_is_not_numbers_is_infinitely_far_from_full_depth() -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
    ours = logits.clone()
    ours[1, 4] = torch.nan
    kl, _ = quality.divergences(logits.log_softmax(-1), [(slice(0, 3), ours)])
    assert kl.isinf().tolist() == [False, True, False]
    assert kl[[0, 2]].tolist() == pytest.approx([0, 0], abs=1e-6)
