"""Items grouped so that a pass over a group fits what a pass may hold."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def packs(items: Iterable[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Neighbouring items whose sizes add up to `most` at the most; a larger one comes alone."""
    pack: list[Item] = []
    held = 0
    for item in items:
        if pack and held + size(item) > most:
            yield pack
            pack, held = [], 0
        pack.append(item)
        held += size(item)
    if pack:
        yield pack
