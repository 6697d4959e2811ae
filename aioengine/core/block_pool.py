"""The pool of KV blocks and the prefix cache in it.

All KV groups draw from one pool; a request has one block table per group. A full block is cached
under (group, digest of everything its content depends on), and a hit also checks the token ids.
Blocks of cross-attention are cached too, full or not, under what the encoder was given.

Without caching, the completions of one prompt still find the prompt's blocks under their own salt,
until the last of them has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from aioengine.core.block_hash import cross_digests, extend_digests
from aioengine.core.places import Places
from aioengine.core.plan import Limits
from aioengine.core.request import KnownPrefix, Request

__all__ = ["BlockPool"]

BlockKey = tuple[int, bytes]


class BlockPool(Places[BlockKey]):
    """Blocks of `block_size` tokens."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits.num_blocks)
        self.block_size = limits.block_size
        self.num_groups = limits.num_groups
        self._cross_groups = range(self.num_groups, self.num_groups + limits.num_cross_groups)
        self._caching = limits.enable_prefix_caching
        self._last_search: tuple[tuple[int, ...], list[bytes], KnownPrefix] | None = None

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill or begin, in one group."""
        return -(-num_tokens // self.block_size)

    # ---- the prefix cache

    def find_prefix(self, request: Request) -> list[list[int]]:
        """The cached blocks of the longest known prefix: one table per group, equally long.

        Takes no references. They may hold all tokens there are: the last one is then computed
        without being stored. A request that waits asks at every step, so the answer is remembered:
        blocks that were found stay where they are until one is forgotten, and the search goes on
        behind them.
        """
        if not (self.shares(request) and request.reads_prefix):
            return [[] for _ in range(self.num_groups)]
        candidates = request.known_prefix, self._prefix_of_sibling(request)
        known = max(
            (k for k in candidates if k is not None and k.num_forgotten == self._num_forgotten),
            key=lambda k: (len(k.tables[0]), k.num_published),
            default=KnownPrefix(self._num_forgotten, -1, tuple([] for _ in range(self.num_groups))),
        )
        if known.num_published != self._num_published:
            tables = tuple(list(table) for table in known.tables)
            self._search(request, tables)
            known = KnownPrefix(self._num_forgotten, self._num_published, tables)
        request.known_prefix = known
        # Not the request itself, which holds what is to be freed with it.
        self._last_search = request.prompt_token_ids, request.digests, known
        num_blocks = self._num_outside(request, len(known.tables[0]))
        return [table[:num_blocks] for table in known.tables]

    def hit_length(self, request: Request, tables: Sequence[list[int]]) -> int:
        """Tokens that need not be computed: all but the last at most, whose logits are wanted."""
        return min(len(tables[0]) * self.block_size, request.num_known - 1)

    def _num_outside(self, request: Request, num_blocks: int) -> int:
        """Fewer blocks, where a request may not start behind so many."""
        if request.pooling is not None:
            # It may be as long as there are blocks: none is left for what is computed once more.
            num_blocks = min(num_blocks, (request.num_known - 1) // self.block_size)
        if request.starts_outside:
            for low, high in reversed(request.bidirectional):
                if low < min(num_blocks * self.block_size, request.num_known - 1) < high:
                    num_blocks = low // self.block_size
        return num_blocks

    def _prefix_of_sibling(self, request: Request) -> KnownPrefix | None:
        """Return what the last request has found, if it is another completion of the same
        prompt."""
        if self._last_search is None or self._last_search[0] is not request.prompt_token_ids:
            return None
        _, found, known = self._last_search
        num_blocks = len(known.tables[0])
        if num_blocks > request.num_known // self.block_size:
            return None
        digests = extend_digests(request, self.block_size)
        return known if found[:num_blocks] == digests[:num_blocks] else None

    def _search(self, request: Request, tables: Sequence[list[int]]) -> None:
        """Go on behind the blocks in `tables`."""
        digests = extend_digests(request, self.block_size)
        for index in range(len(tables[0]), request.num_known // self.block_size):
            token_ids = self._token_ids(request, index)
            found = [self._cached.get((group, digests[index])) for group in range(self.num_groups)]
            column = [entry[0] for entry in found if entry is not None and entry[1] == token_ids]
            if len(column) < self.num_groups:
                break
            for table, block in zip(tables, column, strict=True):
                table.append(block)

    def publish(self, request: Request) -> None:
        """Offer the request's blocks that are computed in full to others."""
        num_full = self.shareable(request, request.num_computed) // self.block_size
        if num_full <= request.num_published:
            return
        digests = extend_digests(request, self.block_size)
        for index in range(request.num_published, num_full):
            token_ids = self._token_ids(request, index)
            for group, table in enumerate(request.block_tables):
                block, key = table[index], (group, digests[index])
                if self._keys[block] is None and key not in self._cached:
                    self._publish(block, key, token_ids)
        request.num_published = num_full

    def find_cross(self, request: Request) -> list[list[int]] | None:
        """The cached blocks of the request's encoder input, a table per group of cross-attention.

        Takes no references. None where one of them is not there; no tables without such an input.
        """
        if request.encoder is None:
            return []
        if not self.shares(request):
            return None
        digests = cross_digests(request, self.block_size)
        tables: list[list[int]] = []
        for group in self._cross_groups:
            tables.append([])
            for digest in digests:
                entry = self._cached.get((group, digest))
                if entry is None:
                    return None
                tables[-1].append(entry[0])
        return tables

    def publish_cross(self, request: Request) -> None:
        """Offer the request's blocks of cross-attention, which a planned step writes, to others.

        At once, as steps run in their order: no later one can read them before they are written,
        and within one step every layer writes before it reads.
        """
        if not self.shares(request):
            return
        digests = cross_digests(request, self.block_size)
        for group, table in zip(self._cross_groups, request.cross_tables, strict=True):
            for digest, block in zip(digests, table, strict=True):
                if (group, digest) not in self._cached:
                    self._publish(block, (group, digest))

    def forget_private(self, request: Request) -> None:
        """Forget what the completions of the request's prompt, all ended, have shared."""
        if request.private_salt is None:
            return
        num_full = len(request.prompt_token_ids) // self.block_size
        if len(request.digests) < num_full:
            extend_digests(request, self.block_size)
        own = product(range(self.num_groups), request.digests[:num_full])
        cross = product(self._cross_groups, cross_digests(request, self.block_size))
        self._forget_all([*own, *cross])

    def shareable(self, request: Request, num_tokens: int) -> int:
        """Count those of a request's first `num_tokens` that others may find: without caching, the
        completions of its prompt alone, and of that alone."""
        if not self.shares(request):
            return 0
        return num_tokens if self._caching else min(num_tokens, len(request.prompt_token_ids))

    def shares(self, request: Request) -> bool:
        """Return whether others may find what the request computes."""
        return self._caching or request.private_salt is not None

    def _token_ids(self, request: Request, index: int) -> tuple[int, ...]:
        return request.tokens(index * self.block_size, (index + 1) * self.block_size)
