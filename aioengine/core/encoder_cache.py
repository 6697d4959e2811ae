"""The encoder cache's ledger: which outputs the device holds, who uses them, what may go.

Bytes are conserved: free + evictable + referenced = capacity. An entry being encoded counts as
referenced by its job. The rows themselves lie with the runner.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["EncoderCache"]


@dataclass(slots=True)
class _Entry:
    num_bytes: int
    num_references: int


class EncoderCache:
    """Content key -> rows, by bytes, reference-counted, least recently used out first."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_evictions = 0
        self._entries: dict[str, _Entry] = {}  # least recently used first
        self._encoding: set[str] = set()  # those that wait for their rows
        self._free_bytes = capacity_bytes

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def free_bytes(self) -> int:
        """Bytes that nothing holds."""
        return self._free_bytes

    @property
    def evictable_bytes(self) -> int:
        """Bytes of ready entries that nobody references."""
        return sum(e.num_bytes for e in self._entries.values() if not e.num_references)

    @property
    def referenced_bytes(self) -> int:
        """Bytes of entries in use or being encoded."""
        return sum(e.num_bytes for e in self._entries.values() if e.num_references)

    @property
    def num_referenced(self) -> int:
        """Entries in use or being encoded."""
        return sum(1 for e in self._entries.values() if e.num_references)

    @property
    def is_encoding(self) -> bool:
        """Return whether any entry waits for its rows."""
        return bool(self._encoding)

    def is_ready(self, key: str) -> bool:
        """Return whether the rows of `key` can be used."""
        return key in self._entries and key not in self._encoding

    def reserve(
        self, key: str, num_bytes: int, *, keep: Collection[str] = ()
    ) -> tuple[str, ...] | None:
        """Make room for an item that is about to be encoded; its job holds the first reference.

        Evicts unreferenced entries outside `keep`, least recently used first, and returns their
        keys; returns None, and changes nothing, if that does not give room enough.
        """
        assert key not in self._entries
        evicted: list[str] = []
        room = self._free_bytes
        for candidate, entry in self._entries.items():
            if room >= num_bytes:
                break
            if not entry.num_references and candidate not in keep:
                evicted.append(candidate)
                room += entry.num_bytes
        if room < num_bytes:
            return None
        for victim in evicted:
            self._drop(victim)
        self.num_evictions += len(evicted)
        self._entries[key] = _Entry(num_bytes, num_references=1)
        self._encoding.add(key)
        self._free_bytes -= num_bytes
        return tuple(evicted)

    def fill(self, key: str) -> None:
        """The rows of `key` are there; its job lets go."""
        self._encoding.remove(key)
        self._entries[key].num_references -= 1

    def cancel(self, key: str) -> None:
        """The job of `key` failed; the room is free again."""
        self._encoding.remove(key)
        self._drop(key)

    def reference(self, key: str) -> None:
        """A planned step uses `key`, which becomes the most recently used."""
        assert key not in self._encoding
        entry = self._entries.pop(key)
        self._entries[key] = entry
        entry.num_references += 1

    def release(self, key: str) -> None:
        """A step that used `key` has committed."""
        entry = self._entries[key]
        assert entry.num_references > 0
        entry.num_references -= 1

    def clear(self) -> tuple[str, ...]:
        """Drop whatever nobody references; returns the keys."""
        unused = tuple(k for k, e in self._entries.items() if not e.num_references)
        for key in unused:
            self._drop(key)
        return unused

    def check(self) -> None:
        """Assert that bytes are conserved."""
        held = sum(e.num_bytes for e in self._entries.values())
        assert self._free_bytes >= 0 and self._free_bytes + held == self.capacity_bytes
        assert all(e.num_references >= 0 for e in self._entries.values())
        assert all(self._entries[key].num_references == 1 for key in self._encoding)

    def _drop(self, key: str) -> None:
        self._free_bytes += self._entries.pop(key).num_bytes
