"""Answers in one pass: how far schedules move the distributions along full depth's, how likely it finds anyone's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.forward.divergence import divergence
from engine.forward.operations import Compiled
from engine.forward.packing import packs
from engine.forward.prompt_pass import FULL_DEPTH
from engine.forward.teacher_forcing import Answer, AnswerPass
from engine.parts.unit import Unit, all_units
from engine.schedules.schedule import PromptPlan, Schedule

PACK_TOKENS = 1024  # answer tokens scored together: bounds the distributions that are held, a vocabulary each
IGNORED = -1  # label of a token that is not counted

Forcing = Callable[[Sequence[Answer], PromptPlan, Compiled], AnswerPass]


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
    forcing: Forcing,
    answers: Sequence[Answer],
    schedules: Sequence[Schedule],
    compiled: Compiled,
    layers: int,
) -> list[list[AnswerScore]]:
    """[schedule][answer]: answers with fewer than two tokens have empty scores. Prompts run once for all schedules
    with the same prompt plan.

    Args:
        forcing: makes a pass over answers whose prompts ran under a plan.
        answers: of full depth.
        schedules: to score.
        compiled: what all schedules bring along.
        layers: of the model.
    """
    scores = [[AnswerScore((), ())] * len(answers) for _ in schedules]
    for pack in _packs(answers):
        packed = [answers[index] for index in pack]
        plans = {FULL_DEPTH, *(schedule.prompt_plan for schedule in schedules)}
        forced = {plan: forcing(packed, plan, compiled) for plan in plans}
        whole = forced[FULL_DEPTH]
        x = whole.hidden(Schedule.full_depth(layers), Compiled())
        reference = torch.cat([logits.float().log_softmax(-1) for _, logits in whole.logits(x)])
        for row, schedule in zip(scores, schedules, strict=True):
            ours = forced[schedule.prompt_plan]
            logits = ours.scheduled_logits(ours.hidden(schedule, compiled), schedule, compiled)
            compared = _compare(packed, reference, logits)
            for index, answer_score in zip(pack, compared, strict=True):
                row[index] = answer_score
    return scores


def likelihood(forcing: Forcing, answers: Sequence[Answer], layers: int) -> list[Likelihood]:
    """Of each answer at full depth, teacher-forced, its first token included; an empty answer has no tokens.

    The answers may be anyone's. All answers to one prompt share a pass over it.

    Args:
        forcing: makes a pass over answers.
        answers: to judge.
        layers: of the model.
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
        forced = forcing(padded, FULL_DEPTH, Compiled())
        firsts, passes = (
            torch.tensor(counts) for counts in ([a.tokens[0] for a in packed], [a.passes for a in packed])
        )
        labels = torch.where(forced.step < passes[forced.sample], forced.next_token, IGNORED)
        x = forced.hidden(Schedule.full_depth(layers), Compiled())
        sums = torch.zeros(len(packed), dtype=torch.float64)
        for states, tokens, owners in (
            (forced.first_hidden, firsts, torch.arange(len(packed))), (x, labels, forced.sample),
        ):  # fmt: skip
            for part, logits in forced.logits(states):
                wanted = tokens[part].to(logits.device)
                nll = F.cross_entropy(logits.float(), wanted, reduction="none", ignore_index=IGNORED)
                sums.index_add_(0, owners[part], nll.double().cpu())
        for index, answer, nll_sum in zip(indices, packed, sums.tolist(), strict=True):
            found[index] = Likelihood(nll_sum, len(answer.tokens))
    return found


def similarity(forcing: Forcing, answers: Sequence[Answer], layers: int) -> dict[Unit, float]:
    """Mean cosine similarity of each unit's input and output over all decode steps, at full depth."""
    units = all_units(layers)
    sums = [0.0] * len(units)
    for pack in _packs(answers):
        before: list[Tensor] = []

        def observe(place: int, x: Tensor, before: list[Tensor] = before) -> None:
            if place:
                sums[place - 1] += float(F.cosine_similarity(before.pop(), x, dim=-1).sum())
            before.append(x)

        forced = forcing([answers[index] for index in pack], FULL_DEPTH, Compiled())
        forced.hidden(Schedule.full_depth(layers), Compiled(), observe=observe)
    steps = sum(max(0, answer.passes) for answer in answers)
    return {unit: total / steps for unit, total in zip(units, sums, strict=True)}


def _compare(
    answers: Sequence[Answer], reference: Tensor, scheduled: Iterable[tuple[slice, Tensor]]
) -> Iterator[AnswerScore]:
    """Scores of answers, from full depth's log-probabilities [N, vocab] and a schedule's logits, slice by slice."""
    kl: list[float] = []
    agrees: list[bool] = []
    for part, logits in scheduled:
        found = divergence(reference[part], logits)
        kl += found[0].tolist()
        agrees += found[1].tolist()
    ends = list(accumulate(answer.passes for answer in answers))
    for start, end in zip([0, *ends], ends, strict=False):
        yield AnswerScore(tuple(kl[start:end]), tuple(agrees[start:end]))


def _packs(answers: Sequence[Answer]) -> Iterator[list[int]]:
    """Indices of answers that are scored together; those without a decode step are left out."""
    scored = [index for index, answer in enumerate(answers) if answer.passes > 0]
    return packs(scored, lambda index: answers[index].passes, PACK_TOKENS)
