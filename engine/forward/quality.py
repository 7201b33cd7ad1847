"""Known answers in one pass: how far schedules move the distributions along them, how likely full depth finds them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.bootstrap import Bootstrap
from engine.errors import ScheduleError
from engine.forward.compiled_parts import Head
from engine.forward.operations import Compiled
from engine.forward.packing import packs
from engine.forward.prompt_pass import PromptPass
from engine.forward.teacher_forcing import Answer, AnswerPass, KeptPrompts
from engine.parts.unit import Unit, all_units
from engine.schedules.schedule import PromptPlan, Schedule

PACK_TOKENS = 1024  # answer tokens scored together: bounds the states that are held
PROMPT_SHARE = 8  # times as many prompt tokens run with them: bounds the keys and values that one way of running keeps


@dataclass(frozen=True)
class Quality:
    """Per token: KL divergence from full depth in nats, and whether the likeliest token is the same.

    The tokens are those that decode passes give, and where prompts are bridged the answers' first ones too.
    """

    kl: Tensor  # [N]
    agrees: Tensor  # [N], bool
    sample: Tensor  # [N]: whose token

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean())

    @property
    def agreement(self) -> float:
        return float(self.agrees.double().mean())

    def figures(self) -> dict[str, float | list[float]]:
        """Means over tokens with 95 % bootstrap intervals; answers are drawn, as tokens of one are not independent."""
        figures: dict[str, float | list[float]] = {}
        tokens = torch.bincount(self.sample).double().numpy()
        bootstrap = Bootstrap(len(tokens))
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
    kl, agrees = zip(*(_divergence(full[part].float(), logits) for part, logits in scheduled), strict=True)
    return torch.cat(kl), torch.cat(agrees)


def _divergence(full: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """`divergences` of one slice, of float32 log-probabilities [n, vocab]."""
    kl = (full.exp() * (full - logits.float().log_softmax(-1))).sum(-1)
    # Rounding can leave equal distributions just below 0; what is not a number would be the least of all.
    return kl.clamp_min(0).nan_to_num(torch.inf, torch.inf), full.argmax(-1) == logits.argmax(-1)


class Judge:
    """Compares schedules with full depth on a fixed set of answers."""

    def __init__(self, answers: AnswerPass, places: tuple[int, ...] = ()) -> None:
        """Runs the answers at full depth once, and keeps states at `places`, so that schedules that leave what is below
        alone start there.
        """
        self.answers = answers
        final, self._states = answers.full_depth_at(places)
        self._full, self._first = self._distributions(final), self._distributions(answers.first_hidden)

    def _distributions(self, x: Tensor) -> Tensor:
        """Log-probabilities [N, vocab] of hidden states [N, hidden], in half precision: a probability is then off by a
        thousandth of itself, the divergence by less than that.
        """
        found = torch.empty(len(x), self.answers.vocab, dtype=torch.half, device=x.device)
        for part, logits in self.answers.logits(x):
            found[part] = logits.float().log_softmax(-1)
        return found

    def judge(self, schedule: Schedule, compiled: Compiled) -> Quality:
        """Teacher-forced quality of a schedule. Where it changes prompts they run anew, and first tokens count too."""
        passed = self.answers
        if not schedule.prompt_plan.is_full_depth:
            prompts = [answer.prompt for answer in passed.answers]
            passed = AnswerPass(
                KeptPrompts(passed.prompts.model, prompts, schedule.prompt_plan, compiled), passed.answers
            )
        place = max((place for place in self._states if place <= schedule.changed_from), default=0)
        start = (place, self._states[place]) if place else None
        x = passed.hidden(schedule, compiled, start)
        kl, agrees = divergences(self._full, passed.scheduled_logits(x, schedule, compiled))
        sample = self.answers.sample
        if passed is not self.answers:  # a prompt's last state gives the first token, by the whole head
            first_kl, first_agrees = divergences(self._first, passed.logits(passed.first_hidden))
            kl, agrees = torch.cat([kl, first_kl]), torch.cat([agrees, first_agrees])
            sample = torch.cat([sample, torch.arange(len(first_kl))])
        return Quality(kl.cpu(), agrees.cpu(), sample)


@dataclass(frozen=True, slots=True)
class AnswerScore:
    """One answer under one schedule. An answer of g tokens has g - 1 decode steps; step t predicts token t + 1."""

    kl: tuple[float, ...]  # KL divergence of the schedule's distribution from full depth's, KL(full || schedule), nats
    agrees: tuple[bool, ...]  # whether both find the same token likeliest


class Scores(NamedTuple):
    """What is known of answers."""

    schedules: list[list[AnswerScore]]  # [schedule][prompt], of full depth's answers
    nll: list[list[float]]  # [writer][prompt], of full depth's answers, then of each of the others: negative
    # log-likelihood under full depth in nats, summed over all tokens of the answer


def score(
    prompts: PromptPass,
    answers: Sequence[Answer],
    schedules: Sequence[Schedule],
    compiled: Compiled,
    others: Sequence[Sequence[Answer]],
) -> Scores:
    """Schedules on full depth's answers, where those with fewer than two tokens have empty scores, and how likely full
    depth finds these and each of the others to the same prompts.

    A prompt runs once for all of that, and once for each way in which schedules run prompts otherwise.
    """
    writers = [answers, *others]
    scores = [[AnswerScore((), ())] * len(answers) for _ in schedules]
    nll: list[list[float]] = [[] for _ in writers]
    for pack in packs(range(len(answers)), lambda index: _size([row[index] for row in writers]), PACK_TOKENS):
        whole = KeptPrompts(prompts, [answers[index].prompt for index in pack])
        firsts = prompts.decoder.logits(whole.ends).float().log_softmax(-1)
        judged = [index for index in pack if answers[index].passes > 0]
        ours = [answers[index] for index in judged]
        forced: dict[PromptPlan, AnswerPass] = {}
        for plan in {schedule.prompt_plan for schedule in schedules if ours}:
            ran = whole if plan.is_full_depth else KeptPrompts(prompts, [each.prompt for each in ours], plan, compiled)
            forced[plan] = AnswerPass(ran, ours)
        compared = [
            _Compared(forced[each.prompt_plan].hidden(each, compiled), compiled.head(each, prompts.decoder), [])
            for each in schedules
            if ours
        ]
        nll[0] += _nll(whole, firsts, [answers[index] for index in pack], compared)
        for found, other in zip(nll[1:], others, strict=True):
            found += _nll(whole, firsts, [other[index] for index in pack])
        spans = list(pairwise(accumulate((answer.passes for answer in ours), initial=0)))
        for row, theirs in zip(scores, compared, strict=False):  # of none, where no answer has two tokens
            kl, agrees = (torch.cat(figures).tolist() for figures in zip(*theirs.slices, strict=True))
            for index, (start, end) in zip(judged, spans, strict=True):
                row[index] = AnswerScore(tuple(kl[start:end]), tuple(agrees[start:end]))
    return Scores(scores, nll)


def _size(answers: Sequence[Answer]) -> int:
    """Of a pack, what the answers to a prompt take up, which pass one after the other."""
    return max(len(answers[0].prompt) // PROMPT_SHARE, *(len(answer.tokens) for answer in answers))


class _Compared(NamedTuple):
    """Answers under a schedule, against full depth, a slice of their tokens at a time: of one long answer the
    distributions of all would take gigabytes.
    """

    x: Tensor  # hidden states [N, hidden]
    head: Head
    slices: list[tuple[Tensor, Tensor]]  # as `divergences`


def _nll(
    prompts: KeptPrompts, firsts: Tensor, answers: Sequence[Answer], compared: Sequence[_Compared] = ()
) -> list[float]:
    """How likely full depth finds the answers, of whose first tokens the log-probabilities are `firsts` [P, vocab]; the
    others are given to what is to be `compared`.
    """
    nll = [-float(firsts[prompts.places[tuple(a.prompt)], a.tokens[0]]) if a.tokens else 0.0 for a in answers]
    going_on = [index for index, answer in enumerate(answers) if answer.passes > 0]
    if going_on:
        forced = AnswerPass(prompts, [answers[index] for index in going_on])
        sums = torch.zeros(len(going_on), dtype=torch.float64)
        for part, logits in forced.logits(forced.full_depth()):
            found = logits.float().log_softmax(-1)
            for each in compared:
                each.slices.append(_divergence(found, each.head(each.x[part])))
            wanted = found.gather(1, forced.next_token[part, None].to(found.device))[:, 0]
            sums.index_add_(0, forced.sample[part], wanted.double().cpu())
        for index, log_likelihood in zip(going_on, sums.tolist(), strict=True):
            nll[index] -= log_likelihood
    return nll


def similarity(prompts: PromptPass, answers: Sequence[Answer]) -> dict[Unit, float]:
    """Mean cosine similarity of each unit's input and output over all decode steps, at full depth."""
    units = all_units(prompts.decoder.shape.layers)
    sums = [0.0] * len(units)
    scored = [answer for answer in answers if answer.passes > 0]
    for pack in packs(scored, lambda answer: _size([answer]), PACK_TOKENS):
        before: list[Tensor] = []

        def observe(place: int, x: Tensor, before: list[Tensor] = before) -> None:
            if place:
                sums[place - 1] += float(F.cosine_similarity(before.pop(), x, dim=-1).sum())
            before.append(x)

        AnswerPass(KeptPrompts(prompts, [answer.prompt for answer in pack]), pack).full_depth(observe)
    steps = sum(answer.passes for answer in scored)
    if not steps:
        raise ScheduleError("no answer has a decode step: give longer ones")
    return {unit: total / steps for unit, total in zip(units, sums, strict=True)}
