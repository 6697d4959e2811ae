"""Numbered places that are shared: who references which, what they hold, which go first.

Every place is unused, evictable (its content is cached, and nobody references it) or referenced,
and is counted once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

__all__ = ["Places"]

Key = TypeVar("Key", bound=Hashable)


class Places(Generic[Key]):
    """`count` interchangeable places, numbered from 0, whose content may be cached under a key."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._unused = list(range(count - 1, -1, -1))
        # Least recently used first. A plain dict would look for its first past all that have gone.
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * count
        self._keys: list[Key | None] = [None] * count
        self._cached: dict[Key, tuple[int, tuple[int, ...]]] = {}
        self._num_published = 0  # places that became cached content, ever
        self._num_forgotten = 0  # places that ceased to be

    @property
    def num_free(self) -> int:
        """Places that an allocation could get: unused and evictable ones."""
        return len(self._unused) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Places with reusable content, referenced or not."""
        return len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """`count` places, each referenced once; evicts the least recently used where it must."""
        assert count <= self.num_free
        places = []
        for _ in range(count):
            if self._unused:
                place = self._unused.pop()
            else:
                place, _ = self._evictable.popitem(last=False)
                self._forget(place)
            self._references[place] = 1
            places.append(place)
        return places

    def reference(self, places: Iterable[int]) -> None:
        """Use cached places once more."""
        for place in places:
            if self._references[place] == 0:
                del self._evictable[place]
            self._references[place] += 1

    def release(self, places: Sequence[int]) -> None:
        """Let go of places; the last becomes evictable first, as a short prefix is shared more."""
        for place in reversed(places):
            assert self._references[place] > 0
            self._references[place] -= 1
            if self._references[place] == 0:
                if self._keys[place] is None:
                    self._unused.append(place)
                else:
                    self._evictable[place] = None

    def clear(self) -> None:
        """Forget all cached content; referenced places stay with their holders."""
        for place in [place for place, _ in self._cached.values()]:
            self._forget(place)
        self._unused.extend(self._evictable)
        self._evictable.clear()

    def check(self) -> None:
        """Assert that each place is counted once."""
        referenced = {b for b in range(self.count) if self._references[b] > 0}
        unused, evictable = set(self._unused), set(self._evictable)
        assert len(unused) == len(self._unused)
        assert not (unused & evictable or unused & referenced or evictable & referenced)
        assert len(unused) + len(evictable) + len(referenced) == self.count
        assert all(self._keys[b] is not None for b in evictable)
        assert all(self._keys[b] is None for b in unused)
        assert all(self._keys[b] == key for key, (b, _) in self._cached.items())

    def _publish(self, place: int, key: Key, token_ids: tuple[int, ...] = ()) -> None:
        """Cache what a referenced place holds, which is nothing that is cached yet."""
        self._keys[place] = key
        self._cached[key] = place, token_ids
        self._num_published += 1

    def _forget(self, place: int) -> None:
        key = self._keys[place]
        assert key is not None
        del self._cached[key]
        self._keys[place] = None
        self._num_forgotten += 1

    def _forget_all(self, keys: Iterable[Key]) -> None:
        """Forget what is cached under these keys."""
        for place in [self._cached[key][0] for key in keys if key in self._cached]:
            self._forget(place)
            if not self._references[place]:
                del self._evictable[place]
                self._unused.append(place)
