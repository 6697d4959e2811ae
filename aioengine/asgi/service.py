"""State that all endpoints of one engine share: its names, its limits and its keys."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypedDict

from starlette.types import Receive, Scope

from aioengine.asgi.error_responses import ApiError
from aioengine.asgi.json_body import BodyBudget, BoundedBody
from aioengine.asgi.keys import ApiKeys, CacheSalt, Keys
from aioengine.asgi.response_store import ResponseStore
from aioengine.engine.async_engine import AsyncEngine
from aioengine.engine.detokenizer import TokenTexts
from aioengine.errors import is_int, require, shown
from aioengine.types import Prompt

__all__ = ["Service", "ServiceOptions"]

MAX_BODY_BYTES = 64 << 20
MAX_BODIES_BYTES = MAX_FILES_BYTES = 256 << 20
BODY_TIMEOUT_S = 60.0


class ServiceOptions(TypedDict, total=False):
    """Options for serving an engine."""

    model_names: str | Sequence[str] | None
    """Names under which clients ask for the model; None: the model's own."""
    api_key: ApiKeys
    """Wanted for all but health, as a bearer token: one key, several, or name -> key."""
    cache_salt: CacheSalt | None
    """From an ASGI scope to the salt of what its requests leave in caches; None: one per key."""
    max_body_bytes: int
    """Of one request: 64 MiB."""
    max_bodies_bytes: int
    """Of all requests under way: 256 MiB, and never less than one body may have."""
    max_files_bytes: int
    """Of all files of batches, which stay in memory: 256 MiB. One of several keys has its share of
    it, and a quarter at least."""
    body_timeout_s: float
    """For a body to arrive in: 60 s."""
    response_store: ResponseStore | None
    """Keeps responses for `previous_response_id`; None: nothing is kept."""
    trusted_hosts: str | Sequence[str] | None
    """Hosts that requests may name: `"localhost"`, `"*.a.example"`, `"loopback"` for all names of
    the loopback addresses. None: any."""
    allowed_origins: str | Sequence[str] | None
    """Other origins whose pages may send requests and read the answers (`"https://a.example"`, or
    `"*"`). None: the host decides who may."""


class Service:
    """One engine, as it is served. Raises InvalidRequestError for an empty key."""

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        model_names: str | Sequence[str] | None = None,
        api_key: ApiKeys = None,
        cache_salt: CacheSalt | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_bodies_bytes: int = MAX_BODIES_BYTES,
        max_files_bytes: int = MAX_FILES_BYTES,
        body_timeout_s: float = BODY_TIMEOUT_S,
        response_store: ResponseStore | None = None,
    ) -> None:
        self.engine = engine
        names = [model_names] if isinstance(model_names, str) else model_names
        self.model_names = tuple(names or ()) or (engine.model_name,)
        self.created = int(time.time())
        self.keys = Keys(api_key, cache_salt)
        sizes = {"body": max_body_bytes, "bodies": max_bodies_bytes, "files": max_files_bytes}
        for name, size in sizes.items():
            require(is_int(size) and size > 0, f"max_{name}_bytes", size, "positive")
        self.budget = BodyBudget(max(max_body_bytes, max_bodies_bytes))
        self.max_body_bytes = max_body_bytes
        self.max_files_bytes = max_files_bytes
        self.response_store = response_store
        self.batches: set[asyncio.Task[None]] = set()
        """Those under way, which live longer than the requests that made them."""
        self._body_timeout_s = body_timeout_s

    @cached_property
    def token_texts(self) -> TokenTexts:
        """Token texts of the engine's tokenizer; the engine has to be running."""
        return TokenTexts(self.engine.tokenizer)

    def bounded(self, scope: Scope, receive: Receive) -> BoundedBody:
        """`receive` with the limits on request bodies."""
        budget = self.budget if scope["method"] == "POST" else None
        return BoundedBody(scope, receive, self.max_body_bytes, self._body_timeout_s, budget)

    def check_model(self, name: str | None) -> str:
        """The name under which to answer. Raises ApiError for a model that is not here."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            message = f"the model {shown(name)} is not served here; GET models tells what is"
            raise ApiError(404, message, parameter="model", code="model_not_found")
        return name

    def salted(self, scope: Scope, prompt: Prompt) -> Prompt:
        """The prompt with the cache salt of whoever asks."""
        return self.salter(scope)(prompt)

    def salter(self, scope: Scope) -> Callable[[Prompt], Prompt]:
        """Make what gives prompts that cache salt. Holds nothing of the scope."""
        salt_of = self.keys.salter(scope)

        def salted(prompt: Prompt) -> Prompt:
            salt = salt_of(prompt.cache_salt)
            return prompt if salt == prompt.cache_salt else replace(prompt, cache_salt=salt)

        return salted
