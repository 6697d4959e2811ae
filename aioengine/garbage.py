"""Python's cyclic garbage collector, held back while an engine loads.

Nearly all objects that a load makes live as long as the process, yet each full collection would
walk all of them, again and again, with the interpreter's lock held: the host's event loop would
stand still for a quarter of a second at a time, and the load would take a tenth longer.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collection_paused"]

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def collection_paused() -> Iterator[None]:
    """No automatic collections in this process, until the last of the pauses under way ends.

    A host that had switched them off finds them off afterwards.
    """
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()
