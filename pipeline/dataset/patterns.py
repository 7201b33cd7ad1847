"""Regular expressions whose time grows with the text alone: RE2's. What it cannot do is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import re2


@cache
def finder(pattern: str) -> Callable[[str], bool]:
    """Whether the pattern is found in a text. Raises ValueError, in a few words, for one that RE2 has not.

    Perl's `\\w`, `\\d`, `\\s` and `\\b` mean ASCII; `\\pL` and `\\pN` are all letters and numbers. Look-around and
    back-references are what takes other engines exponential time: there are none.
    """
    options = re2.Options()
    options.log_errors = False
    try:
        compiled = re2.compile(pattern, options)
    except (re2.error, UnicodeError) as error:
        said = error.args[0] if error.args else error
        said = said.decode(errors="replace") if isinstance(said, bytes) else said
        raise ValueError(
            f"{said}; patterns are RE2's, without look-around and back-references, so that none takes forever"
        ) from None

    return lambda text: compiled.search(text.encode(errors="replace").decode()) is not None
