"""Named schedules: published methods as points of order x decay."""

from engine.errors import ScheduleError
from engine.schedules import decays, orders
from engine.schedules.schedule import Schedule


def skipdecode(layers: int, warmup: int, max_active: int, min_active: int, horizon: int) -> Schedule:
    """SkipDecode (arXiv 2307.02628): lowest layers above the warm-up first, linear decay over the horizon.

    Args:
        layers: layers of the model.
        warmup: bottom layers that always run.
        max_active: layers that run at step 0.
        min_active: layers that run from step `horizon` on.
        horizon: in steps.
    """
    if not warmup <= min_active <= max_active <= layers:
        raise ScheduleError(
            "SkipDecode needs warmup <= min_active <= max_active <= layers, "
            f"got {warmup}, {min_active}, {max_active}, {layers}"
        )
    decay = decays.linear(layers - max_active, layers - min_active, horizon)
    return Schedule.build(layers, orders.lowest_first(layers, warmup), decay, horizon, name="SkipDecode")


def unified_layer_skipping(layers: int, active: int) -> Schedule:
    """Unified Layer Skipping (arXiv 2404.06954): evenly spaced layers, the same number at every step."""
    _check_active(active, layers, least=2)
    order, decay = orders.evenly_spaced(layers), decays.constant(layers - active)
    return Schedule.build(layers, order, decay, 0, name="Unified Layer Skipping")


def early_termination(layers: int, active: int) -> Schedule:
    """Every step ends after the lowest `active` layers."""
    _check_active(active, layers, least=1)
    return Schedule.build(layers, orders.top_first(layers), decays.constant(layers - active), 0, "early termination")


def _check_active(active: int, layers: int, least: int) -> None:
    if not least <= active <= layers:
        raise ScheduleError(f"active layers must lie between {least} and the model's {layers}, got {active}")
