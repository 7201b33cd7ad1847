"""Let the full model answer, and pass its answers through the layers to collect their states."""

from collections.abc import Mapping, Sequence

import torch

from engine.calibration.head import HeadStates
from engine.calibration.moments import Moments, relative
from engine.calibration.own_states import OwnStates
from engine.decoding.sampling import Sampling
from engine.engine import Engine
from engine.forward.packing import Progress, told_packs
from engine.forward.teacher_forcing import Answer

DRAWING = "answering at full depth"  # a stage, for progress
CHUNK_TOKENS = 2048  # prompt and answer tokens passed at a time: bounds the memory of their keys and values


def answer_prompts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    batch_size: int,
    progress: Progress,
    sample_ids: Sequence[str] | None = None,
) -> list[Answer]:
    """Full-depth answers in the order of the prompts; those that end at once have no decode pass and are left out.
    `sample_ids` as for `Engine.generate`.
    """
    answers: dict[tuple[int, int], Answer] = {}
    total = len(prompts) * sampling.samples_per_prompt
    progress(DRAWING, 0, total)  # rows of one batch may end together: their time is not to be left out of the rate
    for generation in engine.generate(prompts, sampling, batch_size=batch_size, sample_ids=sample_ids):
        answers[generation.index, generation.sample] = Answer(prompts[generation.index], generation.tokens)
        progress(DRAWING, len(answers), total)
    return [answers[key] for key in sorted(answers) if answers[key].passes > 0]


def collect_moments(
    engine: Engine,
    answers: Sequence[Answer],
    ends: Mapping[int, Sequence[int]],
    progress: Progress,
    own: OwnStates | None = None,
    head: HeadStates | None = None,
) -> dict[int, Moments]:
    """Moments from each of the warm-up depths to all ends above it, over the answers' tokens.

    A token weighs as one over the mean square of its state at the highest end.

    Args:
        ends: layers below a block -> where it may end; it is [warm-up, end).
        own: is given the passes to keep, in this order, as long as it has room.
        head: is given the states after the last layer.
    """
    shape = engine.shape
    moments = {
        warmup: Moments(2 * warmup, tuple(2 * end for end in up_to), shape.hidden, engine.device)
        for warmup, up_to in ends.items()
    }
    wanted = {place for each in moments.values() for place in (each.start, *each.ends)} | (own.places if own else set())
    for chunk in told_packs(answers, _tokens, CHUNK_TOKENS, "collecting states", progress):
        with torch.inference_mode():
            forced = engine.teacher_forced(chunk)
            final, states = forced.full_depth_at(wanted)
            if head is not None:
                head.add(final)
            for each in moments.values():
                each.add(states[each.start], states, relative(states[each.ends[-1]]))
        if own is not None:
            own.keep(forced, states)
    return moments


def _tokens(answer: Answer) -> int:
    return len(answer.prompt) + len(answer.tokens)
