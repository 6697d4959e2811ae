"""A web service under load: its answers, and how its own /ping fares meanwhile.

One process serves a Starlette application under uvicorn, on one torch thread: /ping, and
/v1/chat/completions by (engine) aioengine's app mounted in it; (thread) transformers' `generate` in
a worker thread, one call at a time, streaming; (coroutine) `generate` called in the handler, as is
often seen. A second process asks: chats arrive at random (Poisson), half of them with an image of
their own, all streaming. A third asks for /ping every 20 ms over one connection and does nothing
else. The schedule is the same for all. Times are the client's, in milliseconds; /ping is measured
before the load too ("idle"), as other work on the machine delays it as well. Last line: JSON.

    python benchmarks/serve.py [--requests 200] [--rate 6] [--max-tokens 32]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import http.client
import io
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from PIL import Image

MODES = ("engine", "thread", "coroutine")
PING_EVERY_S = 0.02
SIZE = (640, 480)
QUESTION = "Describe the picture."


# ---- the server


def serve(mode: str, model: Path, port: int) -> None:
    """Serve until the parent ends the process."""
    import torch
    import uvicorn
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Mount, Route

    torch.set_num_threads(1)

    async def ping(_request: Any) -> PlainTextResponse:
        return PlainTextResponse("pong")

    routes: list[Any] = [Route("/ping", ping)]
    if mode == "engine":
        from aioengine import AsyncEngine
        from aioengine.asgi import openai_app

        engine = AsyncEngine.from_pretrained(model)
        routes.append(Mount("/v1", openai_app(engine)))
    else:
        generate = Generate(model)
        answer = generate.streamed if mode == "thread" else generate.inline
        routes.append(Route("/v1/chat/completions", answer, methods=["POST"]))

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        if mode == "engine":
            async with engine:
                yield
        else:
            gc.freeze()
            yield

    app = Starlette(routes=routes, lifespan=lifespan)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", loop="uvloop")


class Generate:
    """transformers' own, behind the same kind of stream."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoProcessor, LlavaForConditionalGeneration

        self.processor = AutoProcessor.from_pretrained(model)
        self.model = LlavaForConditionalGeneration.from_pretrained(model).eval()
        self.lock = threading.Lock()
        self.torch = torch

    def run(self, body: dict[str, Any], streamer: Any = None) -> str:
        """One answer, blocking; `streamer` gets its pieces."""
        images = []
        messages = []
        for message in body["messages"]:
            parts = []
            for part in message["content"]:
                if part["type"] == "image_url":
                    data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
                    images.append(Image.open(io.BytesIO(data)).convert("RGB"))
                    parts.append({"type": "image"})
                else:
                    parts.append(part)
            messages.append({"role": message["role"], "content": parts})
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True)
        inputs = self.processor(text=text, images=images or None, return_tensors="pt")
        with self.torch.inference_mode():
            tokens = self.model.generate(
                **inputs,
                max_new_tokens=body["max_tokens"],
                min_new_tokens=body["max_tokens"],
                do_sample=False,
                streamer=streamer,
            )
        length = inputs["input_ids"].shape[1]
        return str(self.processor.tokenizer.decode(tokens[0, length:], skip_special_tokens=True))

    async def streamed(self, request: Any) -> Any:
        """In a thread, one at a time: two at once only get in each other's way."""
        from starlette.responses import StreamingResponse
        from transformers import AsyncTextIteratorStreamer

        body = await request.json()
        streamer = AsyncTextIteratorStreamer(self.processor.tokenizer, skip_prompt=True)

        def work() -> None:
            with self.lock:
                self.run(body, streamer)

        async def events() -> AsyncIterator[str]:
            task = asyncio.create_task(asyncio.to_thread(work))
            async for piece in streamer:
                yield _event(piece)
            await task
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def inline(self, request: Any) -> Any:
        """In the handler itself."""
        from starlette.responses import Response

        text = self.run(await request.json())
        return Response(_event(text) + "data: [DONE]\n\n", media_type="text/event-stream")


