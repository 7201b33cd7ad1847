"""Whether a training fits the memory, with all it keeps of full depth: told before the hours it would be lost after."""

from collections.abc import Sequence

import torch

from engine.adaptation.trainer import attended_layers
from engine.errors import ScheduleError
from engine.forward.prompt_pass import PROMPT_TOKENS
from engine.memory import SHARE
from engine.schedules.schedule import Schedule
from engine.shape import ModelShape

FLOAT, HALF = 4, 2  # bytes
# What a process grows by over what it keeps, as it keeps it between things that it frees: 400 prompts of 160 tokens.
SCATTERED = 1.27


def model_bytes(shape: ModelShape, device: torch.device) -> int:
    """Memory of the model in single precision. A CPU keeps its matrices transposed too once a gradient has passed
    (`FrozenOneDnnKernels`).
    """
    matrices = shape.layers * shape.layer_parameters + shape.head_parameters
    return FLOAT * (matrices * (2 if device.type == "cpu" else 1) + shape.vocab * shape.hidden)


def kept_bytes(
    shape: ModelShape,
    schedules: Sequence[Schedule],
    train: Sequence[int],
    held_out: Sequence[int],
    answer_tokens: int,
    answers_per_prompt: int = 1,
    tokens_per_step: int | None = None,
) -> int:
    """Memory that `Trainer` keeps of its answers: full depth's last states, of those to judge by its distributions, and
    of prompts that run at full depth keys and values in the layers that decode tokens attend in above the first change.

    Args:
        shape, schedules: of the model, and what is trained.
        train, held_out: tokens of each prompt.
        answer_tokens: of each answer, at most.
        answers_per_prompt: that are learnt from.
        tokens_per_step: of answers, in a lesson; each lesson keeps its prompts. Default all of a prompt's in one.
    """
    most = 1 + answers_per_prompt * answer_tokens // tokens_per_step if tokens_per_step is not None else 1
    lessons = min(answers_per_prompt, most)  # that a prompt's answers are spread over
    layers = attended_layers(schedules, min(each.changed_from for each in schedules))
    # Passes that go on from prompts at full depth: with the last states those below the first change, and embeddings.
    goes_on = any(each.prompt_plan.is_full_depth for each in schedules)
    prompts = (lessons * sum(train) + sum(held_out)) * len(layers) * shape.cache_elements(1) * FLOAT
    answers = len(train) * answers_per_prompt + len(held_out)
    states = answers * answer_tokens * (3 if goes_on else 1) * shape.hidden * FLOAT
    return int(SCATTERED * (prompts + states)) + len(held_out) * answer_tokens * shape.vocab * HALF


def working_bytes(
    shape: ModelShape, schedules: Sequence[Schedule], train: Sequence[int], held_out: Sequence[int]
) -> int:
    """Memory that it takes for a while beside: the prompts of answers to judge by in all layers, or, where prompts
    learn, a pass of them with what gradients need: all that a layer's matrices take and give, and what is made of it.
    Arguments as for `kept_bytes`; a prompt that is longer than a pass has one to itself.
    """
    judged = sum(held_out) * shape.layers * shape.cache_elements(1)
    plans = [each.prompt_plan for each in schedules if not each.prompt_plan.is_full_depth]
    depth = max((plan.bridge.layers if plan.bridge else shape.layers for plan in plans), default=0)
    learnt = max(PROMPT_TOKENS, *train, *held_out) * depth * 2 * shape.layer_parameters // shape.hidden
    return max(judged, learnt) * FLOAT


def check_memory(model: int, kept: int, working: int, free: int, answers: int) -> None:
    """Raises ScheduleError if the bytes of a model, those kept for so many answers, and those that it takes for a while
    beside, are more than the free ones can be counted on for.
    """
    room = int(SHARE * free) - model - working
    if kept > room:
        way_out = f"with about {int(answers * room / kept)} answers it fits"
        if room <= 0:
            alone = room + working <= 0
            way_out = (
                "the model alone is too large" if alone else "a pass of its prompts, or of the longest, does not fit"
            )
        raise ScheduleError(
            f"training on {answers} answers keeps some {kept / 1e9:.1f} GB of full depth in memory beside the model's "
            f"{model / 1e9:.1f} GB and {working / 1e9:.1f} GB to work in, and {free / 1e9:.1f} GB are free: {way_out}"
        )
