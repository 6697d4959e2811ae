"""OpenAI's client in this process (`engine.openai_client()`) beside the engine's own calls.

A question, once and 16 times at once, whole and streamed, and a conversation of many messages and
tools, by five in turn: the engine's own call, plain HTTP over the client's transport (nothing is
parsed), the client, the `openai` package's own class over the same transport, and the client over
an app that sends canned events, as many as there are tokens. Differences are medians over the
rounds: what the client adds to the engine is ours (HTTP over the engine) and the package's (the
client over HTTP). Wall time, and processor time of the event loop's thread, in milliseconds a
request, or a token of a stream. Last line: JSON.

    python benchmarks/in_process_client.py [--tokens 200] [--rounds 15] [--model FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import uvloop
from starlette.types import Receive, Scope, Send

from aioengine import AsyncEngine, SamplingParams, demo_model
from aioengine.asgi.app import client_app
from aioengine.asgi.in_process import URL, InProcessClient

PATH = f"{URL}/chat/completions"
QUESTION: list[Any] = [{"role": "user", "content": "Describe the picture."}]
CONVERSATION: list[Any] = [
    {"role": role, "content": f"Message {index} of a conversation."}
    for index in range(10)
    for role in ("user", "assistant")
] + QUESTION
CHUNK = {
    "id": "chatcmpl-0123456789abcdef0123456789abcdef",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "canned",
    "choices": [
        {"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}
    ],
}
WHOLE = {
    **CHUNK,
    "object": "chat.completion",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "A word.", "refusal": None},
            "finish_reason": "stop",
        }
    ],
}
Call = Callable[[], Awaitable[int]]
"""Returns how many pieces came: deltas, chunks or answers."""


def canned_app(num_events: int) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """An ASGI app that answers anything with canned events, or with a whole answer at once."""
    event = b"data: " + json.dumps(CHUNK).encode() + b"\n\n"

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body, is_complete = b"", False
        while not is_complete:
            message = await receive()
            body += message["body"]
            is_complete = not message["more_body"]
        is_streamed = json.loads(body).get("stream", False)
        kind = b"text/event-stream" if is_streamed else b"application/json"
        head = {"status": 200, "headers": [(b"content-type", kind)]}
        await send({"type": "http.response.start", **head})
        for _ in range(num_events if is_streamed else 0):
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(0)
        last = b"data: [DONE]\n\n" if is_streamed else json.dumps(WHOLE).encode()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    return app


def client_calls(client: openai.AsyncOpenAI, model: str, num_tokens: int) -> dict[str, Call]:
    """Kind -> one request of a client's."""
    common: dict[str, Any] = {"model": model, "temperature": 0}
    common["extra_body"] = {"ignore_eos": True}

    async def whole(messages: list[Any]) -> int:
        await client.chat.completions.create(**common, messages=messages, max_tokens=1)
        return 1

    async def streamed() -> int:
        stream = await client.chat.completions.create(
            **common, messages=QUESTION, max_tokens=num_tokens, stream=True
        )
        return len([chunk async for chunk in stream])

    return calls(whole, streamed)


def http_calls(client: InProcessClient, model: str, num_tokens: int) -> dict[str, Call]:
    """Kind -> the same request without the `openai` package's own work."""
    common: dict[str, Any] = {"model": model, "temperature": 0, "ignore_eos": True}

    async def whole(messages: list[Any]) -> int:
        body = {**common, "messages": messages, "max_tokens": 1}
        (await client.post(PATH, json=body)).raise_for_status()
        return 1

    async def streamed() -> int:
        body = {**common, "messages": QUESTION, "max_tokens": num_tokens, "stream": True}
        async with client.stream("POST", PATH, json=body) as response:
            return len([part async for part in response.aiter_bytes()])

    return calls(whole, streamed)


def engine_calls(engine: AsyncEngine, num_tokens: int) -> dict[str, Call]:
    """Kind -> the same request of the engine's own."""
    one, many = (
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        for count in (1, num_tokens)
    )

    async def whole(messages: list[Any]) -> int:
        await engine.generate(messages, one)
        return 1

    async def streamed() -> int:
        async with engine.stream(QUESTION, many) as stream:
            return len([delta async for delta in stream])

    return calls(whole, streamed)


def calls(whole: Callable[[list[Any]], Awaitable[int]], streamed: Call) -> dict[str, Call]:
    """Kind -> call."""
    return {
        "request": lambda: whole(QUESTION),
        "conversation": lambda: whole(CONVERSATION),
        "stream": streamed,
    }


async def timed(call: Call, at_once: int) -> tuple[float, float, int]:
    """Wall and thread time in milliseconds for all of them, and the pieces of one."""
    wall, cpu = time.perf_counter(), time.thread_time()
    counts = await asyncio.gather(*(call() for _ in range(at_once)))
    cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
    return wall * 1e3, cpu * 1e3, sum(counts) // at_once


async def compare(
    kind: str, sides: dict[str, dict[str, Call]], at_once: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Figures of one kind, after a round that is not counted.

    Each side's call comes behind another's: with the caches of a processor that has had other work,
    as an application's calls do.
    """
    rounds: list[dict[str, tuple[float, float, int]]] = []
    for index in range(arguments.rounds * (1 if kind == "stream" else 10) + 1):
        order = sorted(sides, reverse=index % 2 == 0)
        rounds.append({name: await timed(sides[name][kind], at_once) for name in order})
    del rounds[0]
    units = at_once * (arguments.tokens if kind == "stream" else 1)

    def median(clock: int, name: str, less: str | None = None) -> float:
        times = [each[name][clock] - (each[less][clock] if less else 0) for each in rounds]
        return round(statistics.median(times) / units, 4)

    found: dict[str, Any] = {"pieces": {name: rounds[-1][name][2] for name in sides}}
    for clock, title in enumerate(("wall_ms", "loop_cpu_ms")):
        found[title] = {
            "engine": median(clock, "engine"),
            "client": median(clock, "client"),
            "added": median(clock, "client", "engine"),
            "ours": median(clock, "http", "engine"),
            "package": median(clock, "client", "http"),
            "unmodified": median(clock, "unmodified", "engine"),
            "canned": median(clock, "canned"),
        }
    print(kind, at_once, found, flush=True)
    return found


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Kind and number of requests at once -> figures."""
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 1024}
    async with AsyncEngine.from_pretrained(arguments.model, **options) as engine:
        client = engine.openai_client()
        plain = InProcessClient(engine, client_app(engine))
        unmodified = openai.AsyncOpenAI(base_url=URL, api_key="none", http_client=plain)
        canned = client.with_options(
            http_client=InProcessClient(engine, canned_app(arguments.tokens))
        )
        name = engine.model_name
        sides = {
            "engine": engine_calls(engine, arguments.tokens),
            "client": client_calls(client, name, arguments.tokens),
            "unmodified": client_calls(unmodified, name, arguments.tokens),
            "http": http_calls(plain, name, arguments.tokens),
            "canned": client_calls(canned, name, arguments.tokens),
        }
        return {
            f"{kind}, {at_once} at once": await compare(kind, sides, at_once, arguments)
            for kind in ("request", "conversation", "stream")
            for at_once in (1, 16)
        }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", type=Path, default=demo_model())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
