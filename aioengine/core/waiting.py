"""Requests in lines by seniority, and those that wait for KV blocks: with media and without.

Two lines, so that neither the media that come next nor the text that passes them have to be looked
for among all that wait.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from operator import attrgetter

from aioengine.core.request import Request

__all__ = ["WaitingRequests", "insert", "remove", "take_turns"]

_seniority = attrgetter("order")


def insert(line: list[Request], request: Request) -> None:
    """Put a request into a line."""
    insort(line, request, key=_seniority)


def remove(line: list[Request], request: Request) -> None:
    """Take a request out of a line."""
    index = bisect_left(line, request.order, key=_seniority)
    assert line[index] is request
    del line[index]


def take_turns(one: list[Request], other: list[Request]) -> Iterator[Request]:
    """The requests of both lines by seniority. Whoever walks along may empty a line meanwhile."""
    one.reverse()
    other.reverse()
    while one or other:
        is_one = not other or (bool(one) and one[-1].order < other[-1].order)
        yield (one if is_one else other).pop()


class WaitingRequests:
    """`text`: those that have nothing to encode; `media`: those that have."""

    def __init__(self) -> None:
        self.text: list[Request] = []
        self.media: list[Request] = []

    def add(self, request: Request) -> None:
        """A request may start from now on."""
        insert(self._line(request), request)

    def remove(self, request: Request) -> None:
        """A request starts, or has ended."""
        remove(self._line(request), request)

    def add_followers(
        self, leader: Request, num_cached: int, cross: Sequence[Sequence[int]] | None
    ) -> None:
        """Release those that wait for the leader's prompt: so many tokens of it, and these blocks
        of cross-attention, are cached."""
        for request in leader.followers.values():
            request.hit_estimate = min(num_cached, request.num_known - 1)
            request.finds_cross = cross is not None
            self.add(request)
        leader.followers.clear()

    def _line(self, request: Request) -> list[Request]:
        return self.media if request.all_items else self.text
