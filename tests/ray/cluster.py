"""A Ray cluster on this machine, the model served on it, and what clients and tests ask of it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import ray
from ray import serve
from ray.exceptions import RayActorError

from aioengine import EngineConfig, EngineStatistics
from aioengine.ray_serve import application
from tests.support.engines import is_at_rest

OPTIONS = {"temperature": 0, "ignore_eos": True}
START_S = 90.0
"""Bounds the wait for a replica, which loads torch on a machine that others use too."""


@dataclass(frozen=True)
class Heard:
    """What a client heard: `texts` by events, a single one where nothing was streamed."""

    status: int
    texts: list[str] = field(default_factory=list)
    error: dict[str, Any] | None = None
    is_done: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Cluster:
    """The served model. `engines`: the handle to its replicas."""

    def __init__(self, port: int) -> None:
        self.engines = serve.get_deployment_handle("EngineReplica", "default")
        self._url = f"http://127.0.0.1:{port}/v1"
        self._controller: Any = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")

    def client(self) -> httpx.AsyncClient:
        """For any number of requests at once."""
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self._url, timeout=START_S, limits=limits)

    async def statistics(self) -> list[EngineStatistics]:
        """Of each replica that is in service, always in the same order."""
        return await self.engines.broadcast("statistics").results_async(timeout_s=START_S)

    async def at_rest(self, num_replicas: int = 2) -> list[EngineStatistics]:
        """The statistics, once so many replicas are in service and nothing is left in them."""
        async with asyncio.timeout(START_S):
            while True:
                with suppress(RayActorError):  # one that is dead, of which the handle has not heard
                    found = await self.statistics()
                    if len(found) == num_replicas and all(map(is_at_rest, found)):
                        return found
                await asyncio.sleep(0.05)

    async def busy(self) -> None:
        """Wait until a replica computes something."""
        async with asyncio.timeout(START_S):
            while not any([each.running for each in await self.statistics()]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def stopping(self) -> None:
        """Wait until a replica is on its way out."""
        async with asyncio.timeout(START_S):
            while "STOPPING" not in await self.states():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def states(self) -> dict[str, int]:
        """State -> the number of replicas in it."""
        status = await asyncio.to_thread(serve.status)
        states = status.applications["default"].deployments["EngineReplica"].replica_states
        return dict(states)

    def kill_one(self) -> None:
        """End the process of one replica at once, as a fault of its node would."""
        names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
        name = min(name for name in names if "#EngineReplica#" in name)
        ray.kill(ray.get_actor(name, namespace="serve"))

    async def scale(self, num_replicas: int) -> None:
        """Change how many replicas there should be, as an autoscaler does."""
        await self._controller.update_deployment_replicas.remote(
            self.engines.deployment_id, num_replicas
        )


async def ask(client: httpx.AsyncClient, content: Any, max_tokens: int) -> Heard:
    """One chat completion. `content`: of the user's message, or a whole conversation."""
    response = await client.post("/chat/completions", json=_body(content, max_tokens))
    body = response.json()
    if response.status_code != 200:
        return Heard(response.status_code, error=body["error"])
    return Heard(
        response.status_code,
        [body["choices"][0]["message"]["content"]],
        is_done=True,
        prompt_tokens=body["usage"]["prompt_tokens"],
        cached_tokens=body["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


async def hear(
    client: httpx.AsyncClient,
    content: Any,
    max_tokens: int,
    has_begun: asyncio.Semaphore | None = None,
) -> Heard:
    """The same, streamed. `has_begun` is released with the first event."""
    body = _body(content, max_tokens) | {"stream": True}
    async with client.stream("POST", "/chat/completions", json=body) as response:
        if response.status_code != 200:
            return Heard(response.status_code, error=json.loads(await response.aread())["error"])
        heard = Heard(response.status_code)
        async for event in events(response):
            if has_begun is not None:
                has_begun.release()
                has_begun = None
            if event == "[DONE]":
                return Heard(heard.status, heard.texts, is_done=True)
            value = json.loads(event)
            if "error" in value:
                heard = Heard(heard.status, heard.texts, error=value["error"])
            else:
                heard.texts.append(value["choices"][0]["delta"]["content"])
        return heard


async def events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of server-sent events."""
    async for line in response.aiter_lines():
        if line:
            yield line.removeprefix("data: ")


def _body(content: Any, max_tokens: int) -> dict[str, Any]:
    is_conversation = isinstance(content, list) and "role" in content[0]
    messages = content if is_conversation else [{"role": "user", "content": content}]
    return {"messages": messages, "max_tokens": max_tokens, **OPTIONS}


@contextmanager
def running_cluster(folder: Path, config: EngineConfig) -> Iterator[Cluster]:
    """Two replicas behind Serve's proxy; nothing of it is left at the end."""
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with (
        tempfile.TemporaryDirectory("-ray") as scratch,
        chdir(scratch),  # Ray puts the working folder on its workers' path
        patch.dict(os.environ, settings),  # and adds to the environment,
        _signal_handler_kept(signal.SIGTERM),  # and handles this one
    ):
        port = _free_port()
        try:
            ray.init(
                num_cpus=4,
                object_store_memory=100 << 20,
                include_dashboard=False,
                configure_logging=False,
                log_to_driver=False,
                _temp_dir=scratch,
                runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}},
            )
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            app = application(
                folder,
                config,
                engines={"num_replicas": 2, "max_ongoing_requests": 64},
                fronts={"ray_actor_options": {"num_cpus": 0.5}},
            )
            serve.run(app, external_scaler_enabled=True)
            yield Cluster(port)
        finally:
            serve.shutdown()
            ray.shutdown()


@contextmanager
def _signal_handler_kept(number: signal.Signals) -> Iterator[None]:
    handler = signal.getsignal(number)
    yield
    signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
