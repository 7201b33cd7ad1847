"""What Python's garbage collector is spared in a process that makes many objects."""

from __future__ import annotations

import gc
from functools import cache


@cache
def spare_collector() -> None:
    """Take all that this process holds out of collections, once: modules and a model, which stay as long as it lives.

    Rows set off a collection every few units; each walked through the half million objects that torch brings.
    """
    gc.freeze()
