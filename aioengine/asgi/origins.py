"""Refusal of requests that somebody else's web page makes in a browser, by Host and Origin."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
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
        trusted = [name.lower().strip("[]") for name in trusted_hosts]
        found.append(Middleware(_Guard, refuse=partial(_refuse_host, trusted)))
    if allowed_origins:
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=allowed_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    if allowed_origins is not None:
        allowed = [origin.lower() for origin in allowed_origins]
        found.append(Middleware(_Guard, refuse=partial(_refuse_origin, allowed)))
    return found


def _listed(given: str | Sequence[str] | None) -> Sequence[str] | None:
    return [given] if isinstance(given, str) else given


def is_loopback(host: str) -> bool:
    """Return whether a name or an address, without a port, is this machine's own."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


class _Guard:
    """Middleware that answers a request with the error that `refuse` finds, if any."""

    def __init__(self, app: ASGIApp, refuse: Callable[[Scope], ApiError | None]) -> None:
        self._app = app
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refuse(scope) if scope["type"] == "http" else None
        answer = self._app if error is None else error_response(error, scope["path"])
        await answer(scope, receive, send)


def _refuse_host(trusted: Sequence[str], scope: Scope) -> ApiError | None:
    """Refuse a Host header that names another host, or none: a page has a name that leads here."""
    hosts = Headers(scope=scope).getlist("host")
    # A probe of HTTP/1.0 may name none; a browser always does.
    is_probe = scope.get("http_version") == "1.0" and scope["method"] in SAFE
    if not hosts and not is_probe:
        hosts = [""]
    if all(_is_trusted(_without_port(host), trusted) for host in hosts):
        return None
    message = (
        "the Host header names a host that is not served here; name it in trusted_hosts "
        "(--trusted-hosts)"
    )
    return ApiError(421, message, code="untrusted_host")


def _is_trusted(host: str, names: Sequence[str]) -> bool:
    return any(
        name in ("*", host)
        or (name == LOOPBACK and is_loopback(host))
        or (name.startswith("*.") and host.endswith(name[1:]))
        for name in names
    )


def _refuse_origin(allowed: Sequence[str], scope: Scope) -> ApiError | None:
    """Refuse what may change something, from a page of another site.

    A browser asks nobody before it sends a plain POST; and it adds the password that it knows.
    """
    if scope["method"] in SAFE or not _is_foreign(Headers(scope=scope), allowed):
        return None
    message = (
        "pages of this origin may not send requests here; name it in allowed_origins "
        "(--allowed-origins)"
    )
    return ApiError(403, message, code="foreign_origin")


def _is_foreign(headers: Headers, allowed: Sequence[str]) -> bool:
    origin = headers.get("origin", "").lower()
    if "*" in allowed or origin in allowed:
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
