"""The engine's own http(s) client: public hosts that were allowed by name, and nothing else.

A URL in a chat message is a stranger's wish to make this machine open a connection. So it goes
through one parser, whose answer is checked and dialled; its host is resolved once, all of its
addresses must be public, and one of those very addresses is dialled, under the host's name in the
Host header and in the certificate; a redirect is a new wish and starts over. Proxies, cookies and
passwords do not exist here. What a refusal says does not depend on what is inside the network.

Needs the `fetch` extra (httpx parses URLs and knows the certificate authorities, h11 speaks HTTP);
importing this module without it raises ModuleNotFoundError. `media.fetch` imports it on first use.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import re
import socket
import ssl
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import h11
import httpx
from anyio.abc import ByteStream

from aioengine.config import MediaConfig
from aioengine.errors import MediaError, MediaUnavailableError

__all__ = ["check_url", "fetch_url"]

MAX_REDIRECTS = 5
# Of one host, dialled one after the other; each but the last has this long to answer.
MAX_ADDRESSES = 4
ATTEMPT_S = 5.0
PIECE_BYTES = 1 << 16
EVENTS_BETWEEN_YIELDS = 64

_DEFAULT_PORTS = {"http": 80, "https": 443}
_REDIRECTS = {301, 302, 303, 307, 308}
_HEADERS = {"User-Agent": "aioengine", "Accept-Encoding": "identity", "Connection": "close"}
_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
                   r"(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*")  # fmt: skip
# Resolvers read these as addresses: http://2130706433/ is http://127.0.0.1/.
_NUMBER = re.compile(r"(.*\.)?(0x[0-9a-f]*|[0-9]+)")

# Not called private by every Python that we run on, and not on the internet either. The last one is
# a public address that inside one provider's network means the machine's own host.
_NOT_PUBLIC = [
    ip_network(text)
    for text in ("100.64.0.0/10", "192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32",
                 "2001::/23", "2001:db8::/32", "3fff::/20")
]  # fmt: skip
_UNICAST = ip_network("2000::/3")
_NAT64 = ip_network("64:ff9b::/96")

# Of the server, not of the request.
_PASSING = {408, 425, 429}

# One text whether the name is unknown, an address is refused or the certificate is wrong: what
# differs would draw a map of the network from inside.
_UNREACHABLE = (
    "its host could not be reached (all of its addresses must be public, and its certificate "
    "valid); for hosts inside your network pass media.fetcher"
)
# Only ever of addresses that are public.
_NO_ANSWER = "its host did not answer, or the connection to it failed; try again later"
_NO_RESOLVER = "its host could not be looked up for now; try again later"
_NOT_A_URL = "it is not a plain http(s) URL: scheme://host[:port]/path, without user and password"
_MOVED_WRONGLY = "it was redirected to what is not a plain http(s) URL"
_CORRUPT = "its compressed body is corrupt or cut short"
_NOT_ALLOWED = (
    "its host, or one that it redirects to, is not in media.allowed_hosts; name it there, with "
    ":port where that is not the usual one, or pass media.fetcher"
)
_WRONG_ENTRY = (
    "media.allowed_hosts has an entry that is not *, a host name, *.name or an address (IPv6 in "
    "brackets), each with or without :port"
)


class _RefusedError(Exception):
    """Reason why a fetch ended; the text is safe to show."""


class _FailedError(Exception):
    """A fetch that may succeed later; the text says why, and is safe to show."""


@dataclass(frozen=True, kw_only=True)
class _Target:
    """A URL, taken apart once."""

    url: httpx.URL
    host: str
    """ASCII, lower case; an IPv6 address without brackets."""
    port: int


@dataclass(frozen=True, kw_only=True)
class _Limit:
    num_bytes: int
    name: str

    def check(self, num_bytes: int) -> None:
        if num_bytes > self.num_bytes:
            raise _RefusedError(f"it has more bytes than {self.name} ({self.num_bytes})")


async def fetch_url(
    url: str, config: MediaConfig, *, max_bytes: int, parameter: str, limit_name: str = "the limit"
) -> bytes:
    """The body of a public http(s) resource whose host is one of `config.allowed_hosts`.

    An entry there is a host name (letters of any case or script), `*.` and a name for all hosts
    below it (not itself), an address (IPv6 in brackets), or `*` for every host; `:port` behind any
    of them allows that port in place of 80 for http and 443 for https. Redirects are followed, at
    most 5, each under the same rules and never from https to http.

    Raises MediaError, naming `parameter`, for everything that may not or cannot be fetched within
    `config.fetch_timeout_s` (all of it: resolving, connecting, redirects, the body) and `max_bytes`
    (sent as well as decoded; `limit_name` is what the message calls it); MediaUnavailableError
    where the host may answer another time. The error has no cause and nothing of the response but
    its status. Cancelling closes the connection.
    """
    limit = _Limit(num_bytes=max_bytes, name=limit_name)
    kind: type[MediaError] = MediaUnavailableError
    try:
        async with asyncio.timeout(config.fetch_timeout_s):
            return await _follow(url, config.allowed_hosts, limit)
    except TimeoutError:
        reason = f"it took longer than media.fetch_timeout_s ({config.fetch_timeout_s:g} s)"
    except _FailedError as failure:
        reason = str(failure)
    except _RefusedError as refusal:
        kind, reason = MediaError, str(refusal)
    # Out here, so that the error does not drag a connection and its peer's address along.
    raise kind(f"{parameter} could not be fetched: {reason}", parameter=parameter)


def check_url(url: str, config: MediaConfig, *, parameter: str) -> None:
    """Raise MediaError for a URL that `fetch_url` refuses before it asks anybody."""
    try:
        _check_allowed(_parse(url), config.allowed_hosts)
    except _RefusedError as refusal:
        raise MediaError(f"{parameter} cannot be fetched: {refusal}", parameter=parameter) from None


def _check_allowed(target: _Target, allowed_hosts: Sequence[str]) -> None:
    if not any(_allows(entry, target) for entry in allowed_hosts):
        raise _RefusedError(_NOT_ALLOWED)


async def _follow(text: str, allowed_hosts: Sequence[str], limit: _Limit) -> bytes:
    target = _parse(text)
    for _ in range(MAX_REDIRECTS + 1):
        _check_allowed(target, allowed_hosts)
        stream = await _connect(target, await _public_addresses(target))
        try:
            answer = await _get(stream, target, limit)
        except (anyio.BrokenResourceError, anyio.EndOfStream, OSError):
            raise _FailedError("the connection broke; try again later") from None
        except h11.ProtocolError:
            raise _RefusedError("what its server says is broken HTTP") from None
        finally:
            await anyio.aclose_forcefully(stream)
        if isinstance(answer, bytes):
            return answer
        target = _redirected(target, answer)
    raise _RefusedError(f"it was redirected more than {MAX_REDIRECTS} times")


def _is_plain(text: str) -> bool:
    return not any(char == "\\" or char.isspace() or not char.isprintable() for char in text)


def _parse(text: str) -> _Target:
    """Takes a URL apart; refuses what two parsers might read in two ways."""
    try:
        if not _is_plain(text):
            raise ValueError("backslash, space or control character")
        url, parts = httpx.URL(text), urlsplit(text)
        other_host, other_port = _ascii_host(parts.hostname or ""), parts.port
    except (httpx.InvalidURL, ValueError):
        raise _RefusedError(_NOT_A_URL) from None
    default = _DEFAULT_PORTS.get(url.scheme)
    host = url.raw_host.decode("ascii")
    if (
        default is None
        or "@" in parts.netloc
        or not (_is_address(host) or (_NAME.fullmatch(host) and not _NUMBER.fullmatch(host)))
        or (parts.scheme, other_host) != (url.scheme, host)
        or (default if other_port is None else other_port) != (url.port or default)
    ):
        raise _RefusedError(_NOT_A_URL)
    host = str(ip_address(host)) if _is_address(host) else host
    return _Target(url=url, host=host, port=url.port or default)


def _ascii_host(host: str) -> str:
    return host if host.isascii() else httpx.URL(f"http://{host}/").raw_host.decode("ascii")


def _is_address(host: str) -> bool:
    try:
        return getattr(ip_address(host), "scope_id", None) is None
    except ValueError:
        return False


@functools.lru_cache(maxsize=1024)
def _parse_entry(entry: str) -> tuple[str, int | None]:
    """Host (or "*", or "*." and a name) and port of an entry of `media.allowed_hosts`."""
    prefix = "*" if re.match(r"\*(:|\Z)", entry) else "*." if entry.startswith("*.") else ""
    name = "any.invalid" + entry[1:] if prefix == "*" else entry.removeprefix(prefix)
    try:
        host, port = _parse(f"http://{name}").host, urlsplit(f"http://{name}").port
    except _RefusedError:
        raise _RefusedError(_WRONG_ENTRY) from None
    if re.search(r"[/?#]", name) or (prefix and _is_address(host)):
        raise _RefusedError(_WRONG_ENTRY)
    return (prefix if prefix == "*" else prefix + host), port


def _allows(entry: str, target: _Target) -> bool:
    name, port = _parse_entry(entry)
    if target.port != (_DEFAULT_PORTS[target.url.scheme] if port is None else port):
        return False
    if name.startswith("*."):
        return target.host.endswith(name[1:])
    return name in ("*", target.host)


def _redirected(target: _Target, location: str) -> _Target:
    # Looked at before it is joined: joining might clean up what no honest server sends.
    if not _is_plain(location):
        raise _RefusedError(_MOVED_WRONGLY)
    try:
        following = _parse(str(target.url.join(location)))
    except (httpx.InvalidURL, ValueError, _RefusedError):
        raise _RefusedError(_MOVED_WRONGLY) from None
    if (target.url.scheme, following.url.scheme) == ("https", "http"):
        raise _RefusedError("it was redirected from https to http")
    return following


async def _public_addresses(target: _Target) -> list[str]:
    """The host's addresses, resolved once; all of them public, or none is used."""
    if _is_address(target.host):
        found = [target.host]
    else:
        try:
            found = await _lookup(target.host, target.port)
        except (OSError, UnicodeError) as error:
            if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
                raise _FailedError(_NO_RESOLVER) from None
            found = []
    if not found or not all(_is_public(address) for address in found):
        raise _RefusedError(_UNREACHABLE)
    return list(dict.fromkeys(found))


