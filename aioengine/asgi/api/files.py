"""Files of batches, kept in memory: what clients upload, and what comes of it."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope, Send

from aioengine.asgi.api.asks import wrong
from aioengine.asgi.api.fields import FILES, known
from aioengine.asgi.endpoint import QUERY
from aioengine.asgi.error_responses import ApiError
from aioengine.asgi.json_body import BoundedBody
from aioengine.asgi.service import Service
from aioengine.errors import InvalidRequestError, shown

__all__ = ["FileStore", "Files", "StoredFile", "page_of"]

MAX_FILES = 1024
"""Of all owners together: a file without bytes takes room too."""
LIMITS = (10_000, 10_000)
"""Entries of a page of the list, without `limit` and at most."""
MAX_NAME_CHARACTERS = 256
MAX_FIELD_BYTES = 1 << 12
LIMIT = re.compile("[0-9]{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file. `owner`: of whose key it is."""

    owner: str
    name: str
    purpose: str
    data: bytes
    id: str = field(default_factory=lambda: f"file-{uuid4().hex}")
    created_at: int = field(default_factory=lambda: int(time.time()))

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's object of it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": len(self.data),
            "created_at": self.created_at,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
        }


class FileStore:
    """Files of `max_bytes` together at most, each its owner's. One owner has one of `num_shares`
    equal shares of the bytes, and of the files that there may be, at most.

    What a batch reads counts until it is read, also where the file is deleted before; and what it
    writes counts before it is a file.
    """

    def __init__(self, max_bytes: int, num_shares: int = 1) -> None:
        self._max_bytes = max_bytes
        self._num_shares = num_shares
        self._files: dict[str, StoredFile] = {}
        self._read: list[StoredFile] = []
        """Files that batches read, each once a batch."""
        self._reserved: Counter[str] = Counter()
        """Owner -> bytes of files that are to be."""

    def num_bytes(self, owner: str | None = None) -> int:
        """Bytes of the files of an owner, and of those that are to be; None: of all owners."""
        found = {each.id: each for each in (*self._files.values(), *self._read)}.values()
        held = sum(len(each.data) for each in found if owner in (None, each.owner))
        return held + (self._reserved.total() if owner is None else self._reserved[owner])

    def add(self, file: StoredFile) -> None:
        """Keep a file. Raises ApiError where there is no room for it."""
        self._check_room(file.owner, len(file.data), num_files=1)
        self._files[file.id] = file

    def reserve(self, owner: str, num_bytes: int) -> None:
        """Count bytes of a file that is to be; less than none to let go of them. Raises as `add`
        does."""
        self._check_room(owner, num_bytes)
        self._reserved[owner] += num_bytes

    @contextmanager
    def reading(self, file: StoredFile) -> Iterator[bytes]:
        """The bytes of a file, which count as long as they are read."""
        self._read.append(file)
        try:
            yield file.data
        finally:
            self._read.remove(file)

    def _check_room(self, owner: str, num_bytes: int, num_files: int = 0) -> None:
        limits = (("your", owner, self._num_shares), ("all", None, 1))
        for whose, name, parts in limits[self._num_shares == 1 :]:
            most, most_bytes = MAX_FILES // parts, self._max_bytes // parts
            num_own = sum(1 for each in self._files.values() if name in (None, each.owner))
            if num_files and num_own >= most:
                message = f"there may be {most} of {whose} files; delete some"
            elif num_bytes > 0 and self.num_bytes(name) + num_bytes > most_bytes:
                message = f"{whose} files may have {most_bytes} bytes together; delete some"
            else:
                continue
            raise ApiError(413, message, parameter="file", code="request_too_large")

    def get(self, owner: str, name: str, parameter: str | None = None) -> StoredFile:
        """A file of this owner. `parameter`: where a body names it.

        Raises ApiError where there is none.
        """
        found = self._files.get(name)
        if found is None or found.owner != owner:
            message = f"there is no file {shown(name)}"
            raise ApiError(404, message, parameter=parameter, code="not_found")
        return found

    def remove(self, owner: str, name: str) -> None:
        """Forget a file. Raises ApiError where there is none."""
        del self._files[self.get(owner, name).id]

    def of(self, owner: str) -> Iterator[StoredFile]:
        """The files of an owner, the latest first."""
        return (each for each in reversed(self._files.values()) if each.owner == owner)


class Files:
    """The endpoints below /files."""

    def __init__(self, service: Service, store: FileStore) -> None:
        self._service = service
        self._store = store

    async def upload(self, scope: Scope, receive: BoundedBody, send: Send) -> None:
        """Take in a file of requests."""
        request = Request(scope, receive)
        if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            raise ApiError(400, "the body must be multipart/form-data", code="invalid_value")
        async with request.form(
            max_files=1, max_fields=len(FILES) + 1, max_part_size=MAX_FIELD_BYTES
        ) as form:
            given = known({name.partition("[")[0]: value for name, value in form.items()}, FILES)
            upload = given.get("file")
            if not isinstance(upload, UploadFile):
                raise InvalidRequestError("file must be a file", parameter="file")
            if given.get("purpose") != "batch":
                raise InvalidRequestError("purpose must be batch", parameter="purpose")
            name = (upload.filename or "")[:MAX_NAME_CHARACTERS]
            file = StoredFile(
                owner=self._service.keys.owner(scope),
                name=name,
                purpose="batch",
                data=await upload.read(),
            )
        self._store.add(file)
        await JSONResponse(file.to_dict())(scope, receive, send)

    async def all(self, scope: Scope, receive: BoundedBody, send: Send) -> None:
        """List the files."""
        query, found = scope[QUERY], [*self._store.of(self._service.keys.owner(scope))]
        if "purpose" in query:
            found = [each for each in found if each.purpose == query["purpose"]]
        if (order := query.get("order", "desc")) not in ("asc", "desc"):
            raise wrong("order", "asc or desc")
        answer = page_of(found if order == "desc" else found[::-1], query, *LIMITS)
        await JSONResponse(answer)(scope, receive, send)

    async def one(self, scope: Scope, receive: BoundedBody, send: Send) -> None:
        """Describe a file, or delete it."""
        owner, name = self._service.keys.owner(scope), scope["path_params"]["name"]
        answer = self._store.get(owner, name).to_dict()
        if scope["method"] == "DELETE":
            self._store.remove(owner, name)
            answer = {"id": name, "object": "file", "deleted": True}
        await JSONResponse(answer)(scope, receive, send)

    async def content(self, scope: Scope, receive: BoundedBody, send: Send) -> None:
        """Send the bytes of a file."""
        file = self._store.get(self._service.keys.owner(scope), scope["path_params"]["name"])
        await Response(file.data, media_type="application/jsonl")(scope, receive, send)


class Listed(Protocol):
    """An entry of a list."""

    @property
    def id(self) -> str:
        """The name by which a page goes on."""

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's object of it."""


def page_of(
    found: Sequence[Listed], query: Mapping[str, str], default: int, most: int
) -> dict[str, Any]:
    """The part of a list that a query asks for, as OpenAI's object. `default`, `most`: entries.

    Raises InvalidRequestError.
    """
    limit, after = query.get("limit", str(default)), query.get("after")
    if LIMIT.fullmatch(limit) is None or not 0 < int(limit) <= most:
        raise wrong("limit", f"an integer, 1 to {most}")
    start = 0
    if after is not None:
        ids = [each.id for each in found]
        if after not in ids:
            raise wrong("after", "the id of an entry of this list")
        start = ids.index(after) + 1
    end = start + int(limit)
    data = [each.to_dict() for each in found[start:end]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": end < len(found),
    }
