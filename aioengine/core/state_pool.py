"""The pool of states: what layers keep of a request beside keys and values.

A recurrent layer's state after a token replaces the one before it, so a request that runs holds
one place, whatever its length. A prefix can only be taken up where somebody has kept a copy:
*snapshots* are taken at block ends, each in a place of its own, and cached under the digest of the
block that ends there. A state can be as large as the keys and values of thousands of tokens; so
snapshots are `state_interval` tokens apart, but for the last block end of a prompt, and for the
place up to which a request found another's blocks.

What is copied is held until the step that copies it has committed.
"""

from __future__ import annotations

from collections.abc import Sequence

from aioengine.core.block_hash import extend_digests
from aioengine.core.places import Places
from aioengine.core.plan import Limits, SequencePlan
from aioengine.core.request import Request

__all__ = ["StatePool"]


class StatePool(Places[bytes]):
    """Places for the states of requests and for snapshots; none for a model that keeps none."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits.num_states)
        self._block_size, self._interval = limits.block_size, limits.state_interval

    def cut(self, request: Request, tables: list[list[int]]) -> list[list[int]]:
        """The part of a known prefix's blocks at whose end there is a snapshot.

        Notes on the request how long the whole was. One token at least is left to compute.
        """
        if not (self.count and tables[0]):
            request.num_shared = 0
            return tables
        digests = extend_digests(request, self._block_size)
        most = min(len(tables[0]), (request.num_known - 1) // self._block_size)
        request.num_shared = most * self._block_size
        ends = (index for index in range(most, 0, -1) if digests[index - 1] in self._cached)
        num_blocks = next(ends, 0)
        return [table[:num_blocks] for table in tables]

    def needed(self, request: Request, start: int) -> int:
        """Free places that a request needs to start at `start`: its own, and the snapshot's, if
        that is one of them."""
        if not self.count:
            return 0
        source = self._snapshot_at(request, start)
        return 1 if source is None or self._references[source] else 2

    def start(self, request: Request, start: int) -> int | None:
        """Give a request that starts at `start` a place; hold the snapshot there, and return it."""
        if not self.count:
            return None
        source = self._snapshot_at(request, start)
        if source is not None:
            self.reference([source])
        (request.state,) = self.allocate(1)
        return source

    def plan_snapshots(self, request: Request, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Places for copies of the state inside a chunk [start, end): (tokens, place) each.

        As many as there are places for; `end` at most what others may find.
        """
        if not self.count:
            return ()
        size = self._block_size
        last = (len(request.prompt_token_ids) - 1) // size * size
        snapshots: list[tuple[int, int]] = []
        for position in range((start // size + 1) * size, end + 1, size):
            is_wanted = position % self._interval == 0 or position in (last, request.num_shared)
            if is_wanted and self.num_free and not self._is_known(request, position):
                snapshots.append((position, self.allocate(1)[0]))
        return tuple(snapshots)

    def commit(self, request: Request, sequence: SequencePlan, is_current: bool) -> None:
        """Let go of what a step has copied from, and publish what it has copied to.

        `is_current`: the request is live, and the step belongs to its present epoch.
        """
        if sequence.state_source is not None:
            self.release([sequence.state_source])
        for position, place in sequence.snapshots:
            if is_current:
                digest = extend_digests(request, self._block_size)[position // self._block_size - 1]
                if digest not in self._cached:
                    self._publish(place, digest)
            self.release([place])

    def forget_private(self, request: Request) -> None:
        """See `BlockPool.forget_private`."""
        if request.private_salt is not None:
            self._forget_all(request.digests)

    def _snapshot_at(self, request: Request, start: int) -> int | None:
        if not start:
            return None
        return self._cached[request.digests[start // self._block_size - 1]][0]

    def _is_known(self, request: Request, position: int) -> bool:
        """Return whether there is such a snapshot; of tokens that are not sampled yet, no."""
        index = position // self._block_size - 1
        digests: Sequence[bytes] = extend_digests(request, self._block_size)
        return index < len(digests) and digests[index] in self._cached