async def _lookup(host: str, port: int) -> list[str]:
    # Not by the loop's own executor: handlers that wait for us may hold all of its threads.
    found = await anyio.to_thread.run_sync(
        partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM),
        abandon_on_cancel=True,
        limiter=anyio.CapacityLimiter(1),
    )
    return [str(entry[4][0]) for entry in found]


def _is_public(address: str) -> bool:
    """Return whether it is an address on the internet, and so is every address hidden inside it."""
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, IPv6Address):
        if ip.scope_id is not None:
            return False
        hidden = _hidden_address(ip)
        if hidden is not None:
            return _is_public(str(hidden))
        if ip not in _UNICAST:
            return False
    if any(ip in network for network in _NOT_PUBLIC if network.version == ip.version):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


def _hidden_address(ip: IPv6Address) -> IPv4Address | None:
    """The IPv4 address that a packet to this one ends at: mapped, NAT64, 6to4."""
    if ip in _NAT64:
        return IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.ipv4_mapped or ip.sixtofour


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    # Reading the authorities takes tens of milliseconds; nothing changes in it afterwards.
    context = httpx.create_ssl_context(trust_env=False)
    context.set_alpn_protocols(["http/1.1"])
    return context


async def _connect(target: _Target, addresses: Sequence[str]) -> ByteStream:
    """A connection to the first address that answers; the certificate must be the host's."""
    tls: dict[str, Any] = {}
    if target.url.scheme == "https":
        limiter = anyio.CapacityLimiter(1)  # not the application's threads
        context = await anyio.to_thread.run_sync(_ssl_context, limiter=limiter)
        tls = {"ssl_context": context, "tls_hostname": target.host}
    addresses, is_refused = addresses[:MAX_ADDRESSES], False
    for address in addresses:
        try:
            async with asyncio.timeout(None if address == addresses[-1] else ATTEMPT_S):
                # An address is not resolved again, so nothing can be put in its place.
                stream: ByteStream = await anyio.connect_tcp(
                    address, target.port, tls_standard_compatible=False, **tls
                )
                return stream
        except (ssl.SSLError, UnicodeError):
            is_refused = True  # or somebody else's, or no TLS
        except (OSError, anyio.BrokenResourceError, anyio.EndOfStream):
            continue
    raise _RefusedError(_UNREACHABLE) if is_refused else _FailedError(_NO_ANSWER)


