"""What routing by prefix and media saves: two replicas behind aioengine's router and Serve's own.

Both applications run at once on a local Ray cluster, and take turns at the same conversations. Each
begins with one of a few images or long system prompts, goes on with a text of its own, and has
several turns, with pauses between them. Caches are empty before each round. Counted: prompt tokens
that the prefix cache had, media items that the encoder ran, and how long answers took. Last line:
JSON, medians over rounds.

    python benchmarks/ray_routing.py [--kv-cache-mib 8] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import os
import random
import socket
import statistics
import tempfile
import time
from typing import Any

import httpx
import numpy as np
import ray
from PIL import Image
from ray import serve

from aioengine import EngineConfig, demo_model
from aioengine.ray_serve import application

QUESTIONS = ("What is in the picture?", "And what else?", "Which of it is the largest?", "Why?")
SERVES_OWN = "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter"


def beginnings(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A first message for each conversation: images, and rules that are long."""
    found: list[dict[str, Any]] = []
    for number in range(options.beginnings):
        if number % 2:
            rules = " ".join(f"Rule {number}.{i}: be brief and be clear." for i in range(40))
            found.append({"role": "system", "content": rules})
        else:
            pixels = np.random.default_rng(number).integers(0, 256, (240, 320, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "JPEG")
            url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
            part = {"type": "image_url", "image_url": {"url": url}}
            found.append({"role": "user", "content": [part]})
    return found


async def converse(
    client: httpx.AsyncClient, begin: dict[str, Any], number: int, options: argparse.Namespace
) -> list[float]:
    """One conversation; the seconds that each answer took."""
    own = " ".join(f"Guest {number} saw bird {i * number} in year {i}." for i in range(30))
    messages = [begin, {"role": "user", "content": f"{own} {QUESTIONS[0]}"}]
    took: list[float] = []
    chance = random.Random(number)
    for turn in range(options.turns):
        await asyncio.sleep(chance.uniform(0, 2 * options.pause_s))
        body = {"messages": messages, "temperature": 0, "max_tokens": options.max_tokens}
        start = time.perf_counter()
        response = await client.post("/chat/completions", json={**body, "ignore_eos": True})
        took.append(time.perf_counter() - start)
        answer = response.raise_for_status().json()["choices"][0]["message"]["content"]
        question = QUESTIONS[(turn + 1) % len(QUESTIONS)]
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": question},
        ]
    return took


async def one_round(
    url: str, name: str, options: argparse.Namespace, seed: int
) -> dict[str, float]:
    """All conversations with one application, whose caches are empty at first."""
    engines = serve.get_deployment_handle("EngineReplica", name)
    await engines.broadcast("reset_caches").results_async(timeout_s=60)
    before = await engines.broadcast("statistics").results_async(timeout_s=60)
    todo = beginnings(options) * options.conversations
    random.Random(seed).shuffle(todo)
    gate = asyncio.Semaphore(options.concurrency)

    async def one(number: int, begin: dict[str, Any]) -> list[float]:
        async with gate:
            return await converse(client, begin, number, options)

    start = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        took = await asyncio.gather(*(one(number, begin) for number, begin in enumerate(todo)))
    wall_s = time.perf_counter() - start
    after = await engines.broadcast("statistics").results_async(timeout_s=60)

    def gained(counter: str) -> list[int]:
        pairs = zip(before, after, strict=True)
        return [getattr(new, counter) - getattr(old, counter) for old, new in pairs]

    requests = gained("finished")
    return {
        "prefix_hit_share": sum(gained("prefix_hit_tokens")) / sum(gained("prefix_query_tokens")),
        "encoder_items_run": sum(gained("encoder_items_run")),
        "answer_p50_s": statistics.median(itertools.chain.from_iterable(took)),
        "requests_per_s": sum(requests) / wall_s,
        "busiest_replica_share": max(requests) / sum(requests),
    }


def deploy(options: argparse.Namespace) -> None:
    """The two applications, which differ in their router."""
    size = options.kv_cache_mib
    config = EngineConfig(device="cpu", kv_cache_bytes=None if size is None else size << 20)
    for name in ("affinity", "own"):
        engines: dict[str, Any] = {"num_replicas": 2}
        if name == "own":
            engines["request_router_config"] = {"request_router_class": SERVES_OWN}
        app = application(demo_model(), config, engines=engines)
        serve.run(app, name=name, route_prefix=f"/{name}")


async def measure(options: argparse.Namespace, port: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {"affinity": [], "own": []}
    for index in range(options.rounds):
        for name, rounds in sorted(found.items(), reverse=index % 2 == 1):
            url = f"http://127.0.0.1:{port}/{name}/v1"
            rounds.append(await one_round(url, name, options, index))
            shown = {key: round(value, 3) for key, value in rounds[-1].items()}
            print(f"round {index}, {name}: {shown}")
    return {
        name: {key: round(statistics.median(each[key] for each in rounds), 4) for key in rounds[0]}
        for name, rounds in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--beginnings", type=int, default=12)
    parser.add_argument("--conversations", type=int, default=4, help="for each beginning")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=24, help="conversations at a time")
    parser.add_argument("--pause-s", type=float, default=1.0, help="before each turn, on average")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument(
        "--kv-cache-mib", type=int, help="of each replica; its own choice if absent"
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as elsewhere:
        os.chdir(elsewhere)  # Ray puts the working folder on its workers' path
        ray.init(
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=200 << 20,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}},
        )
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        deploy(options)
        medians = asyncio.run(measure(options, port))
        serve.shutdown()
        ray.shutdown()
    print(json.dumps({**vars(options), **medians}))


if __name__ == "__main__":
    main()
