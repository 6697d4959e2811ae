"""Processed items in memory, bounded by bytes: those used lately, and those that requests hold."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

from cachetools import LRUCache

from aioengine.processors.inputs import MultiModalKwargsItem

__all__ = ["HeldItems", "Lease", "ProcessorCache", "ProcessorCacheStatistics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorCacheStatistics:
    """A snapshot: bytes, entries, how many look-ups found their item, and how many items have gone
    to make room."""

    capacity_bytes: int
    used_bytes: int
    entries: int
    hits: int
    misses: int
    evictions: int


class ProcessorCache:
    """Least recently used items go first. Thread-safe; no method waits for anything but the lock.

    A capacity of 0 turns the cache off: nothing is stored, and every look-up is a miss. An item
    larger than the whole cache is not stored.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._lock = threading.Lock()
        self._items: LRUCache[str, MultiModalKwargsItem] = LRUCache(
            maxsize=capacity_bytes, getsizeof=_num_bytes
        )
        self._hits = self._misses = self._evictions = 0

    def get(self, key: str) -> MultiModalKwargsItem | None:
        """The item, which becomes the most recently used one; None if it is not here."""
        with self._lock:
            item: MultiModalKwargsItem | None = self._items.get(key)
            if item is None:
                self._misses += 1
            else:
                self._hits += 1
            return item

    def touch(self, key: str) -> bool:
        """Makes the item the most recently used one, uncounted; whether it is here."""
        with self._lock:
            return self._items.get(key) is not None

    def put(self, key: str, item: MultiModalKwargsItem) -> bool:
        """Stores the item, in place of older ones where needed; whether it fits at all."""
        with self._lock:
            if _num_bytes(item) > self._items.maxsize:
                return False
            before = len(self._items) + (key not in self._items)
            self._items[key] = item
            self._evictions += before - len(self._items)
            return True

    def discard(self, key: str) -> None:
        """Drops one item, if it is here."""
        with self._lock:
            self._items.pop(key, None)

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._items

    def clear(self) -> None:
        """Drops every item; the counters stay."""
        with self._lock:
            self._items.clear()

    def statistics(self) -> ProcessorCacheStatistics:
        """A snapshot of the counters."""
        with self._lock:
            return ProcessorCacheStatistics(
                capacity_bytes=int(self._items.maxsize),
                used_bytes=int(self._items.currsize),
                entries=len(self._items),
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
            )


class HeldItems:
    """Items that live requests hold, whatever the cache drops: each once, however many hold it.

    For one thread. One item may be larger than the capacity, if it is alone.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.num_bytes = 0
        self._capacity_bytes = capacity_bytes
        self._items: dict[str, MultiModalKwargsItem] = {}
        self._holders: Counter[str] = Counter()

    def get(self, key: str) -> MultiModalKwargsItem | None:
        """The item, if somebody holds it."""
        return self._items.get(key)

    def hold(self, key: str, item: MultiModalKwargsItem) -> bool:
        """Holds the item for one more; False if there is no room. `release` has to follow."""
        if key not in self._items:
            num_bytes = self.num_bytes + _num_bytes(item)
            if self._items and num_bytes > self._capacity_bytes:
                return False
            self._items[key], self.num_bytes = item, num_bytes
        self._holders[key] += 1
        return True

    def release(self, key: str) -> None:
        """One who held the item does so no longer."""
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.num_bytes -= _num_bytes(self._items.pop(key))


class Lease:
    """The items that one request holds, until it ends; closed, it takes no more."""

    def __init__(self, held: HeldItems) -> None:
        self._held = held
        self._keys: list[str] = []
        self._is_closed = False

    def hold(self, key: str, item: MultiModalKwargsItem) -> bool:
        """Hold an item; False if there is no room, or nobody to hold it for."""
        if self._is_closed or not self._held.hold(key, item):
            return False
        self._keys.append(key)
        return True

    def close(self) -> None:
        """Release every item. Idempotent."""
        self._is_closed = True
        while self._keys:
            self._held.release(self._keys.pop())


def _num_bytes(item: MultiModalKwargsItem) -> int:
    # An item without tensors still takes room; without this, any number of them would fit.
    return max(item.num_bytes, 1)