async def _get(stream: ByteStream, target: _Target, limit: _Limit) -> bytes | str:
    """The body, decoded; or where the server says that it is, instead."""
    exchange = _Exchange(stream)
    response = await exchange.ask(target.url)
    headers = response.headers
    if response.status_code in _REDIRECTS:
        places = [value for name, value in headers if name == b"location"]
        try:
            (place,) = places
            return place.decode()
        except ValueError:
            raise _RefusedError(_MOVED_WRONGLY) from None
    status = response.status_code
    if status not in (200, 203):
        kind = _FailedError if status >= 500 or status in _PASSING else _RefusedError
        raise kind(f"the server answered with status {status}")
    for name, value in headers:
        if name == b"content-length":
            limit.check(int(value))
    body = _Body(b",".join(value for name, value in headers if name == b"content-encoding"), limit)
    while isinstance(event := await exchange.event(), h11.Data):
        await body.add(bytes(event.data))
    return body.finish()


class _Exchange:
    """One request and its response on a connection that nothing else uses."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._protocol = h11.Connection(h11.CLIENT)
        self._num_events = 0

    async def ask(self, url: httpx.URL) -> h11.Response:
        headers = [("Host", url.netloc.decode()), ("Accept", "*/*"), *_HEADERS.items()]
        request = h11.Request(method="GET", target=url.raw_path, headers=headers)
        head = self._protocol.send(request) or b""
        await self._stream.send(head + (self._protocol.send(h11.EndOfMessage()) or b""))
        while isinstance(event := await self.event(), h11.InformationalResponse):
            pass
        if not isinstance(event, h11.Response):
            raise h11.RemoteProtocolError("no response")
        return event

    async def event(self) -> object:
        self._num_events += 1
        if self._num_events % EVENTS_BETWEEN_YIELDS == 0:
            await asyncio.sleep(0)  # a body may come in chunks of one byte
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            try:
                data = await self._stream.receive(PIECE_BYTES)
            except anyio.EndOfStream:
                return self._last_event()
            self._protocol.receive_data(data)
        return event

    def _last_event(self) -> object:
        """Return the message's end, if the stream may end here; raise EndOfStream if not."""
        self._protocol.receive_data(b"")
        with contextlib.suppress(h11.RemoteProtocolError):
            event = self._protocol.next_event()
            if isinstance(event, h11.EndOfMessage):
                return event
        raise anyio.EndOfStream


