"""Pages of the service: one static file each, with a policy that lets nothing else in."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

__all__ = ["Page"]


class Page:
    """A page of this folder."""

    def __init__(self, name: str, *, shows_media: bool = False) -> None:
        """`shows_media`: whether it shows images, audio and videos that its user chose."""
        self._html = Path(__file__).with_name(name).read_text("utf-8")
        self._headers = {
            "Content-Security-Policy": _policy(self._html, shows_media),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }

    async def show(self, _request: Request) -> Response:
        """The whole page."""
        return HTMLResponse(self._html, headers=self._headers)


def _policy(page: str, shows_media: bool) -> str:
    """Nothing but the page's own style and script, and requests to where it came from."""
    style, script = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for tag in ("style", "script")
        for text in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    )
    media = "img-src data: blob:; media-src blob:" if shows_media else "img-src data:"
    return (
        f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; "
        f"connect-src 'self'; {media}; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
