"""Keeping responses between requests, which is the host's to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ["ResponseStore"]


class ResponseStore(Protocol):
    """Keeps responses for `previous_response_id`, for as long as it pleases.

    A record is a JSON object: `response`, as the client got it; `items`, the whole conversation up
    to its end, media as `data:` URLs, which may be large; and `owner`, a text that is the same for
    all requests of one key. A record is only ever shown to its owner, whatever the store does; it
    may sort by it. What a method raises fails the request. Called on the event loop.
    """

    async def save(self, response_id: str, record: Mapping[str, Any]) -> None:
        """Keep a record, before its client is told that the response is complete."""

    async def load(self, response_id: str) -> Mapping[str, Any] | None:
        """The record that was saved under this id; None: there is none."""

    async def delete(self, response_id: str) -> None:
        """Forget a record, which may be gone already."""
