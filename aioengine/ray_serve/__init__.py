"""Replicas of an engine behind Ray Serve (the extra `ray`): `serve.run(application(model))`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve

from aioengine import EngineConfig
from aioengine.ray_serve.affinity import Affinity, affinity_of_object
from aioengine.ray_serve.calls import Route
from aioengine.ray_serve.front import Front
from aioengine.ray_serve.replica import EngineReplica
from aioengine.ray_serve.router import AffinityRouter

__all__ = ["Affinity", "AffinityRouter", "Route", "affinity_of_object", "application"]

ROUTER = f"{AffinityRouter.__module__}.{AffinityRouter.__name__}"


def application(
    model: str | os.PathLike[str],
    config: EngineConfig | None = None,
    *,
    model_names: Sequence[str] = (),
    api_key: str | None = None,
    max_body_bytes: int = 64 << 20,
    body_timeout_s: float = 60.0,
    max_attempts: int = 3,
    stream_interval_s: float = 0.05,
    engines: Mapping[str, Any] | None = None,
    fronts: Mapping[str, Any] | None = None,
) -> serve.Application:
    """A Serve application with OpenAI's API below /v1.

    `model`: a hub id, or a folder that is on every node. A request whose replica is lost before it
    has begun to answer is made on others, `max_attempts` times in all. After its first event, a
    stream's events are passed on together every `stream_interval_s`, as each time costs Ray a
    message between processes. `engines` and `fronts`: options of the two deployments as
    `serve.deployment` takes them, such as `num_replicas`, `autoscaling_config` and
    `ray_actor_options`. Other arguments as in `aioengine.asgi.openai_app`.
    """
    config = config or EngineConfig()
    engine_options = {
        "max_ongoing_requests": 2 * config.max_num_seqs,  # the engine has its next ones at hand
        "health_check_period_s": 5.0,
        "graceful_shutdown_timeout_s": 300.0,
        "request_router_config": {"request_router_class": ROUTER},
        **(engines or {}),
    }
    front_options = {"max_ongoing_requests": 10_000, "graceful_shutdown_timeout_s": 300.0}
    replicas = serve.deployment(**engine_options)(EngineReplica).bind(
        model,
        config,
        model_names=model_names,
        api_key=api_key,
        max_body_bytes=max_body_bytes,
        stream_interval_s=stream_interval_s,
    )
    return serve.deployment(**{**front_options, **(fronts or {})})(Front).bind(
        replicas,
        max_body_bytes=max_body_bytes,
        body_timeout_s=body_timeout_s,
        max_attempts=max_attempts,
    )
