"""Prompts drawn from a corpus and the model's own answers to them: what calibration fits and adaptation trains on."""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

import engine
from engine import Engine, Sampling, resolve_dtype
from engine.adaptation.peers import Peers
from engine.calibration.answer_file import Drawn, read_answers, write_answers
from engine.calibration.collect import DRAWING, answer_prompts
from engine.forward.packing import Progress
from engine.forward.teacher_forcing import Answer
from jobs.prompts import SUMMARIZE
from pipeline.config import PromptText
from pipeline.inputs.sample_prompts import CorpusConfig, sample_prompts
from pipeline.preparing.fit import longest_prompt
from pipeline.rows.rows import TOKENS

log = logging.getLogger(__name__)

ANSWERS_FILE = "answers.safetensors"  # of an output, that a rerun finds
KEPT_EVERY = 32  # batches of prompts: more often, a batch that drains at each end takes more time

TargetSpeedup = Annotated[float, Field(gt=1, allow_inf_nan=False)]  # of FLOPs


class AnswersConfig(CorpusConfig):
    """Which prompts the model answers at full depth."""

    prompt: PromptText = SUMMARIZE
    max_new_tokens: int = Field(64, ge=2, description="longest answer")
    prompts: int = Field(500, ge=1, description="prompts to draw, by the seed")
    threads: int | None = Field(None, ge=1, description="CPU threads; default torch's own choice")

    def load_engine(self, now: datetime | None = None) -> Engine:
        """Raises ModelError."""
        return Engine.load(self.model, self.device, self.dtype, self.threads, now=now)


def answer_corpus(
    config: AnswersConfig,
    model: Engine,
    progress: Progress,
    check: Callable[[Sequence[Sequence[int]]], None] = lambda _: None,
    kept_in: Path | None = None,
) -> tuple[list[Answer], dict[str, Any]]:
    """Draw prompts and let the model answer them, once `check` has seen them and not raised: answers, and where they
    come from.

    Answers are written to a file where one is named, and taken from there if it has those that would be drawn.
    Raises JobError for an input that does not fit.
    """
    longest = longest_prompt(config, model.shape)
    rows = sample_prompts(config, config.part, config.prompts, model.tokenizer, longest)
    drawn = rows[TOKENS].to_pylist()
    prompts: list[list[int]] = [list(prompt) for prompt in dict.fromkeys(map(tuple, drawn))]
    if len(prompts) < len(drawn):  # else some would be judged by that were learnt from
        log.info("%d of the prompts are others once more, and left out", len(drawn) - len(prompts))
    check(prompts)
    # As in the job that will run the schedule: computed once, and at full depth.
    prefix = config.template().shared_prefix(model.tokenizer)
    shared = len(prefix) if model.share_prefix(prefix) else 0
    sampling = config.sampling()
    provenance = {
        "model": [config.model, engine.model_identity(config.model), resolve_dtype(config.device, config.dtype)],
        "prompts": len(prompts),
        "prompts_digest": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        "part": config.part,
        "parted_by": config.parted_by,
        "shared_prefix_tokens": shared,
        "sampling": sampling.to_dict(),
        "version": engine.__version__,
    }
    return _answered(config, model, prompts, sampling, progress, kept_in), provenance


def with_more_answers(
    config: AnswersConfig,
    model: Engine,
    answers: Sequence[Answer],
    per_prompt: int,
    progress: Progress,
    kept_in: Path | None = None,
) -> list[Answer]:
    """The answers, and further ones to their prompts drawn at temperature 1; those of one prompt side by side.

    Further ones are kept as in `answer_corpus`.
    """
    if per_prompt == 1:
        return list(answers)
    grouped: dict[tuple[int, ...], list[Answer]] = {}
    for answer in answers:
        grouped.setdefault(tuple(answer.prompt), []).append(answer)
    prompts = [list(prompt) for prompt in grouped]
    # Of another seed: at temperature 1 the answers there are would be drawn once more.
    sampling = replace(config.sampling(), temperature=1.0, samples_per_prompt=per_prompt - 1, seed=config.seed + 1)
    for answer in _answered(config, model, prompts, sampling, progress, kept_in):
        grouped[tuple(answer.prompt)].append(answer)
    return [answer for group in grouped.values() for answer in group]


def _answered(
    config: AnswersConfig,
    model: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    progress: Progress,
    kept_in: Path | None,
) -> list[Answer]:
    """Answers to all prompts, in their order, by this process and its peers, or those that the first of them finds."""
    peers, batch_size = Peers(), config.batch_size
    keeps = kept_in if peers.is_first else None
    drawn_as = "" if keeps is None else _drawn_as(config, prompts, sampling)
    found = None if keeps is None else read_answers(keeps, drawn_as)
    if keeps is not None and keeps.exists() and found is None:
        log.warning("the answers in %s are to other prompts, drawn otherwise or damaged: they are replaced", keeps)
    answers, answered = peers.firsts(found) or ([], 0)
    if answered is None:
        progress(DRAWING, len(answers), len(answers))
        return answers
    if batch_size == "auto":
        batch_size = model.fitting_batch_size(max(map(len, prompts)), sampling)
    # The first's for all: what fits differs from one process to the next, and they have to meet equally often.
    samples, each = sampling.samples_per_prompt, KEPT_EVERY * peers.firsts(batch_size)
    for start in range(answered, len(prompts), each):
        end = min(start + each, len(prompts))

        def tell(stage: str, done: int, _: int, start: int = start) -> None:
            progress(stage, start * samples // peers.count + done, len(prompts) * samples // peers.count)

        # Under the ids that they would have in one process.
        ids = peers.share([*map(str, range(start, end))])
        ours = answer_prompts(model, peers.share(prompts[start:end]), sampling, batch_size, tell, ids)
        answers += [answer for share in peers.everyones(ours) for answer in share]
        if keeps is not None:
            write_answers(keeps, Drawn(answers, None if end == len(prompts) else end), drawn_as)
    return answers


def _drawn_as(config: AnswersConfig, prompts: Sequence[Sequence[int]], sampling: Sampling) -> str:
    """Of all that decides answers."""
    model = [engine.model_identity(config.model), resolve_dtype(config.device, config.dtype)]
    decides = [prompts, sampling.to_dict(), *model]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()
