"""Identity of a KV block: a SHA-256 chain over everything its content depends on.

A block's digest covers its parent's digest, its token ids, and extra keys: each media item that
overlaps it (identity and where it starts), the whole content of a range whose tokens see each other
both ways, and on the first block the encoder's input, the tenant's salt and that of the prompt's
own completions. Fields are length-framed, so that no two different contents serialise alike.
Method: chained block hashes as in vLLM's prefix caching.
"""

from __future__ import annotations

import hashlib
from array import array

from aioengine.core.request import Request

__all__ = ["cross_digests", "extend_digests"]

_ROOT = b"aioengine/prefix/1"


def _frame(tag: bytes, *parts: bytes) -> bytes:
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return tag + len(parts).to_bytes(4, "little") + framed


def _ids(token_ids: tuple[int, ...]) -> bytes:
    return array("q", token_ids).tobytes()


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


def _item_keys(request: Request, start: int, end: int, base: int) -> list[bytes]:
    """A frame for each item that overlaps [start, end), with its offset from `base`."""
    return [
        _frame(b"mm", item.modality.encode(), item.key.encode(), _number(item.span.offset - base))
        for item in request.items
        if item.span.offset < end and start < item.span.end
    ]


def _extra_keys(request: Request, start: int, end: int) -> list[bytes]:
    keys = _item_keys(request, start, end, start)
    for low, high in request.bidirectional:
        if low < end and start < high:
            content = [_ids(request.tokens(low, high)), *_item_keys(request, low, high, low)]
            keys.append(_frame(b"span", _number(low - start), *content))
    if start == 0 and request.encoder is not None:
        keys.append(_frame(b"encoder", request.encoder.key.encode()))
    if start == 0 and request.cache_salt is not None:
        keys.append(_frame(b"salt", request.cache_salt.encode("utf-8", "surrogatepass")))
    if start == 0 and request.private_salt is not None:
        keys.append(_frame(b"private", request.private_salt))
    return keys


def extend_digests(request: Request, block_size: int) -> list[bytes]:
    """The digests of all blocks that the request's known tokens fill; kept on the request."""
    digests = request.digests
    for index in range(len(digests), request.num_known // block_size):
        start, end = index * block_size, (index + 1) * block_size
        parent = digests[-1] if digests else _ROOT
        tokens = _ids(request.tokens(start, end))
        extra = _extra_keys(request, start, end)
        digests.append(hashlib.sha256(_frame(b"block", parent, tokens, *extra)).digest())
    return digests


def cross_digests(request: Request, block_size: int) -> list[bytes]:
    """Digest the keys and values of cross-attention, block by block; kept on the request."""
    digests = request.cross_digests
    if request.encoder is not None and not digests:
        keys = [request.encoder.key.encode()]
        if request.private_salt is not None:
            keys.append(request.private_salt)
        for index in range(-(-request.num_encoder_rows // block_size)):
            digests.append(hashlib.sha256(_frame(b"cross", *keys, _number(index))).digest())
    return digests
