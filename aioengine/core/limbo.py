"""Places that requests have let go of, and that a step in flight may still use."""

from __future__ import annotations

from collections import deque

from aioengine.core.block_pool import BlockPool
from aioengine.core.state_pool import StatePool

__all__ = ["Limbo"]


class Limbo:
    """Blocks and places of states on their way back to their pools, by the step they wait for."""

    def __init__(self, pool: BlockPool, states: StatePool) -> None:
        self._pool, self._states = pool, states
        self._waiting: deque[tuple[int, list[int], list[int]]] = deque()

    @property
    def num_blocks(self) -> int:
        """Blocks that are free when the steps in flight have committed."""
        return self._pool.num_free + sum(len(blocks) for _, blocks, _ in self._waiting)

    @property
    def num_states(self) -> int:
        """Places of states that are free then."""
        return self._states.num_free + sum(len(states) for _, _, states in self._waiting)

    def let_go(self, blocks: list[int], states: list[int], until: int | None) -> None:
        """Give them back at once, or when step `until` has committed, the last that may use
        them."""
        if until is None:
            self._pool.release(blocks)
            self._states.release(states)
        else:
            self._waiting.append((until, blocks, states))

    def commit(self, step_id: int) -> None:
        """Give back what has waited for this step, which has committed."""
        while self._waiting and self._waiting[0][0] <= step_id:
            _, blocks, states = self._waiting.popleft()
            self.let_go(blocks, states, None)
