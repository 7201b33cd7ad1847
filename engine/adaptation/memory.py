"""Whether a training fits the memory, with all it keeps of full depth: told before the hours it would be lost after."""

from collections.abc import Sequence

import torch

from engine.adaptation.recipe import Recipe
from engine.adaptation.trainable import parts_of, with_added
from engine.adaptation.trainer import attended_layers
from engine.engine import Engine
from engine.forward.prompt_pass import PROMPT_TOKENS
from engine.forward.teacher_forcing import LOGIT_TOKENS
from engine.kernels import FrozenHalfKernels, FrozenOneDnnKernels, training_kernels_for
from engine.memory import token_elements
from engine.models.decoder import Decoder
from engine.schedules.schedule import Schedule
from engine.shape import ModelShape

FLOAT, HALF = 4, 2  # bytes
LOGITS = 6  # copies [LOGIT_TOKENS, vocab] that a loss and its gradient take at a time
# What a process grows by over what it keeps, as it keeps it between things that it frees: 400 prompts of 160 tokens.
SCATTERED = 1.27


def model_bytes(shape: ModelShape, device: torch.device) -> int:
    """Memory of the model in single precision, as `training_kernels_for` has it. A CPU keeps its matrices transposed
    too once a gradient has passed, a GPU that multiplies bfloat16 numbers keeps those of the layers in these.
    """
    units, head = shape.layers * shape.layer_parameters, shape.head_parameters
    kernels = training_kernels_for(device)
    if isinstance(kernels, FrozenHalfKernels):
        kept = HALF * units + (HALF + FLOAT) * head
    else:
        kept = FLOAT * (2 if isinstance(kernels, FrozenOneDnnKernels) else 1) * (units + head)
    return kept + FLOAT * shape.vocab * shape.hidden


def teacher_bytes(teacher: Engine) -> int:
    """Memory of its matrices, free again once it is gone: in the keys' precision, as states may be in a higher one."""
    shape = teacher.shape
    return (shape.layers * shape.layer_parameters + shape.head_parameters) * min(teacher.item_sizes)


def trained_bytes(schedules: Sequence[Schedule], decoder: Decoder, recipe: Recipe) -> int:
    """Memory of what is trained, all else apart: where it begins, as it is, its best, its gradient and two moments."""
    parts = parts_of(with_added(schedules, decoder, recipe))
    return 6 * FLOAT * sum(tensor.numel() for part in parts for tensor in part.tensors.values())


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
    shape: ModelShape, schedules: Sequence[Schedule], train: Sequence[int], held_out: Sequence[int], answer_tokens: int
) -> int:
    """Memory that it takes for a while beside: the prompts of answers to judge by in all layers and a pass of all their
    tokens, or a lesson with what gradients need: all that a layer's matrices take and give, and what is made of it,
    above the first change for answers and, where prompts learn, for a pass of these, and logits. Arguments as for
    `kept_bytes`; a prompt that is longer than a pass has one to itself.
    """
    judged = sum(held_out) * shape.layers * shape.cache_elements(1)
    judged += len(held_out) * answer_tokens * token_elements(shape)
    plans = [each.prompt_plan for each in schedules if not each.prompt_plan.is_full_depth]
    depth = max((plan.bridge.layers if plan.bridge else shape.layers for plan in plans), default=0)
    above = shape.layers - min(each.changed_from for each in schedules) // 2
    passed = max(PROMPT_TOKENS, *train, *held_out) * depth + Recipe().tokens_per_step * above
    learnt = passed * 2 * shape.layer_parameters // shape.hidden
    return max(judged, learnt + LOGITS * LOGIT_TOKENS * shape.vocab) * FLOAT
