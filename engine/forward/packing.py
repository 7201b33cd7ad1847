"""Items grouped so that a pass over a group fits what a pass may hold."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")

Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, how much there is


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


def told_packs(
    items: Sequence[Item], size: Callable[[Item], int], most: int, what: str, progress: Progress
) -> Iterator[list[Item]]:
    """The same, telling how many items are done after each."""
    done = 0
    for pack in packs(items, size, most):
        yield pack
        done += len(pack)
        progress(what, done, len(items))