class _Body:
    """Takes a body in as it comes, decodes it, and stops at the limit."""

    def __init__(self, encodings: bytes, limit: _Limit) -> None:
        self._decoded = io.BytesIO()
        self._limit = limit
        self._num_sent = 0
        encoding = encodings.strip().lower()
        if encoding not in (b"", b"identity", b"gzip", b"x-gzip", b"deflate"):
            raise _RefusedError("it came in an encoding that was not asked for")
        # 47: the data says whether it is gzip or zlib.
        is_compressed = encoding not in (b"", b"identity")
        self._inflater = zlib.decompressobj(47) if is_compressed else None

    async def add(self, data: bytes) -> None:
        self._num_sent += len(data)
        self._limit.check(self._num_sent)
        if self._inflater is None:
            self._keep(data)
            return
        while data:
            if self._inflater.eof:
                if not data.startswith(b"\x1f\x8b"):
                    return  # what stands behind the body is nobody's
                self._inflater = zlib.decompressobj(47)  # gzip may come in several members
            # A kilobyte may hold a megabyte: in steps, each one counted before the next.
            try:
                piece = self._inflater.decompress(data, PIECE_BYTES)
            except zlib.error:
                raise _RefusedError(_CORRUPT) from None
            self._keep(piece)
            data = self._inflater.unconsumed_tail or self._inflater.unused_data
            await asyncio.sleep(0)

    def finish(self) -> bytes:
        if self._inflater is not None:
            self._keep(self._inflater.flush())
            if not self._inflater.eof:
                raise _RefusedError(_CORRUPT)
        return self._decoded.getvalue()

    def _keep(self, data: bytes) -> None:
        self._limit.check(self._decoded.tell() + len(data))
        self._decoded.write(data)
