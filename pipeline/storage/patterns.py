"""The parts of a glob, without a look at any file system."""

import re
from itertools import product

BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")


def without_braces(pattern: str) -> list[str]:
    """A pattern's braces written out, those within others first."""
    parts = BRACES.split(pattern)
    if len(parts) == 1:
        return [pattern]
    choices = [part.split(",") if place % 2 else [part] for place, part in enumerate(parts)]
    return [each for choice in product(*choices) for each in without_braces("".join(choice))]


def fixed_part(root: str) -> str:
    """The directories of a glob before its first pattern; any other path itself."""
    first = re.search(rf"[*?\[]|{BRACES.pattern}", root)
    return root if first is None else root[: first.start()].rpartition("/")[0]
