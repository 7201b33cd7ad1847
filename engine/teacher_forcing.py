"""Score schedules on answers that full depth has written: how far each next-token distribution moves.

Active sets are nested, so a token attends, in any layer it runs, only to tokens that ran it too. One teacher-forced
pass over whole answers is therefore exact: each unit runs on the tokens that it is active for, under a plain causal
mask, and leaves the others as they are. Prompts run at full depth, once for all schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.bridge import Bridge, BridgeMap
from engine.decoder import Decoder, Rotations
from engine.kernels import Kernels
from engine.plan import ApplyBridge, decode_plan
from engine.schedule import Schedule
from engine.shape import AttentionKind
from engine.unit import Unit, all_units

PACK_TOKENS = 1024  # answer tokens scored together: bounds the logits that are held, a vocabulary each
KL_TOKENS = 128  # of them compared at a time
FOREVER = 2**62  # a step that none reaches


@dataclass(frozen=True, slots=True)
class AnswerScore:
    """One answer under one schedule. An answer of g tokens has g - 1 decode steps; step t predicts token t + 1."""

    kl: tuple[float, ...]  # KL divergence of the schedule's distribution from full depth's, KL(full || schedule), nats
    agrees: tuple[bool, ...]  # whether both find the same token likeliest


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and the tokens that full depth generated for it, at least two."""

    prompt: Sequence[int]
    tokens: Sequence[int]

    @property
    def steps(self) -> int:
        return len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class Reference:
    """What a pack of answers looks like at full depth."""

    log_probabilities: Tensor  # [S, vocab] of the S decode steps of all answers, answer by answer
    prompt_keys: list[list[tuple[Tensor, Tensor]]]  # [layer][answer]: keys and values [n, kv_heads, head_dim]


class TeacherForcing:
    """Scores packs of answers with one model."""

    def __init__(
        self,
        decoder: Decoder,
        kernels: Kernels,
        device: torch.device,
        bridges: Mapping[Bridge, BridgeMap] | None = None,
    ) -> None:
        """`bridges` holds those of every schedule to be scored, compiled."""
        self._decoder, self._kernels, self._device, self._bridges = decoder, kernels, device, bridges or {}

    def score(self, answers: Sequence[Answer], schedules: Sequence[Schedule]) -> list[list[AnswerScore]]:
        """[schedule][answer]: answers with fewer than two tokens have empty scores."""
        scores = [[AnswerScore((), ())] * len(answers) for _ in schedules]
        for pack in _packs(answers):
            chosen = [answers[index] for index in pack]
            reference = self._full_depth(chosen)
            for row, schedule in zip(scores, schedules, strict=True):
                logits = self._scheduled(chosen, reference, schedule)
                for index, score in zip(pack, _compare(chosen, reference.log_probabilities, logits), strict=True):
                    row[index] = score
        return scores

    def similarity(self, answers: Sequence[Answer]) -> dict[Unit, float]:
        """Mean cosine similarity of each unit's input and output over all decode steps, at full depth."""
        sums: dict[Unit, float] = {}

        def observe(unit: Unit, before: Tensor, after: Tensor) -> None:
            sums[unit] = sums.get(unit, 0.0) + float(F.cosine_similarity(before, after, dim=-1).sum())

        for pack in _packs(answers):
            self._full_depth([answers[index] for index in pack], observe)
        steps = sum(max(0, answer.steps) for answer in answers)
        return {unit: total / steps for unit, total in sums.items()}

    def _full_depth(
        self, answers: Sequence[Answer], observe: Callable[[Unit, Tensor, Tensor], None] | None = None
    ) -> Reference:
        """The reference; `observe` is shown each unit's input and output for the answers' tokens, [S, hidden]."""
        texts = [[*answer.prompt, *answer.tokens[:-1]] for answer in answers]
        spans = _spans([len(text) for text in texts])
        kept: list[list[tuple[Tensor, Tensor]]] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ends = [start + len(answer.prompt) for (start, _), answer in zip(spans, answers, strict=True)]
            prompts = [slice(start, end) for (start, _), end in zip(spans, ends, strict=True)]
            kept.append([(k[prompt].clone(), v[prompt].clone()) for prompt in prompts])
            kind = self._decoder.shape.attention_kind(layer)
            return torch.cat([self._kernels.prompt_attention(q[a:b], k[a:b], v[a:b], kind) for a, b in spans])

        positions = self._tensor([position for text in texts for position in range(len(text))])
        # A prompt token is computed when the sequence is as long as the prompt, an answer token when it is the last.
        lengths = [max(i + 1, len(a.prompt)) for a, text in zip(answers, texts, strict=True) for i in range(len(text))]
        rotations = self._decoder.rotations(positions, self._tensor(lengths))
        x = self._decoder.embed(self._tensor([token for text in texts for token in text]), positions)
        answered = self._tensor([i for (_, b), a in zip(spans, answers, strict=True) for i in range(b - a.steps, b)])
        for unit in all_units(self._decoder.shape.layers):
            before, x = x, self._run(unit, x, rotations, attend)
            if observe is not None:
                observe(unit, before[answered], x[answered])
        logits = self._decoder.logits(x[answered])
        return Reference(logits.float().log_softmax(-1), kept)

    def _scheduled(self, answers: Sequence[Answer], reference: Reference, schedule: Schedule) -> Tensor:
        """Logits [S, vocab] of every decode step."""
        steps = self._tensor([step for answer in answers for step in range(answer.steps)])
        positions = self._tensor([len(a.prompt) + step for a in answers for step in range(a.steps)])
        rotations = self._decoder.rotations(positions, positions + 1)
        x = self._decoder.embed(self._tensor([token for answer in answers for token in answer.tokens[:-1]]), positions)
        retired, bridged = _first_skipped(schedule), _bridges(schedule)
        for unit in all_units(schedule.layers):
            for bridge, first, end in bridged.get(unit, ()):
                crosses = (steps >= first) & (steps < end)
                x = x.clone()
                x[crosses] = self._bridges[bridge](x[crosses])
            until = retired.get(unit)
            if until is None:
                x = self._run(unit, x, rotations, self._attend_answers(answers, reference, None))
            elif until > 0 and bool((runs := steps < until).any()):
                some = tuple(rotation[runs] for rotation in rotations)
                x = x.clone()
                x[runs] = self._run(unit, x[runs], some, self._attend_answers(answers, reference, until))
        return self._decoder.logits(x)

    def _run(self, unit: Unit, x: Tensor, rotations: Rotations, attend: Callable[..., Tensor]) -> Tensor:
        if unit.kind == "a":
            return self._decoder.attention(unit.layer, x, rotations, attend)
        return self._decoder.mlp(unit.layer, x)

    def _attend_answers(
        self, answers: Sequence[Answer], reference: Reference, until: int | None
    ) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        """Attention of the first `until` steps of every answer to their prompt and to each other."""
        counts = [answer.steps if until is None else min(answer.steps, until) for answer in answers]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kind = self._decoder.shape.attention_kind(layer)
            prompts = reference.prompt_keys[layer]
            return torch.cat(
                [
                    _continued_attention(q[a:b], torch.cat([keys, k[a:b]]), torch.cat([values, v[a:b]]), kind)
                    for (a, b), (keys, values) in zip(_spans(counts), prompts, strict=True)
                ]
            )

        return attend

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)


