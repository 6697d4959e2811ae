"""Refusal of requests that somebody else's web page makes in a browser, by Host and Origin."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from aioengine.asgi.error_responses import ApiError, error_response
from aioengine.errors import require

__all__ = ["guards", "is_loopback"]

LOOPBACK = "loopback"
"""Stands for all names of this machine's loopback addresses."""
ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+", re.IGNORECASE)
TRUSTED = re.compile(r"\*|(\*\.)?[^\s:/@\[\]*]+")
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]+))(?::[0-9]*)?")
SAFE = ("GET", "HEAD", "OPTIONS")


def guards(
    trusted_hosts: str | Sequence[str] | None, allowed_origins: str | Sequence[str] | None
) -> list[Middleware]:
    """The middleware that refuses, outermost first; none for what is None.

    Raises InvalidRequestError for what is no origin.
    """
    trusted_hosts, allowed_origins = _listed(trusted_hosts), _listed(allowed_origins)
    found = []
    for origin in allowed_origins or ():
        rule = "like https://app.example, without a path, or *"
        require(ORIGIN.fullmatch(origin) is not None, "allowed_origins", origin, rule)
    for host in trusted_hosts or ():
        rule = "like api.example, *.example or [::1], without a scheme or a port, or *, or loopback"
        require(_is_host(host), "trusted_hosts", host, rule)
    if trusted_hosts is not None:
        found.append(Middleware(_HostGuard, trusted=trusted_hosts))
    if allowed_origins:
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=allowed_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    if allowed_origins is not None:
        found.append(Middleware(_OriginGuard, allowed=allowed_origins))
    return found


def _listed(given: str | Sequence[str] | None) -> Sequence[str] | None:
    return [given] if isinstance(given, str) else given


def is_loopback(host: str) -> bool:
    """Return whether a name or an address, without a port, is this machine's own."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


class _Guard(ABC):
    """Middleware that answers some requests with an error."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self.refusal(scope) if scope["type"] == "http" else None
        await (self._app if error is None else error_response(error))(scope, receive, send)

    @abstractmethod
    def refusal(self, scope: Scope) -> ApiError | None:
        """Return the error with which to answer, if the request is refused."""


class _HostGuard(_Guard):
    """Refuses requests for other hosts, which a page reaches by a name that leads here."""

    def __init__(self, app: ASGIApp, trusted: Sequence[str]) -> None:
        super().__init__(app)
        self._trusted = [name.lower().strip("[]") for name in trusted]

    def refusal(self, scope: Scope) -> ApiError | None:
        """Refuse a Host header that names another host, or none."""
        hosts = Headers(scope=scope).getlist("host")
        # A probe of HTTP/1.0 may name none; a browser always does.
        is_probe = scope.get("http_version") == "1.0" and scope["method"] in SAFE
        if not hosts and not is_probe:
            hosts = [""]
        if all(self._is_trusted(_without_port(host)) for host in hosts):
            return None
        message = (
            "the Host header names a host that is not served here; name it in "
            "trusted_hosts (--trusted-hosts)"
        )
        return ApiError(421, message, code="untrusted_host")

    def _is_trusted(self, host: str) -> bool:
        return any(
            trusted in ("*", host)
            or (trusted == LOOPBACK and is_loopback(host))
            or (trusted.startswith("*.") and host.endswith(trusted[1:]))
            for trusted in self._trusted
        )


class _OriginGuard(_Guard):
    """Refuses what pages of other sites send.

    A browser asks nobody before it sends a plain POST; and it adds the password that it was told.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        super().__init__(app)
        self._allowed = [origin.lower() for origin in allowed]

    def refusal(self, scope: Scope) -> ApiError | None:
        """Refuse what may change something, from a foreign page."""
        if scope["method"] in SAFE or not self._is_foreign(scope):
            return None
        message = (
            "pages of this origin may not send requests here; name it in allowed_origins "
            "(--allowed-origins)"
        )
        return ApiError(403, message, code="foreign_origin")

    def _is_foreign(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        origin = headers.get("origin", "").lower()
        if "*" in self._allowed or origin in self._allowed:
            return False
        site = headers.get("sec-fetch-site")
        if site is not None:  # another port of the same host is "same-site", and another's
            return site not in ("same-origin", "none")
        # An older browser, or one that was led here by plain HTTP; a program sends neither header.
        return bool(origin) and origin.partition("://")[2] != headers.get("host", "").lower()


def _is_host(name: str) -> bool:
    return TRUSTED.fullmatch(name) is not None or _address(name.strip("[]")) is not None


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _without_port(host: str) -> str:
    """The name or address of a Host header; empty for what is none."""
    found = HOST.fullmatch(host.strip().lower())
    return "" if found is None else (found[1] or found[2]).rstrip(".")
