"""Solve a schedule's floor for a target decode FLOP speed-up over the lengths that will really be generated."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from engine.errors import ScheduleError
from engine.forward.ledger import Ledger
from engine.schedules.decays import Decay, constant
from engine.schedules.orders import Order, lowest_first
from engine.schedules.schedule import Schedule
from engine.shape import ModelShape

DEFAULT_WARMUP = 4  # layers; bare skipping right above layer 0 destroys the text, above layer 3 it does least harm


Lengths = Sequence[tuple[int, int]]  # of each sample, prompt tokens and generated tokens


def decode_flop_speedup(shape: ModelShape, schedule: Schedule, lengths: Lengths) -> float:
    """Full-depth decode FLOPs / scheduled decode FLOPs of the same tokens; 1.0 when there are no decode passes."""
    ledger = Ledger(shape, schedule)
    scheduled, full = (sum(each.decode(*length) for length in lengths) for each in (ledger, ledger.full_depth))
    return full / scheduled if scheduled else 1.0


def sample_flop_speedup(shape: ModelShape, schedule: Schedule, lengths: Lengths, shared: int = 0) -> float:
    """The same for whole samples, prompts included but for the tokens that they all begin with, where they are longer:
    those are computed once, and at full depth (`Engine.share_prefix`).
    """
    ledger = Ledger(shape, schedule)
    scheduled, full = (
        sum(
            each.prompt(prompt, shared if prompt > shared else 0) + each.decode(prompt, generated)
            for prompt, generated in lengths
        )
        for each in (ledger, ledger.full_depth)
    )
    return full / scheduled if scheduled else 1.0


def for_target_speedup(
    target: float,
    lengths: Lengths,
    shape: ModelShape,
    order: Order | None = None,
    decay: Callable[[int], Decay] = constant,
    horizon: int = 0,
    counted: Callable[[Schedule], Schedule] = lambda schedule: schedule,
) -> Schedule:
    """The schedule with the lowest floor whose decode FLOP speed-up over `lengths` is at least `target`.

    Args:
        target: decode FLOP speed-up, 1.0 or more.
        lengths: of the samples to expect. Outputs end early: a ramp solved for its horizon instead of the real lengths
            saves far less than it says.
        shape: the model's.
        order: default SkipDecode's, lowest first above `DEFAULT_WARMUP` layers.
        decay: from a floor (groups skipped at the horizon) to a decay, as in
            `lambda floor: decays.linear(0, floor, horizon=64)`.
        horizon: the step from which on the decay stays at its floor.
        counted: what costs as a schedule will with what it is to be given, such as bridges.

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

    def speedup(floor: int) -> float:
        return decode_flop_speedup(shape, counted(schedule_with(floor)), lengths)

    def reached(floor: int) -> float:
        try:
            return speedup(floor)
        except ScheduleError:
            return 0.0  # the decay begins with more skipped than that

    best = speedup(len(groups))
    if best < target:
        always = shape.layers - len({unit.layer for group in groups for unit in group})
        raise ScheduleError(
            f"a decode FLOP speed-up of {target:g}x cannot be met: the vocabulary head and the {always} layers that "
            f"always run allow at most {best:.2f}x with this order, decay and these lengths; ask for less"
        )
    return schedule_with(bisect_left(range(len(groups)), target, key=reached))
