"""Memory that calibrating takes beside the model: told before the prompts are answered."""

from collections.abc import Mapping, Sequence

from engine.calibration.bridged import MOST_FITTED
from engine.calibration.calibrate import CHOOSE, JUDGE, split
from engine.calibration.own_states import KEPT_TOKENS
from engine.calibration.search import WARMUPS
from engine.memory import token_elements
from engine.shape import ModelShape

SUM, FLOAT, HALF = 8, 4, 2  # bytes
SOLVED = 4  # copies of the sums that a ridge regression is solved by


def kept_bytes(
    shape: ModelShape, prompts: Sequence[int], answer_tokens: int, sizes: tuple[int, int], prompts_change: bool
) -> int:
    """Of the answers to choose and to judge by: keys and values of their prompts, states, full depth's distributions.

    Args:
        shape: of the model.
        prompts: tokens of each, in the order of the answers.
        answer_tokens: of each answer, at most.
        sizes: as `Engine.item_sizes`.
        prompts_change: schedules with and without their own way with prompts are judged, whose keys and values are
            then held beside.
    """
    _, choose, judge = split(prompts)
    held = sum(choose) + sum(judge) + prompts_change * max(sum(choose), sum(judge))
    keys = held * shape.layers * shape.cache_elements(1) * sizes[0]
    places = len(choose) * shape.layers + len(judge) * (len(WARMUPS) + 2)
    states = places * answer_tokens * shape.hidden * sizes[1]
    return keys + states + (len(choose) + len(judge)) * answer_tokens * shape.vocab * HALF


def kept_of(prompts: Sequence[int]) -> int:
    """How many prompts `kept_bytes` grow with: of more, the others are only fitted to."""
    _, choose, judge = split(prompts)
    return round((len(choose) + len(judge)) / (CHOOSE[0] + JUDGE[0]))


def sums_bytes(shape: ModelShape, ends: Mapping[int, Sequence[int]]) -> int:
    """Of the sums that `collect_moments` makes for these ends."""
    return SUM * shape.hidden**2 * sum(1 + len(up_to) for up_to in ends.values())


def working_bytes(
    shape: ModelShape,
    prompts: Sequence[int],
    answer_tokens: int,
    sizes: tuple[int, int],
    depths: Mapping[int, Sequence[int]],
    bridged_layers: int,
    whole_head: bool,
) -> int:
    """What hardly shrinks with fewer answers: sums, bridges, the answers that bridges above the first are fitted on,
    the vocabulary's head while previews of it are fitted, a pass of the answers to judge by. Other arguments as for
    `kept_bytes`.

    Args:
        depths: as `depths_to_try`.
        bridged_layers: whose keys and values of prompts maps may give.
        whole_head: no previews are fitted.
    """
    fit, *judged = split(prompts)
    square = shape.hidden**2
    alone = max(0, shape.layers - 2 - max(WARMUPS))
    sums = (max((1 + len(deep) for deep in depths.values()), default=0) + 2 * alone) * square
    sums += SOLVED * shape.hidden * bridged_layers * shape.cache_elements(1)
    tokens = sum(fit) + len(fit) * answer_tokens
    own = min(tokens, KEPT_TOKENS + max(fit))
    keys = own * shape.layers * shape.cache_elements(1) * sizes[0]
    states = own * len(fit) * answer_tokens // tokens * 2 * shape.layers * shape.hidden * sizes[1]
    head = 0 if whole_head else 3 * FLOAT * shape.vocab * shape.hidden
    passed = max(map(len, judged)) * answer_tokens * token_elements(shape) * sizes[1]  # all of their tokens at once
    return 2 * sums_bytes(shape, depths) + SUM * sums + MOST_FITTED * HALF * square + keys + states + head + passed
