"""Files of a checkpoint, in a folder or on the hub."""

from __future__ import annotations

from pathlib import Path

from transformers.utils import cached_file

__all__ = ["find_file"]


def find_file(
    source: str, name: str, revision: str | None, *, needs_hub: bool = False
) -> Path | None:
    """A file of a folder or hub id; None where there is none of that name.

    `needs_hub`: whether to raise OSError, rather than find none, where the hub cannot be asked.
    """
    found = cached_file(
        source,
        name,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=needs_hub,
    )
    return None if found is None else Path(found)
