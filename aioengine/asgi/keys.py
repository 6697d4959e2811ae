"""API keys, and the cache salts that keep their owners apart."""

from __future__ import annotations

import hashlib
import hmac
import json
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence

from starlette.datastructures import Headers
from starlette.types import Scope

from aioengine.asgi.error_responses import ApiError
from aioengine.errors import require

__all__ = ["KEY_NAME", "ApiKeys", "CacheSalt", "Keys", "Salter"]

ApiKeys = str | Sequence[str] | Mapping[str, str] | None
"""One key, several, or several by the names of their owners; None: no key is asked for."""
CacheSalt = Callable[[Scope], str | None]
"""The salt of an ASGI scope's requests; None: as for a request without one."""
CHALLENGES = {"www-authenticate": 'Basic realm="aioengine"', "WWW-Authenticate": "Bearer"}
"""Two header lines, by the case of the letters: Chromium knows only the first of a line."""
Salter = Callable[[str | None], str | None]
"""From the salt that a request gives itself to the one that it has."""
MAX_SHARES = 4
KEY_NAME = "aioengine.key_name"
"""Where the scope of a request has the name of its key; "" for one without a name."""


class Keys:
    """The keys of one service. Raises InvalidRequestError for an empty one."""

    def __init__(self, given: ApiKeys, cache_salt: CacheSalt | None = None) -> None:
        if isinstance(given, str):
            given = [given]
        pairs = given.items() if isinstance(given, Mapping) else (("", key) for key in given or ())
        named = list(pairs)
        for _, key in named:
            require(bool(key), "api_key", "nothing", "text, or None for no key")
            is_sendable = key.isprintable() and key == key.strip()
            rule = "printable text without spaces around it"  # the key itself is not shown
            require(is_sendable, "api_key", "what no header can say", rule)
        self._names = {_digest(key.encode()): name for name, key in named}
        is_repeated = isinstance(given, Mapping) and len(self._names) < len(named)
        require(not is_repeated, "api_key", "one key under two names", "a key of its own for each")
        require(given is None or len(named) > 0, "api_key", "no key", "at least one, or None")
        self._cache_salt = cache_salt

    @property
    def are_asked_for(self) -> bool:
        """Return whether there are any."""
        return bool(self._names)

    @property
    def num_shares(self) -> int:
        """Shares of what all owners have together, of which one owner gets one at most: as many as
        there are owners, up to 4. A host's salts may be of any number of owners."""
        return MAX_SHARES if self._cache_salt else max(1, min(len(self._names), MAX_SHARES))

    def check(self, scope: Scope) -> None:
        """Raise ApiError without a key: as a bearer token, as the password of a browser's user, or
        in the header `x-api-key`.

        Compared in constant time with all keys, whatever the lengths. Puts the key's name into the
        scope.
        """
        if not self._names:
            return
        given = self._given(scope)
        found = [name for key, name in self._names.items() if hmac.compare_digest(key, given)]
        if not found:
            raise ApiError(
                401,
                "the API key is missing or wrong",
                "authentication_error",
                code="invalid_api_key",
                headers=CHALLENGES,
            )
        scope[KEY_NAME] = found[0]

    def owner(self, scope: Scope) -> str:
        """Name of whoever asks, for what is kept of it: by the name of its key, or else a digest of
        it, and by the host's salt. All the same where there are neither."""
        key = scope.get(KEY_NAME) or None
        if key is None and self._names:
            key = ["digest", _digest(b"aioengine owner" + self._given(scope)).hex()]
        hosts = None if self._cache_salt is None else self._cache_salt(scope)
        return json.dumps([key, hosts])

    def salter(self, scope: Scope) -> Salter:
        """Make what narrows a request's own salt by that of whoever asks: the host's for the scope,
        or else one of the key. Holds nothing of the scope."""
        if self._cache_salt is not None:
            hosts = self._cache_salt(scope)
        elif self._names:
            # Of the digest, so that nothing which keeps or shows the salt has the key.
            hosts = _digest(b"aioengine cache salt" + self._given(scope)).hex()
        else:
            return lambda own: own
        return lambda own: None if hosts is None and own is None else json.dumps([hosts, own])

    def _given(self, scope: Scope) -> bytes:
        headers = Headers(scope=scope)
        own = headers.get("x-api-key", "").strip().encode("latin-1")
        return _digest(_credentials(headers.get("authorization", "")) or own)


def _credentials(authorization: str) -> bytes:
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("latin-1")  # the bytes as they came
    if scheme.lower() == "basic":
        try:
            return b64decode(value, validate=True).partition(b":")[2]
        except ValueError:
            return b""
    return b""


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
