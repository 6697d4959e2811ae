"""The reference application as a process, and the servers that stand beside it."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))
OURS, LLAMA, SERVE, BATCHED = "aioengine", "llama.cpp", "transformers", "transformers-batched"
NUM_EXPENSES = 1500
MERCHANTS = ("Rossi", "Depot", "Hotel Post", "Kiosk", "Airline", "Bistro", "Paper Shop", "Garage")
CONTEXT = 16384
"""Tokens of KV that ours and llama.cpp have, for all users together."""
KV_BYTES = 360 << 20
"""The same of SmolLM2-135M, in bytes: 30 layers of 3 heads, keys and values of 64 each."""
TEMPLATE = "".join(
    (
        r"{% macro said(content) %}{% if content is string %}{{ content }}{% else %}",
        r"{% for part in content or [] %}{{ part.text or '<image>' }}{% endfor %}",
        r"{% endif %}{% endmacro %}",
        r"{{ '<|im_start|>system\n' + said(messages[0].content) }}",
        r"{{ '\n\nYou may call functions, each as\n<tool_call>\n' }}",
        r"""{{ '{"name": "function", "arguments": {"key": "value"}}\n</tool_call>\n' }}""",
        r"{{ 'The functions:\n' }}{% for tool in tools or [] %}{{ (tool | tojson) + '\n' }}",
        r"{% endfor %}",
        r"{{ '<|im_end|>\n' }}{% for message in messages %}{% if message.role == 'tool' %}",
        r"{{ '<|im_start|>user\n<tool_response>\n' + said(message.content) }}",
        r"{{ '\n</tool_response><|im_end|>\n' }}{% elif message.role != 'system' %}",
        r"{{ '<|im_start|>' + message.role + '\n' + said(message.content) }}",
        r"{% for call in message.tool_calls or [] %}",
        r"""{{ '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}""",
        r"{% if call.function.arguments is string %}{{ call.function.arguments }}",
        r"{% else %}{{ call.function.arguments | tojson }}{% endif %}{{ '}\n</tool_call>' }}",
        r"{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}",
        r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    )
)
"""Of conversations that begin with a system message, with tools."""


def say(messages: Sequence[dict[str, Any]], tools: Sequence[Any]) -> dict[str, Any]:
    """The answer of a turn, whatever the model has written."""
    turn = sum(message["role"] == "assistant" for message in messages)
    number = len(messages[1]["content"])
    merchant = MERCHANTS[number % len(MERCHANTS)]
    name, arguments = "file_expense", {"merchant": "Old", "cents": 1250, "category": "other"}
    if tools[0]["function"]["name"] == name:
        arguments["day"] = "2020-01-01"  # no question sees it
    elif turn == 0:
        name, arguments = "search_expenses", {"merchant": merchant, "limit": 3}
    elif turn == 1:
        name, arguments = "total_by_category", {"first": "2026-01-01", "last": "2026-12-31"}
    else:
        return {"role": "assistant", "content": "That is all."}
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": f"call{turn:05}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


