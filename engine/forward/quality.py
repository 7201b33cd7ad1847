"""Known answers in one pass: how far schedules move the distributions along them, how likely full depth finds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.bootstrap import Bootstrap
from engine.forward.operations import Compiled
from engine.forward.packing import packs
from engine.forward.prompt_pass import FULL_DEPTH, PromptPass
from engine.forward.teacher_forcing import Answer, AnswerPass
from engine.parts.unit import Unit, all_units
from engine.schedules.schedule import Schedule

PACK_TOKENS = 1024  # answer tokens scored together: bounds the distributions that are held, a vocabulary each
IGNORED = -1  # label of a token that is not counted


@dataclass(frozen=True)
class Quality:
    """Per decode token: KL divergence from full depth in nats, and whether the likeliest token is the same."""

    kl: Tensor  # [N]
    agrees: Tensor  # [N], bool
    sample: Tensor  # [N]: whose token

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean())

    @property
    def agreement(self) -> float:
        return float(self.agrees.double().mean())

    def figures(self, seed: int = 0) -> dict[str, float | list[float]]:
        """Means over tokens with 95 % bootstrap intervals; answers are drawn, as tokens of one are not independent."""
        figures: dict[str, float | list[float]] = {}
        tokens = torch.bincount(self.sample).double().numpy()
        bootstrap = Bootstrap(len(tokens), seed)
        for name, values in (("kl", self.kl.double()), ("agreement", self.agrees.double())):
            estimate = bootstrap.ratio(torch.bincount(self.sample, weights=values).numpy(), tokens)
            assert estimate is not None
            value, low, high = (round(figure, 4) for figure in estimate)
            figures |= {name: value, f"{name}_interval": [low, high]}
        return figures


def divergences(full: Tensor, scheduled: Iterable[tuple[slice, Tensor]]) -> tuple[Tensor, Tensor]:
    """KL(full || ours) in nats, and whether both find the same token likeliest: each [N].

    Args:
        full: log-probabilities at full depth [N, vocab].
        scheduled: logits of the same tokens under a schedule, [n, vocab] slice by slice.
    """
    kl, agrees = [], []
    for part, logits in scheduled:
        reference = full[part].float()
        found = (reference.exp() * (reference - logits.float().log_softmax(-1))).sum(-1)
        kl.append(found.clamp_min(0))  # rounding can leave equal distributions just below 0
        agrees.append(reference.argmax(-1) == logits.argmax(-1))
    return torch.cat(kl), torch.cat(agrees)


class Judge:
    """Compares schedules with full depth on a fixed set of answers."""

    def __init__(self, answers: AnswerPass, places: tuple[int, ...] = ()) -> None:
        """Runs the answers at full depth once, and keeps states at `places`, so that schedules that leave what is below
        alone start there.
        """
        self.answers = answers
        self._states: dict[int, Tensor] = {}

        def keep(place: int, x: Tensor) -> None:
            if place in places:
                self._states[place] = x

        x = answers.full_depth(keep)
        # In half precision: a probability is then off by a thousandth of itself, the divergence by less than that.
        self._full = torch.cat([logits.float().log_softmax(-1).half() for _, logits in answers.logits(x)])

    def judge(self, schedule: Schedule, compiled: Compiled, answers: AnswerPass | None = None) -> Quality:
        """Teacher-forced quality of a schedule; `answers` are the same after their prompts ran under it, where it
        changes prompts.
        """
        passed = answers or self.answers
        place = max((place for place in self._states if place <= schedule.changed_from), default=0)
        start = (place, self._states[place]) if place else None
        x = passed.hidden(schedule, compiled, start)
        kl, agrees = divergences(self._full, passed.scheduled_logits(x, schedule, compiled))
        return Quality(kl.cpu(), agrees.cpu(), self.answers.sample)


@dataclass(frozen=True, slots=True)
class AnswerScore:
    """One answer under one schedule. An answer of g tokens has g - 1 decode steps; step t predicts token t + 1."""

    kl: tuple[float, ...]  # KL divergence of the schedule's distribution from full depth's, KL(full || schedule), nats
    agrees: tuple[bool, ...]  # whether both find the same token likeliest


class Likelihood(NamedTuple):
    """How likely full depth finds an answer."""

    nll: float  # negative log-likelihood in nats, summed over all tokens of the answer
    tokens: int


def score(
    prompts: PromptPass, answers: Sequence[Answer], schedules: Sequence[Schedule], compiled: Compiled
) -> list[list[AnswerScore]]:
    """[schedule][answer], of full depth's answers: those with fewer than two tokens have empty scores. Prompts run once
    for all schedules with the same prompt plan.
    """
    scores = [[AnswerScore((), ())] * len(answers) for _ in schedules]
    for pack in _packs(answers):
        packed = [answers[index] for index in pack]
        plans = {FULL_DEPTH, *(schedule.prompt_plan for schedule in schedules)}
        forced = {plan: AnswerPass(prompts, packed, plan, compiled) for plan in plans}
        whole = forced[FULL_DEPTH]
        x = whole.full_depth()
        reference = torch.cat([logits.float().log_softmax(-1) for _, logits in whole.logits(x)])
        for row, schedule in zip(scores, schedules, strict=True):
            ours = forced[schedule.prompt_plan]
            logits = ours.scheduled_logits(ours.hidden(schedule, compiled), schedule, compiled)
            kl, agrees = (found.tolist() for found in divergences(reference, logits))
            spans = pairwise(accumulate((answer.passes for answer in packed), initial=0))
            for index, (start, end) in zip(pack, spans, strict=True):
                row[index] = AnswerScore(tuple(kl[start:end]), tuple(agrees[start:end]))
    return scores


def likelihood(prompts: PromptPass, answers: Sequence[Answer]) -> list[Likelihood]:
    """Of each answer, anyone's, at full depth, teacher-forced, its first token included; an empty one has no tokens.

    All answers to one prompt share a pass over it.
    """
    found = [Likelihood(0.0, 0)] * len(answers)
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, answer in enumerate(answers):
        if answer.tokens:
            by_prompt.setdefault(tuple(answer.prompt), []).append(index)
    for pack in packs(by_prompt.values(), lambda group: sum(len(answers[i].tokens) for i in group), PACK_TOKENS):
        indices = [index for group in pack for index in group]
        packed = [answers[index] for index in indices]
        # A pass needs a token to feed back: where there is but one, it is fed too, and what follows is not counted.
        padded = [answer if answer.passes else Answer(answer.prompt, [*answer.tokens] * 2) for answer in packed]
        forced = AnswerPass(prompts, padded)
        firsts, passes = torch.tensor([a.tokens[0] for a in packed]), torch.tensor([a.passes for a in packed])
        labels = torch.where(forced.step < passes[forced.sample], forced.next_token, IGNORED)
        x = forced.full_depth()
        sums = torch.zeros(len(packed), dtype=torch.float64)
        first_tokens = forced.first_hidden, firsts, torch.arange(len(packed))
        for states, tokens, owners in (first_tokens, (x, labels, forced.sample)):
            for part, logits in forced.logits(states):
                wanted = tokens[part].to(logits.device)
                nll = F.cross_entropy(logits.float(), wanted, reduction="none", ignore_index=IGNORED)
                sums.index_add_(0, owners[part], nll.double().cpu())
        for index, answer, nll_sum in zip(indices, packed, sums.tolist(), strict=True):
            found[index] = Likelihood(nll_sum, len(answer.tokens))
    return found


def similarity(prompts: PromptPass, answers: Sequence[Answer]) -> dict[Unit, float]:
    """Mean cosine similarity of each unit's input and output over all decode steps, at full depth."""
    units = all_units(prompts.decoder.shape.layers)
    sums = [0.0] * len(units)
    for pack in _packs(answers):
        before: list[Tensor] = []

        def observe(place: int, x: Tensor, before: list[Tensor] = before) -> None:
            if place:
                sums[place - 1] += float(F.cosine_similarity(before.pop(), x, dim=-1).sum())
            before.append(x)

        AnswerPass(prompts, [answers[index] for index in pack]).full_depth(observe)
    steps = sum(max(0, answer.passes) for answer in answers)
    return {unit: total / steps for unit, total in zip(units, sums, strict=True)}


def _packs(answers: Sequence[Answer]) -> Iterator[list[int]]:
    """Indices of answers that are scored together; those without a decode step are left out."""
    scored = [index for index, answer in enumerate(answers) if answer.passes > 0]
    return packs(scored, lambda index: answers[index].passes, PACK_TOKENS)
