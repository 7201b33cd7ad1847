"""Skip orders: rankings of the units that may be skipped. A group is skipped as a whole; here a group is a layer."""

from collections.abc import Mapping, Sequence

from engine.errors import ScheduleError
from engine.parts.unit import Unit

Order = tuple[tuple[Unit, ...], ...]


def of_layers(layers: Sequence[int]) -> Order:
    """Whole layers in the given order, attention and MLP block together."""
    return tuple((Unit("a", layer), Unit("m", layer)) for layer in layers)


def of_units(order: Order) -> Order:
    """The same ranking, one unit at a time: twice as fine."""
    return tuple((unit,) for group in order for unit in group)


def lowest_first(layers: int, warmup: int = 1) -> Order:
    """SkipDecode (arXiv 2307.02628): the lowest layers above the `warmup` ones go first, the top ones never before."""
    if not 1 <= warmup <= layers:
        raise ScheduleError(f"warm-up must lie between 1 and the model's {layers} layers, got {warmup}")
    return of_layers(range(warmup, layers))


def top_first(layers: int) -> Order:
    """Early termination: the top layer goes first. Layer 0 always runs."""
    return of_layers(range(layers - 1, 0, -1))


def evenly_spaced(layers: int) -> Order:
    """Unified Layer Skipping (arXiv 2404.06954) made nested: each next layer is the one farthest from those gone.

    The first and the last layer always run. Ties go to the lower layer.
    """
    order: list[int] = []
    candidates = list(range(1, layers - 1))
    while candidates:
        gone = [0, *order, layers - 1]
        farthest = max(candidates, key=lambda layer: (min(abs(layer - other) for other in gone), -layer))
        order.append(farthest)
        candidates.remove(farthest)
    return of_layers(order)


def most_similar_first(similarity: Mapping[Unit, float]) -> Order:
    """Single units whose output is most like their input go first: importance as in AdaSkip (arXiv 2501.02336).

    Layer 0 always runs. `similarity` is what `Engine.unit_similarity` measures.
    """
    skippable = (unit for unit in similarity if unit.layer > 0)
    return tuple((unit,) for unit in sorted(skippable, key=lambda unit: (-similarity[unit], unit.layer, unit.kind)))