def _continued_attention(q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind) -> Tensor:
    """The last m tokens of a sequence attend causally to all n: q [m, heads, head_dim], k, v [n, kv_heads, head_dim].

    Returns:
        [m, heads * head_dim].
    """
    m, n, heads = len(q), len(k), q.shape[1]
    age = torch.arange(n - m, n, device=q.device)[:, None] - torch.arange(n, device=q.device)  # of a key, for a query
    unseen = (age < 0) | (age >= (kind.window or n))
    grouped = q.transpose(0, 1).reshape(k.shape[1], -1, q.shape[2])  # [kv_heads, group * m, head_dim]
    scores = torch.bmm(grouped, k.permute(1, 2, 0)) * kind.scale
    if kind.softcap is not None:
        scores = torch.tanh(scores / kind.softcap) * kind.softcap
    scores = scores.view(-1, m, n).masked_fill(unseen, -torch.inf).float().softmax(-1).to(v.dtype)
    out = torch.bmm(scores.view(k.shape[1], -1, n), v.transpose(0, 1))
    return out.view(heads, m, -1).transpose(0, 1).reshape(m, -1)


def _compare(answers: Sequence[Answer], reference: Tensor, logits: Tensor) -> Iterator[AnswerScore]:
    kl, agrees = [], []
    for ours, full in zip(logits.split(KL_TOKENS), reference.split(KL_TOKENS), strict=True):
        log_probabilities = ours.float().log_softmax(-1)
        kl += (full.exp() * (full - log_probabilities)).sum(-1).clamp_min(0).tolist()
        agrees += (ours.argmax(-1) == full.argmax(-1)).tolist()
    for start, end in _spans([answer.steps for answer in answers]):
        yield AnswerScore(tuple(kl[start:end]), tuple(agrees[start:end]))


def _first_skipped(schedule: Schedule) -> dict[Unit, int]:
    """The step from which on each skipped unit no longer runs."""
    steps: dict[Unit, int] = {}
    for plateau in schedule.plateaus:
        for unit in schedule.skip_order[: plateau.skipped]:
            steps.setdefault(unit, plateau.first_step)
    return steps


def _bridges(schedule: Schedule) -> dict[Unit, list[tuple[Bridge, int, int]]]:
    """By the first unit that they replace: bridges, and the steps [first, end) of the plateaus that apply them."""
    found: dict[Unit, list[tuple[Bridge, int, int]]] = {}
    starts = [plateau.first_step for plateau in schedule.plateaus]
    for index, (first, end) in enumerate(zip(starts, [*starts[1:], FOREVER], strict=True)):
        for operation in decode_plan(schedule, index):
            if isinstance(operation, ApplyBridge):
                found.setdefault(operation.bridge.block.first, []).append((operation.bridge, first, end))
    return found


def _packs(answers: Sequence[Answer]) -> Iterator[list[int]]:
    """Indices of answers that are scored together; those without a decode step are left out."""
    pack: list[int] = []
    tokens = 0
    for index, answer in enumerate(answers):
        if answer.steps < 1:
            continue
        if pack and tokens + answer.steps > PACK_TOKENS:
            yield pack
            pack, tokens = [], 0
        pack.append(index)
        tokens += answer.steps
    if pack:
        yield pack


def _spans(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Where sequences of these lengths start and end when laid end to end."""
    ends = list(accumulate(lengths))
    return list(zip([0, *ends], ends, strict=False))