def _event(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n"


# ---- those who ask


def ping(port: int) -> None:
    """Print how long each /ping took, in milliseconds, until the parent closes stdin."""
    is_over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
    connection = http.client.HTTPConnection("127.0.0.1", port)
    times = []
    while not is_over.is_set():
        begin = time.perf_counter()
        connection.request("GET", "/ping")
        connection.getresponse().read()
        times.append((time.perf_counter() - begin) * 1e3)
        time.sleep(PING_EVERY_S)
    print(json.dumps(times))


@contextmanager
def pinging(port: int) -> Iterator[list[float]]:
    """The list is filled at the end."""
    times: list[float] = []
    command = [sys.executable, __file__, "--role", "ping", "--port", str(port)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield times
    finally:
        times += json.loads(child.communicate()[0])


def make_image(seed: int) -> str:
    """A JPEG with a photograph's worth of detail, as a `data:` URL."""
    small = np.random.default_rng(seed).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(small).resize(SIZE, Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def make_bodies(count: int, max_tokens: int) -> list[bytes]:
    """Every other one with an image."""
    bodies = []
    for number in range(count):
        content: list[dict[str, Any]] = [{"type": "text", "text": f"{number}: {QUESTION}"}]
        if number % 2:
            content.insert(0, {"type": "image_url", "image_url": {"url": make_image(number)}})
        body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        bodies.append(json.dumps(body).encode())
    return bodies


async def ask(session: aiohttp.ClientSession, body: bytes) -> tuple[float, list[float], float]:
    """Time to first token, the gaps between tokens, and the whole; in milliseconds."""
    begin = before = time.perf_counter()
    first, gaps = 0.0, []
    headers = {"content-type": "application/json"}
    async with session.post("/v1/chat/completions", data=body, headers=headers) as response:
        response.raise_for_status()
        async for line in response.content:
            if b'"content"' not in line or b'"content":""' in line:
                continue
            now = time.perf_counter()
            if first:
                gaps.append((now - before) * 1e3)
            else:
                first = (now - begin) * 1e3
            before = now
    return first, gaps, (time.perf_counter() - begin) * 1e3


async def load(port: int, bodies: list[bytes], rate: float) -> dict[str, float]:
    """Send the bodies at random moments, and sum up."""
    chance = random.Random(0)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{port}", connector=connector, timeout=timeout
    ) as session:
        begin = time.perf_counter()
        tasks = []
        due = begin
        for body in bodies:
            due += chance.expovariate(rate)
            await asyncio.sleep(due - time.perf_counter())
            tasks.append(asyncio.create_task(ask(session, body)))
        answers = await asyncio.gather(*tasks)
        took = time.perf_counter() - begin
    firsts = [answer[0] for answer in answers]
    gaps = [gap for answer in answers for gap in answer[1]]
    return {
        "requests": len(bodies),
        "seconds": round(took, 1),
        "requests_per_s": round(len(bodies) / took, 2),
        **_quantiles("ttft", firsts),
        **_quantiles("itl", gaps),
        **_quantiles("whole", [answer[2] for answer in answers]),
    }


def _quantiles(name: str, values: list[float]) -> dict[str, float]:
    if not values:  # an answer that comes all at once has no gaps
        return {}
    return {
        f"{name}_p50_ms": round(float(np.percentile(values, 50)), 2),
        f"{name}_p99_ms": round(float(np.percentile(values, 99)), 2),
    }


@contextmanager
def served(mode: str, model: Path) -> Iterator[int]:
    """The port of a server of this kind, which is up."""
    port = _free_port()
    command = [sys.executable, __file__, "--role", "server", "--mode", mode]
    command += ["--port", str(port), "--model", str(model)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    child = subprocess.Popen(command, env=environment)
    try:
        while True:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
                connection.request("GET", "/ping")
                connection.getresponse().read()
                break
            except OSError:
                assert child.poll() is None, "the server has ended"
                time.sleep(0.05)
        yield port
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _free_port() -> int:
    import socket

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def measure(mode: str, bodies: list[bytes], arguments: argparse.Namespace) -> dict[str, Any]:
    with served(mode, arguments.model) as port:
        asyncio.run(load(port, make_bodies(4, 4), 100.0))  # warm
        with pinging(port) as idle:
            time.sleep(3)
        with pinging(port) as busy:
            result = asyncio.run(load(port, bodies, arguments.rate))
    pings = _quantiles("ping_idle", idle) | _quantiles("ping", busy)
    return {**result, **pings, "ping_max_ms": round(max(busy), 2), "pings": len(busy)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=6.0, help="arrivals a second")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--role", choices=("client", "server", "ping"), default="client")
    parser.add_argument("--mode", choices=MODES, default="engine", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.model is None:
        from aioengine import demo_model

        arguments.model = demo_model()
    if arguments.role == "server":
        serve(arguments.mode, arguments.model, arguments.port)
        return
    if arguments.role == "ping":
        ping(arguments.port)
        return
    bodies = make_bodies(arguments.requests, arguments.max_tokens)
    result: dict[str, Any] = {"benchmark": "serve", "rate": arguments.rate}
    for mode in arguments.modes:
        result[mode] = measure(mode, bodies, arguments)
        print(mode, result[mode], flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
