"""Python's cyclic garbage collector, kept from walking the libraries that an engine imports.

torch, transformers and what they import are some 350,000 objects that live as long as the process.
A full collection walks all of them with the GIL held, a quarter of a second, and one would be due
right after the import, on whichever thread allocates next. So the libraries are imported with young
collections alone, a few milliseconds each, and then frozen. Later full collections walk what was
made since: models, requests and the application's own objects.

It is done once in a process, by its first engine, and never undone. `gc.unfreeze()` thaws
everything, a host's own frozen objects too; and at the last close it would only bring that quarter
of a second to the host's loop, for objects that do not die. Nothing of a model is frozen, and an
engine that is closed has let go of its model, so weights are freed as ever. The price: what the
application has alive at that moment is frozen as well. It is freed by its reference counts, but a
cycle of it that becomes garbage later is not, unless the application thaws it. Garbage that waits
for a collection at that moment would stay too, so a full collection comes first, while the heap is
the application's alone. Where the application has switched collections off, nothing is done.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

__all__ = ["import_libraries"]

LIBRARIES = (
    "aioengine.engine.loading.loader",
    "aioengine.engine.engine_core",
    # Imported by transformers itself while it loads any checkpoint.
    "transformers.generation.utils",
    "transformers.models.auto.processing_auto",
    "transformers.conversion_mapping",
    # Imported at the first request, the plugins of Pillow among them.
    "anyio._backends._asyncio",
    "PIL.JpegImagePlugin",
    "PIL.PngImagePlugin",
    "PIL.TiffImagePlugin",
)

NEVER = 2**31 - 1

_lock = threading.Lock()
_are_frozen = False


def import_libraries() -> None:
    """Import all that engines share, seconds' worth, and have full collections pass it over.

    Thread-safe. Thresholds, and whether collections are on, are as before when it returns or
    raises.
    """
    global _are_frozen
    with _lock:
        if _are_frozen or not gc.isenabled() or gc.get_threshold()[0] == 0:
            _import_all()
            return
        gc.collect()
        with _young_collections_only():
            _import_all()
            gc.freeze()
        _are_frozen = True


def _import_all() -> None:
    for name in LIBRARIES:
        import_module(name)
    # The first call makes some 15,000 objects, of all architectures, that transformers keeps.
    sys.modules["transformers.conversion_mapping"].get_checkpoint_conversion_mapping("")


@contextmanager
def _young_collections_only() -> Iterator[None]:
    """Keep full collections away, and the others short, for a while."""
    before = gc.get_threshold()
    gc.set_threshold(min(before[0], 700), min(before[1], 10), NEVER)
    during = gc.get_threshold()
    try:
        yield
    finally:
        if gc.get_threshold() == during:  # else the application has set its own meanwhile
            gc.set_threshold(*before)
