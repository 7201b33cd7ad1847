"""Solve a schedule's floor for a target decode FLOP speed-up over the lengths that will really be generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.errors import ScheduleError
from engine.forward.ledger import Ledger
from engine.schedules.decays import Decay, constant
from engine.schedules.orders import Order, lowest_first
from engine.schedules.schedule import Schedule
from engine.shape import ModelShape

DEFAULT_WARMUP = 4  # layers; bare skipping right above layer 0 destroys the text, above layer 3 it does least harm


def decode_flop_speedup(shape: ModelShape, schedule: Schedule, lengths: Sequence[tuple[int, int]]) -> float:
    """Full-depth decode FLOPs / scheduled decode FLOPs of the same tokens; 1.0 when there are no decode passes.

    Args:
        lengths: (prompt tokens, generated tokens) of each sample.
    """
    ledger = Ledger(shape, schedule)
    scheduled = sum(ledger.decode(prompt, generated) for prompt, generated in lengths)
    full = sum(ledger.full_depth.decode(prompt, generated) for prompt, generated in lengths)
    return full / scheduled if scheduled else 1.0


def sample_flop_speedup(shape: ModelShape, schedule: Schedule, lengths: Sequence[tuple[int, int]]) -> float:
    """The same for whole samples, prompts included."""
    ledger = Ledger(shape, schedule)
    scheduled = sum(ledger.prompt(prompt) + ledger.decode(prompt, generated) for prompt, generated in lengths)
    full = sum(
        ledger.full_depth.prompt(prompt) + ledger.full_depth.decode(prompt, generated) for prompt, generated in lengths
    )
    return full / scheduled if scheduled else 1.0


def for_target_speedup(
    target: float,
    lengths: Sequence[tuple[int, int]],
    shape: ModelShape,
    order: Order | None = None,
    decay: Callable[[int], Decay] = constant,
    horizon: int = 0,
) -> Schedule:
    """The schedule with the lowest floor whose decode FLOP speed-up over `lengths` is at least `target`.

    Args:
        target: decode FLOP speed-up, 1.0 or more.
        lengths: (prompt tokens, generated tokens) of the samples to expect. Outputs end early: a ramp solved for
            its horizon instead of the real lengths saves far less than it says.
        shape: the model's.
        order: default SkipDecode's, lowest first above `DEFAULT_WARMUP` layers.
        decay: from a floor (groups skipped at the horizon) to a decay, as in
            `lambda floor: decays.linear(0, floor, horizon=64)`.
        horizon: the step from which on the decay stays at its floor.

    Raises:
        ScheduleError: the target cannot be met: the head and the layers outside the order always run.
    """
    if not target >= 1.0:
        raise ScheduleError(f"a target speed-up is 1.0 or more, got {target}")
    if not any(generated > 1 for _, generated in lengths):
        raise ScheduleError("a target speed-up needs lengths with decode passes: some output of two tokens or more")
    groups = lowest_first(shape.layers, min(DEFAULT_WARMUP, shape.layers)) if order is None else order

    def schedule_with(floor: int) -> Schedule:
        return Schedule.build(shape.layers, groups, decay(floor), horizon, name=f"target {target:g}x")

    low, high = 0, len(groups)
    best = decode_flop_speedup(shape, schedule_with(high), lengths)
    if best < target:
        always = shape.layers - len({unit.layer for group in groups for unit in group})
        raise ScheduleError(
            f"a decode FLOP speed-up of {target:g}x cannot be met: the vocabulary head and the {always} layers that "
            f"always run allow at most {best:.2f}x with this order, decay and these lengths; ask for less"
        )
    while low < high:
        middle = (low + high) // 2
        if decode_flop_speedup(shape, schedule_with(middle), lengths) >= target:
            high = middle
        else:
            low = middle + 1
    return schedule_with(low)
