"""Train what schedules bring along: KL divergence to full depth, through the frozen weights of the model."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from math import isfinite, nan
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.adaptation.checkpoint import TrainingState, read_state, training_identity, write_state
from engine.adaptation.curve import Point
from engine.adaptation.peers import Peers
from engine.adaptation.recipe import Recipe
from engine.adaptation.trainable import Trainable, check_parts
from engine.engine import Engine
from engine.errors import ScheduleError
from engine.forward.packing import Progress, packs, told_packs
from engine.forward.prompt_pass import PROMPT_TOKENS
from engine.forward.quality import Judge, Quality
from engine.forward.teacher_forcing import Answer, AnswerPass
from engine.memory import release_freed_memory
from engine.parts.part import are_finite, rounded
from engine.schedules.schedule import Schedule

log = logging.getLogger(__name__)

BETAS, EPS = (0.9, 0.95), 1e-8
SPREAD_ANSWERS = 32  # whose prompts say how much the entries of a state vary
LEAST_SPREAD = 1e-3


class _Part:
    """Answers that pass together, and what training needs of full depth."""

    def __init__(self, engine: Engine, answers: Sequence[Answer], schedules: Sequence[Schedule], place: int) -> None:
        forced = engine.teacher_forced(answers)
        self.answers = answers
        self.first = forced.first_hidden  # [A, hidden] after all layers
        self.final, states = forced.full_depth_at({place})
        # What schedules that leave prompts alone go on from: (prompts' keys and values, the state below every change).
        self.whole: tuple[AnswerPass, Tensor] | None = None
        if any(schedule.prompt_plan.is_full_depth for schedule in schedules):
            forced.prompts.forget_all_but(attended_layers(schedules, place))
            self.whole = forced, states[place].clone()

    def tokens(self, schedule: Schedule) -> int:
        """That a schedule is taught by: where it changes prompts, the first ones of the answers too."""
        return len(self.final) + (0 if schedule.prompt_plan.is_full_depth else len(self.first))


class Trainer:
    """Schedules taught by the same model at full depth: their bridges, and one adapter for all if the recipe has one.

    The loss of a token is KL(full || schedule), with some of the cross-entropy on the token that full depth chose.

    A step is an update by the mean loss over the schedules; what several of them bring, such as the adapter, learns to
    serve all of these, so that a job may choose among them when it runs.

    Where torch's process group is set up, its processes train together: each takes its steps on a share of the answers,
    gradients are averaged, and all of them have the same parameters and judgements at any time.
    """

    def __init__(
        self,
        engine: Engine,
        schedules: Sequence[Schedule],
        train: Sequence[Answer],
        held_out: Sequence[Answer],
        recipe: Recipe,
        progress: Progress,
    ) -> None:
        """Runs all answers at full depth once.

        Args:
            engine: with kernels that gradients pass (`Engine.load(..., kernels=training_kernels_for(device))`).
            schedules: as calibration makes them, or any others that skip something.
            train, held_out: full-depth answers to learn from and to judge by, the same in all processes.

        Raises:
            ScheduleError: a schedule skips nothing or does not fit the model, there is nothing to train, or there are
                fewer answers than processes.
        """
        for schedule in schedules:
            schedule.check_fits(engine.shape)
            if not is_trainable(schedule):
                raise ScheduleError("the schedule skips nothing, so there is nothing to learn")
        check_parts(schedules, recipe.adapter_rank)
        self._engine, self._recipe, self._progress = engine, recipe, progress
        self._trainable = Trainable(schedules, engine.decoder, engine.device, recipe)
        self._schedules = self._trainable.starts
        self._identity = training_identity(recipe, self._schedules, train, held_out)
        groups = [{"params": parameters, "share": share} for share, parameters in self._trainable.paced().items()]
        self._optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=BETAS, eps=EPS, weight_decay=0.0)
        self._spread = self._spreads(held_out)  # not of what each process learns from: theirs would differ
        # Below it prompts and decode tokens are as at full depth under all of them.
        self._place = min(schedule.changed_from for schedule in self._schedules)
        self._peers = Peers()
        if len(train) < self._peers.count:
            raise ScheduleError(f"{len(train)} answers to learn from are too few for {self._peers.count} processes")
        self._lessons = self._prepare(self._peers.share(train))
        with torch.no_grad():
            self._judge = Judge(engine.teacher_forced(held_out), (self._place,))
            self._judge.answers.prompts.forget_all_but(attended_layers(self._schedules, self._place))
        self._state = TrainingState(self._trainable.snapshot())
        self.untrained = self._qualities()  # of each schedule on the held-out answers
        self.tokens = sum(answer.passes for answer in train)

    def run(self, checkpoint: Path | None = None, settings: Mapping[str, Any] | None = None) -> Iterator[Point]:
        """Train, and yield a point of the curve at each judgement, the first before any step.

        Args:
            checkpoint: file to keep the state in; training goes on from it where it exists, to the same end. The first
                process writes it, all of them read it.
            settings: kept in it, see `check_settings`.

        Raises:
            ScheduleError: the checkpoint is damaged, of another training, or not there for all of the processes; the
                training has diverged before it brought anything.
        """
        found = self._peers.everyones(checkpoint is not None and checkpoint.exists())
        if any(found) and not all(found):
            raise ScheduleError(f"not all processes find the checkpoint {str(checkpoint)!r}: keep it where all see it")
        if checkpoint is not None and all(found):
            self._state = read_state(checkpoint, self._identity, self._trainable, self._optimizer)
            yield from self._state.curve
        else:
            if not _are_numbers(self.untrained):
                raise ScheduleError("before any training distributions on the held-out answers are no numbers")
            yield self._look(self.untrained, loss=None)
        losses: list[float] = []
        begun = time.monotonic() - self._state.seconds
        while self._state.step < self._recipe.steps and self._state.waiting < self._recipe.patience:
            losses.append(self._step(self._state.step))
            self._state.step += 1
            if not isfinite(losses[-1]):  # the same for all processes
                return self._end_diverged(f"the loss of step {self._state.step} is {losses[-1]}")
            self._state.seconds = time.monotonic() - begun
            self._progress("training", self._state.step, self._recipe.steps)
            if self._state.step % self._recipe.judge_every == 0 or self._state.step == self._recipe.steps:
                release_freed_memory()  # answers to judge by take other sizes than those to learn from
                qualities = self._qualities()
                if not _are_numbers(qualities):
                    return self._end_diverged(f"distributions after step {self._state.step} are no numbers")
                yield self._look(qualities, sum(losses) / len(losses))
                losses = []
                if checkpoint is not None and self._peers.is_first:
                    write_state(checkpoint, self._state, self._identity, self._trainable, self._optimizer, settings)

    def _end_diverged(self, said: str) -> None:
        """Raises ScheduleError if nothing is better than what the training began with."""
        if min(self._state.curve, key=lambda point: point.kl).step == 0:
            raise ScheduleError(f"{said}: the training has diverged, begin it anew with a lower learning rate")
        log.warning("%s: the training has diverged, and ends with its best so far", said)

    def best(self) -> list[tuple[Schedule, Quality]]:
        """The schedules, as they did best on the held-out answers together, and how each of them does as stored."""
        self._trainable.restore({name: rounded(tensor) for name, tensor in self._state.best.items()})
        return list(zip(self._trainable.schedules(), self._qualities(), strict=True))

    def _look(self, qualities: Sequence[Quality], loss: float | None) -> Point:
        state, ours = self._state, (mean(q.mean_kl for q in qualities), mean(q.agreement for q in qualities))
        # The first process's, lest processes that differ in a last bit end at different steps.
        kl, agreement = self._peers.firsts(ours)
        if kl < state.best_kl:
            state.best, state.best_kl, state.waiting = self._trainable.snapshot(), kl, 0
        elif state.step > self._recipe.steps / 2:  # before, steps are too large to settle: what they bring comes later
            state.waiting += 1
        point = Point(state.step, loss, kl, agreement, round(state.seconds, 3))
        state.curve.append(point)
        return point

    def _qualities(self) -> list[Quality]:
        """Of each schedule on the held-out answers, as it is now."""
        with torch.no_grad():
            return [self._judge.judge(each, self._trainable.compiled(each)) for each in self._schedules]

    def _step(self, step: int) -> float:
        """One update; the lesson's mean loss in nats per token, over the schedules too.

        No update, and NaN, where gradients are not finite.
        """
        epoch, index = divmod(step, len(self._lessons))
        order = torch.randperm(len(self._lessons), generator=torch.Generator().manual_seed(self._recipe.seed + epoch))
        lesson = self._lessons[int(order[index])]
        for group in self._optimizer.param_groups:
            group["lr"] = group["share"] * self._recipe.rate(step)
        self._optimizer.zero_grad()
        losses: list[float] = []
        ours = [sum(part.tokens(schedule) for part in lesson) for schedule in self._schedules]
        # Means over the processes, as the gradients are: then each token weighs the same.
        counts = map(mean, zip(*self._peers.everyones(ours), strict=True))
        for schedule, tokens in zip(self._schedules, counts, strict=True):
            share = 1 / tokens / len(self._schedules)
            losses.append(sum(self._learn(part, schedule, share) for part in lesson) / tokens)
        gradients = []
        for parameter in self._trainable.parameters.values():
            if parameter.grad is None:  # no answer of this lesson reaches its plateau
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        self._peers.mean(gradients)
        if not are_finite(gradients):
            return nan  # the parameters stay what they were
        self._move()
        return mean(self._peers.everyones(mean(losses)))

    def _move(self) -> None:
        """A step of the optimizer. What multiplies an entry of a state moves by as much less as that entry varies more:
        they differ by a factor of ten and more, and at one rate for all of them the largest ones would decide.
        """
        before = {name: self._trainable.parameters[name].detach().clone() for name in self._spread}
        self._optimizer.step()
        with torch.no_grad():
            for name, spread in self._spread.items():
                self._trainable.parameters[name].sub_(before[name]).div_(spread[:, None]).add_(before[name])

    def _spreads(self, answers: Sequence[Answer]) -> dict[str, Tensor]:
        """How much each entry [hidden] of the states varies that an affine map takes, by its parameter: the standard
        deviation over the tokens of some of these prompts, at full depth up to there; in units of the median entry's
        where a map gives a state again, which then changes as much by its own measure, whatever a model's scale.
        """
        prompts = [*packs([answer.prompt for answer in answers[:SPREAD_ANSWERS]], len, PROMPT_TOKENS)]
        maps, by_layer = self._trainable.affine_maps(), dict[int, Tensor]()
        for layer in sorted({place // 2 for place, _ in maps.values()}):
            with torch.no_grad():
                states = torch.cat([self._engine.stop_prompts(each, layer).states for each in prompts])
            spread = states.float().std(0)
            by_layer[layer] = torch.where(spread > LEAST_SPREAD, spread, 1.0)  # of too few tokens it is no number
        units = {layer: spread / spread.median() for layer, spread in by_layer.items()}
        return {name: (units if gives_state else by_layer)[place // 2] for name, (place, gives_state) in maps.items()}

    def _learn(self, part: _Part, schedule: Schedule, share: float) -> float:
        """Add up the gradients of some answers under one of the schedules, times a share; their summed loss in nats."""
        compiled = self._trainable.compiled(schedule)
        if schedule.prompt_plan.is_full_depth:
            assert part.whole is not None
            answers, start = part.whole
            x, full, tokens = answers.hidden(schedule, compiled, (self._place, start)), part.final, answers.next_token
        else:  # prompts learn too, and the first tokens, which they give
            answers = self._engine.teacher_forced(part.answers, schedule.prompt_plan, compiled)
            x = torch.cat([answers.hidden(schedule, compiled), answers.first_hidden])
            full = torch.cat([part.final, part.first])
            tokens = torch.cat([answers.next_token, torch.tensor([answer.tokens[0] for answer in part.answers])])
        # Both with the whole head: a preview has no gradient for the tokens that it does not look at.
        # In two stages: a slice's logits, a vocabulary per token, are gone before the next slice's are made.
        leaf, total = x.detach().requires_grad_(), 0.0
        for (rows, ours), (_, theirs) in zip(answers.logits(leaf), answers.logits(full), strict=True):
            loss = self._loss(theirs, ours, tokens[rows])
            (share * loss).backward()
            total += float(loss.detach())
        if x.requires_grad:  # else no answer here reaches a plateau with something to learn
            x.backward(leaf.grad)
        return total

    def _loss(self, full: Tensor, ours: Tensor, tokens: Tensor) -> Tensor:
        """Summed over tokens: KL(full || schedule) + token_loss x cross-entropy on full depth's own tokens.

        Args:
            full, ours: logits [n, vocab].
            tokens: [n] that full depth chose.
        """
        log_ours = ours.float().log_softmax(-1)
        loss = F.kl_div(log_ours, full.float().log_softmax(-1), reduction="sum", log_target=True)
        if self._recipe.token_loss:
            loss = loss + self._recipe.token_loss * F.nll_loss(log_ours, tokens.to(ours.device), reduction="sum")
        return loss

    def _prepare(self, answers: Sequence[Answer]) -> list[list[_Part]]:
        """The lessons, one for each step of an epoch."""
        lessons, size = [], self._recipe.tokens_per_step
        changed = any(not schedule.prompt_plan.is_full_depth for schedule in self._schedules)
        what = "full depth on the answers"
        for pack in told_packs(answers, lambda answer: answer.passes, size, what, self._progress):
            parts = [pack]
            if changed:  # gradients through prompts take the memory of all they compute: so many tokens at a time
                of_prompts = [list(group) for _, group in groupby(pack, key=lambda answer: answer.prompt)]
                together = packs(of_prompts, lambda group: len(group[0].prompt), PROMPT_TOKENS)
                parts = [list(chain.from_iterable(groups)) for groups in together]
            lessons.append([_Part(self._engine, part, self._schedules, self._place) for part in parts])
        return lessons


def _are_numbers(qualities: Sequence[Quality]) -> bool:
    return all(isfinite(quality.mean_kl) for quality in qualities)


def is_trainable(schedule: Schedule) -> bool:
    """Whether it skips something, or has bridges."""
    return schedule.plateaus[-1].skipped > 0 or bool(schedule.bridges) or schedule.prompt_bridge is not None


def attended_layers(schedules: Sequence[Schedule], place: int) -> set[int]:
    """Layers from a place on in which decode tokens attend to prompts that run at full depth, under some of them."""
    whole = [schedule for schedule in schedules if schedule.prompt_plan.is_full_depth]
    run = {unit for schedule in whole for unit in schedule.active_units(0)}  # later plateaus run no others
    return {unit.layer for unit in run if unit.kind == "a" and unit.place >= place}
