"""Where along an answer skipping hurts, and the growth of the skipped block that costs least quality for its FLOPs."""

from collections.abc import Mapping, Sequence
from itertools import combinations, combinations_with_replacement, groupby, pairwise

import numpy as np

from engine.forward.ledger import Ledger
from engine.forward.quality import Quality
from engine.forward.target import Lengths

STARTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # steps at which a plateau may start
LEAST_TOKENS = 30  # held-out tokens from a step on, below which nothing can be said about it
PLATEAUS = 4  # at most: each is a graph to capture and a bridge to keep

Growth = tuple[tuple[int, int], ...]  # (first step, layers skipped from there on), both increasing


def best_growths(
    qualities: Mapping[int, Quality],
    steps: np.ndarray,
    ledgers: Mapping[int, Ledger],
    lengths: Lengths,
    budget: int,
    count: int,
) -> list[Growth]:
    """The growths with the least expected KL divergence among those that stay within a FLOP budget.

    What a token loses is taken to depend on its own step and depth alone, so that every growth can be priced from
    constant schedules; the best are worth a proper look.

    Args:
        qualities: layers skipped -> what constantly skipping so many does to held-out tokens.
        steps: [N], the decode steps of those tokens.
        ledgers: layers skipped -> the ledger of that constant schedule.
        budget: decode FLOPs for all samples of these lengths.
        count: how many to return, best first.
    """
    depths = sorted(qualities)
    last = max(generated for _, generated in lengths) - 1
    starts = [start for start in STARTS if start < last and (start == 0 or (steps >= start).sum() >= LEAST_TOKENS)]
    losses, costs = _tables(qualities, steps, ledgers, lengths, depths, starts, last)
    # Sums over spans of segments: [from segment, to segment, depth].
    ahead_loss, ahead_cost = (
        np.concatenate([np.zeros((1, len(depths))), table.cumsum(0)]) for table in (losses, costs)
    )
    found: list[tuple[float, Growth]] = []
    plateaus = min(PLATEAUS, len(starts))
    choices = np.array(list(combinations_with_replacement(range(len(depths)), plateaus)))  # [choices, plateaus]
    for inner in combinations(range(1, len(starts)), plateaus - 1):
        bounds = (0, *inner, len(starts))
        spans = list(enumerate(pairwise(bounds)))
        loss = sum((ahead_loss[b] - ahead_loss[a])[choices[:, i]] for i, (a, b) in spans)
        cost = sum((ahead_cost[b] - ahead_cost[a])[choices[:, i]] for i, (a, b) in spans)
        fits = np.flatnonzero(cost <= budget)
        for choice in fits[np.argsort(loss[fits])[:count]]:
            skipped = [depths[index] for index in choices[choice]]
            found.append((float(loss[choice]), _growth([starts[bound] for bound in bounds[:-1]], skipped)))
    return list(dict.fromkeys(growth for _, growth in sorted(found)))[:count]


def _tables(
    qualities: Mapping[int, Quality],
    steps: np.ndarray,
    ledgers: Mapping[int, Ledger],
    lengths: Lengths,
    depths: Sequence[int],
    starts: Sequence[int],
    last: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Expected KL divergence and FLOPs of all samples, [segments, depths]; a segment ends where the next starts."""
    losses, costs = np.zeros((len(starts), len(depths))), np.zeros((len(starts), len(depths)))
    for row, (start, end) in enumerate(zip(starts, [*starts[1:], last], strict=True)):
        inside = (steps >= start) & (steps < end)
        spans = [(prompt, min(end, generated - 1)) for prompt, generated in lengths if generated - 1 > start]
        passes = sum(stop - start for _, stop in spans)
        for column, depth in enumerate(depths):
            losses[row, column] = float(qualities[depth].kl.numpy()[inside].mean()) * passes
            cost = ledgers[depth].plateaus[0]
            costs[row, column] = sum(cost.tokens(prompt + start + 1, prompt + stop) for prompt, stop in spans)
    return losses, costs


def _growth(starts: Sequence[int], skipped: Sequence[int]) -> Growth:
    """Plateaus of equal depth made one."""
    return tuple(next(equal) for _, equal in groupby(zip(starts, skipped, strict=True), key=lambda plateau: plateau[1]))
