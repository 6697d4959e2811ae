"""An engine as an ASGI application, to be mounted in a host's own or served by itself.

Needs the extra `serve`: `pip install "aioengine[serve]"`.
"""

from __future__ import annotations

try:
    from aioengine.asgi.app import openai_app, service_app
    from aioengine.asgi.response_store import ResponseStore
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("aioengine"):
        raise
    raise ModuleNotFoundError(
        f'{error.name} is not installed: pip install "aioengine[serve]"', name=error.name
    ) from error

__all__ = ["ResponseStore", "openai_app", "service_app"]
