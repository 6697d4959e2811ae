"""What all endpoints of one engine share: its name, its limits, its metrics and its key."""

from __future__ import annotations

import hashlib
import hmac
import time
from base64 import b64decode
from collections.abc import Sequence
from functools import cached_property

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from aioengine.asgi.body import BoundedBody
from aioengine.asgi.faults import ApiError
from aioengine.checks import require, shown
from aioengine.detokenizer import TokenTexts
from aioengine.engine import AsyncEngine
from aioengine.model_name import model_name

__all__ = ["Service"]


class Service:
    """One engine, as it is served."""

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        model_names: Sequence[str],
        api_key: str | None,
        max_body_bytes: int,
        body_timeout_s: float,
    ) -> None:
        self.engine = engine
        self.model_names = tuple(model_names) or (model_name(engine.model),)
        self.created = int(time.time())
        require(api_key != "", "api_key", "nothing", "text, or None for no key at all")
        self._key = None if api_key is None else _digest(api_key.encode())
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s

    @cached_property
    def token_texts(self) -> TokenTexts:
        """Of the engine's tokenizer; the engine has to be running."""
        return TokenTexts(self.engine.tokenizer)

    def bounded(self, scope: Scope, receive: Receive) -> BoundedBody:
        """`receive` with the limits on request bodies."""
        return BoundedBody(scope, receive, self._max_body_bytes, self._body_timeout_s)

    def check_model(self, name: str | None) -> str:
        """The name under which to answer. Raises ApiError for a model that is not here."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise ApiError(
                404,
                f"the model {shown(name)} is not served here; GET models tells what is",
                parameter="model",
                code="model_not_found",
            )
        return name

    def check_key(self, scope: Scope) -> None:
        """Raise ApiError without the key: as a bearer token, or as the password that a browser asks
        for. Compared in constant time, whatever the lengths."""
        if self._key is None:
            return
        given = _credentials(Headers(scope=scope).get("authorization", ""))
        if not hmac.compare_digest(_digest(given), self._key):
            raise ApiError(
                401,
                "the API key is missing or wrong",
                "authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": 'Bearer, Basic realm="aioengine"'},
            )


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