class Rehearsed:
    """A backend whose answers are made and streamed, and then replaced by written ones."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.counts: Counter[str] = Counter()

    async def stream(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Any], must_call: str | None
    ) -> AsyncGenerator[Any, None]:
        from reference_app.backends import Reply

        async with aclosing(self._backend.stream(messages, tools, None)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Reply):
                    self.counts["turns"] += 1
                    self.counts["prompt_tokens"] += piece.prompt_tokens
                    self.counts["completion_tokens"] += piece.completion_tokens
                else:
                    yield piece
        yield Reply(say(messages, tools))


def serve(port: int) -> None:
    """Run the application, with its counts of tokens beside it."""
    import uvicorn
    from reference_app.app import create_app
    from reference_app.backends import open_backend
    from reference_app.models import Settings

    settings = Settings.from_environment()
    rehearsed: list[Rehearsed] = []

    @asynccontextmanager
    async def opened() -> AsyncIterator[Rehearsed]:
        async with open_backend(settings) as backend:
            rehearsed.append(Rehearsed(backend))
            yield rehearsed[0]

    app = create_app(settings, opened())

    @app.get("/counts")
    async def counts() -> dict[str, int]:
        return dict(rehearsed[0].counts)

    uvicorn.run(app, port=port, log_level="warning", access_log=False)


def seed(path: Path) -> None:
    """Fill a database with expenses of one year."""
    from reference_app.database import SCHEMA

    chance = random.Random(0)
    rows = [
        (
            chance.choice(MERCHANTS),
            chance.randrange(100, 50_000),
            chance.choice(("travel", "meals", "office", "other")),
            f"2026-{chance.randrange(1, 13):02}-{chance.randrange(1, 29):02}",
        )
        for _ in range(NUM_EXPENSES)
    ]
    with sqlite3.connect(path) as connection:
        connection.executescript(SCHEMA)
        connection.executemany(
            "INSERT INTO expenses (merchant, cents, category, day) VALUES (?, ?, ?, ?)", rows
        )
    connection.close()


@dataclass(frozen=True)
class Contender:
    """How the application reaches its model, and the command of the server beside it, if any."""

    name: str
    settings: dict[str, Any]
    command: list[str] = field(default_factory=list)


def contender_of(name: str, model: Path, port: int, options: argparse.Namespace) -> Contender:
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": options.tokens}
    base = {"model": str(model), "sampling": sampling, "sees_images": options.sees_images}
    if name == OURS:
        sampling["ignore_eos"] = True
        engine = {"dtype": "bfloat16", "kv_cache_bytes": KV_BYTES}
        return Contender(name, {**base, "engine": engine})
    if name == LLAMA:
        sampling |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        command = [options.llama / "llama-server", "-m", options.gguf, "-t", options.threads]
        command += [
            "-np",
            options.most_users,
            "-c",
            CONTEXT,
            "--port",
            port,
            "--jinja",
            "--no-webui",
        ]
        command += ["--chat-template-file", model / "chat_template.jinja"]
        if options.sees_images:
            command += ["--mmproj", options.mmproj]
    else:  # its copy of the model has no end-of-sequence token
        command = [sys.executable, "-m", "transformers.cli.transformers", "serve", model]
        command += ["--dtype", "bfloat16", "--port", port]
        if name == BATCHED:
            blocks = ["--cb-block-size", 32, "--cb-num-blocks", CONTEXT // 32]
            command += ["--continuous-batching", *blocks]
    settings = {**base, "backend": "http", "url": f"http://127.0.0.1:{port}/v1"}
    return Contender(name, settings, [str(word) for word in command])


def prepare(source: Path, work: Path) -> tuple[Path, Path]:
    """A copy of the model with `TEMPLATE`, and one that never ends by itself."""
    made = work / "model"
    shutil.copytree(source, made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    endless = work / "endless"
    shutil.copytree(made, endless)
    for name in ("config.json", "generation_config.json"):
        read = json.loads((endless / name).read_text())
        (endless / name).write_text(json.dumps({**read, "eos_token_id": None}))
    return made, endless


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


@contextmanager
def running(contender: Contender, app_port: int, work: Path) -> Iterator[list[int]]:
    """Process ids of the application and its server; both end with the block."""
    data = work / f"data-{app_port}"
    data.mkdir()
    seed(data / "desk.sqlite")
    given = {**contender.settings, "data": str(data), "report_every_s": 1}
    desk = {
        f"DESK_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
        for name, value in given.items()
    }
    words = [sys.executable, sys.argv[0], "--role", "app", "--port", str(app_port)]
    log = (work / f"{contender.name}.log").open("a")
    children = []
    try:
        # `transformers serve` lists the hub's cache, which has to be there.
        environment = {**os.environ, **desk, "HF_HUB_CACHE": str(data)}
        for command in filter(None, (contender.command, words)):
            child = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            children.append(child)
        yield [child.pid for child in children]
    finally:
        for child in children:
            child.send_signal(signal.SIGINT)
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(15)
            child.kill()
            child.wait()
        log.close()


def family(pids: list[int]) -> list[int]:
    """The processes and all that they have started."""
    found = list(pids)
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            found += family([int(child) for child in task.read_text().split()])
    return found


def memory_mb(pids: list[int]) -> float:
    """Proportional set size of the processes and their children, in MiB."""
    found = 0
    for pid in family(pids):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        found += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return found / 1024


def cpu_s(pids: list[int]) -> float:
    """Seconds of processors that the processes and their children have used."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2] for pid in family(pids)]
    ticks = sum(int(field) for stat in stats for field in stat.split()[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")


def num_lines() -> dict[str, int]:
    """Lines of the application for each kind of backend, without empty ones."""
    from reference_app import backends

    def count(*objects: Any) -> int:
        texts = "\n".join(inspect.getsource(each) for each in objects)
        return sum(bool(line.strip()) for line in texts.splitlines())

    http = count(backends.OverHttp, backends._add_part)
    return {"in_process": count(backends.InProcess), "over_http": http}
