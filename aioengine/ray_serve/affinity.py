"""Affinity of requests to replicas by their caches, weighed against queues.

A prompt's beginning is known by a chain of SHA-256 digests at growing lengths, an image or a
audio by the digest of its data or URL. Who has had which of them lately is remembered in a
bounded table. What nobody has had goes to its home, by rendezvous hashing: routers that share
nothing agree on it, and a replica that comes or goes moves its own share of the keys only.

Methods: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998), for the
home; cost against gain in one unit, characters of text that are computed again or not.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.message import Message
from typing import Any

from cachetools import LRUCache

__all__ = ["Affinity", "Placements", "affinity_of_form", "affinity_of_object", "ranked"]

FIRST_CUT = 256
"""Characters of a text before its first digest. Each further one covers twice as many."""
MAX_KEYS = 64
"""Of one request: what comes after them has come a long way with them."""
MAX_FIELDS = 32
"""Of a form that are looked at."""
PIECE = 1 << 16
"""Characters that are encoded at once, so that no image holds the GIL."""

REQUEST_COST = 512
"""One more request in a replica's queue weighs as much as so many characters to compute again."""
MEDIA_WEIGHT = 8 * REQUEST_COST
"""What an image or audio counts that a replica has encoded."""
HOME_WEIGHT = 2 * REQUEST_COST
"""What a request's home counts."""
MAX_GAIN = 16 * REQUEST_COST
"""No cache is worth a longer detour. With HOME_WEIGHT it bounds how uneven the queues may get."""


@dataclass(frozen=True, slots=True)
class Affinity:
    """Cache keys that a request shares with others.

    `home`: what they all share that belong to it, a conversation's begin or its first image;
    `keys`: digests of what a cache may hold, with what finding it is worth in characters of text.
    """

    home: bytes = b""
    keys: Mapping[bytes, int] = field(default_factory=dict)


class Placements:
    """Record of the keys that replicas have had lately, of `max_keys` keys."""

    def __init__(self, max_keys: int) -> None:
        self._replicas: LRUCache[bytes, frozenset[str]] = LRUCache(max_keys)

    def gains(self, affinity: Affinity) -> Counter[str]:
        """Replica -> the weight of what it has had, in characters."""
        found: Counter[str] = Counter()
        for key, weight in affinity.keys.items():
            for replica in self._replicas.get(key, ()):
                found[replica] += weight
        return found

    def record(self, affinity: Affinity, replica: str, live: frozenset[str]) -> None:
        """`replica`, one of those that are `live`, has the keys from now on."""
        for key in affinity.keys:
            self._replicas[key] = (self._replicas.get(key, frozenset()) & live) | {replica}


def ranked(affinity: Affinity, queues: Mapping[str, int], gains: Mapping[str, int]) -> list[str]:
    """The replicas, best first. `queues`: how many requests each of them has."""
    homes = sorted(queues, key=lambda replica: _attraction(affinity.home, replica), reverse=True)

    def cost(replica: str) -> int:
        gain = min(gains.get(replica, 0), MAX_GAIN) + HOME_WEIGHT * (replica == homes[0])
        return queues[replica] * REQUEST_COST - gain

    return sorted(homes, key=cost)


def _attraction(home: bytes, replica: str) -> bytes:
    return hashlib.sha256(home + replica.encode()).digest()


def affinity_of_object(body: Mapping[str, Any]) -> Affinity:
    """Extract keys from the body of chat/completions or completions; of no shape that they
    refuse."""
    chain = _Chain(_digest(_text(body.get("cache_salt"))))
    messages, prompt = body.get("messages"), body.get("prompt")
    home = b""
    if isinstance(messages, list):
        for message in messages:
            if isinstance(message, dict):
                chain.add_message(message)
                if not home and message.get("role") == "user":
                    home = chain.node
    else:
        while isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
            prompt = prompt[0]
        chain.add_text(_text(prompt))
        home = next(iter(chain.keys), b"")
    return Affinity(chain.first_media or home or chain.node, chain.keys)


def affinity_of_form(content_type: str, body: bytes) -> Affinity:
    """Extract the keys of a multipart form's files."""
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_param("boundary")
    if not isinstance(boundary, str):
        return Affinity()
    chain = _Chain(b"")
    for part in body.split(b"--" + boundary.encode(), MAX_FIELDS):
        head, _, content = part.partition(b"\r\n\r\n")
        if b"filename=" in head:
            chain.add_media(content)
    return Affinity(chain.first_media, chain.keys)


class _Chain:
    """Digests of a prompt's beginning as it grows, and of its media. `node`: of all of it."""

    def __init__(self, root: bytes) -> None:
        self._root = self.node = root
        self.keys: dict[bytes, int] = {}
        self.first_media = b""

    def add_message(self, message: Mapping[str, Any]) -> None:
        """One of a chat."""
        self._extend(b"message", _digest(_text(message.get("role"))))
        content = message.get("content")
        for part in content if isinstance(content, list) else [{"text": content}]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                self.add_text(text)
            elif isinstance(part, dict):
                self.add_media(max(_strings(part), key=len, default=""))

    def add_text(self, text: str) -> None:
        """A text, with a key for each doubling of its length."""
        start, end = 0, FIRST_CUT
        while start < len(text) and len(self.keys) < MAX_KEYS:
            piece = text[start:end]
            self._extend(b"text", _digest(piece))
            self.keys[self.node] = len(piece)
            start, end = end, 2 * end

    def add_media(self, data: str | bytes) -> None:
        """An image, an audio item or a video, by its data or URL."""
        digest = _digest(data)
        self._extend(b"media", digest)
        if len(self.keys) < MAX_KEYS:
            identity = _digest(self._root + digest)
            self.first_media = self.first_media or identity
            self.keys[identity] = MEDIA_WEIGHT

    def _extend(self, kind: bytes, digest: bytes) -> None:
        self.node = _digest(self.node + digest + kind)


def _text(value: Any) -> str:
    """A text as it is, and token ids as text."""
    if isinstance(value, list):
        return " ".join(str(token_id) for token_id in value if isinstance(token_id, int))
    return value if isinstance(value, str) else ""


def _strings(part: Mapping[str, Any]) -> Iterator[str]:
    """The texts in a part of a message: `{"type": "image_url", "image_url": {"url": ...}}`."""
    for value in part.values():
        values = value.values() if isinstance(value, dict) else [value]
        yield from (text for text in values if isinstance(text, str))


def _digest(data: str | bytes) -> bytes:
    digest = hashlib.sha256()
    for start in range(0, len(data), PIECE):
        piece = data[start : start + PIECE]
        digest.update(piece.encode("utf-8", "replace") if isinstance(piece, str) else piece)
    return digest.digest()
