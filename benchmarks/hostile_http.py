"""A server among hostile clients: how its /health fares for others, and what memory it takes.

`aioengine serve` runs the demo model in a process of its own. Another process asks it for /health,
over a new connection each time: while nothing else happens ("quiet"), beside a client whose header
never ends, beside clients who connect and say nothing, and beside bodies of many megabytes that all
come at once. Of these, every other one stops short of its end, and the others are complete, and
come again. Times are the client's, in milliseconds; memory is the server's resident set, in MiB.

The bounds: /health within 50 ms at worst; memory at most 64 MiB above its start and the budget for
bodies, and within 64 MiB of the start 10 s later; no silent connection left after 12 s. Broken ones
are named, and the exit status is 1. All traffic stays on 127.0.0.1. Last line: JSON.

    python benchmarks/hostile_http.py [--seconds 6] [--connections 2000] [--bodies 20]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import http.client
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

MIB = 1 << 20
PING_EVERY_S = 0.01
PIECE = 1 << 18
HEADER_EVERY_S = 0.004
"""Between pieces of a header: 64 MiB a second."""
BUDGET_BYTES = 256 * MIB
MARGIN_BYTES = 64 * MIB
MOST_HEALTH_MS = 50.0
SILENT_S = 12.0
REST_S = 10.0


# ---- the server


class Server:
    """A child process that serves the demo model."""

    def __init__(self, model: Path) -> None:
        command = [sys.executable, "-m", "aioengine", "serve", str(model), "--port", "0"]
        command += ["--log-level", "error", "--max-bodies-bytes", str(BUDGET_BYTES)]
        self._child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"},
            text=True,
        )
        assert self._child.stdout is not None
        url = self._child.stdout.readline().split()[-1]
        self.port = int(url.removesuffix("/v1").rpartition(":")[2])

    def memory(self, field: str = "VmRSS") -> int:
        """Resident bytes now, or, as VmHWM, the most since `forget_peak`."""
        status = Path(f"/proc/{self._child.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith(field))
        return int(line.split()[1]) << 10

    def forget_peak(self) -> None:
        """Measure the peak from now on."""
        Path(f"/proc/{self._child.pid}/clear_refs").write_text("5")

    def stop(self) -> None:
        """End it."""
        self._child.send_signal(signal.SIGTERM)
        try:
            self._child.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.communicate()


# ---- those who ask


def ping(port: int) -> None:
    """Print how long each /health took, in milliseconds, until the parent closes stdin."""
    is_over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
    times = []
    while not is_over.is_set():
        begin = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        times.append((time.perf_counter() - begin) * 1e3)
        connection.close()
        assert answer.status == 200, answer.status
        time.sleep(PING_EVERY_S)
    print(json.dumps(times))


@contextmanager
def pinging(port: int) -> Iterator[dict[str, float]]:
    """The figures are there at the end."""
    figures: dict[str, float] = {}
    command = [sys.executable, __file__, "--role", "ping", "--port", str(port)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    time.sleep(0.3)  # until it is up
    try:
        yield figures
    finally:
        times = json.loads(child.communicate()[0])
        for quantile in (50, 99):
            figures[f"health_p{quantile}_ms"] = round(float(np.percentile(times, quantile)), 2)
        figures["health_max_ms"] = round(max(times), 2)
        figures["pings"] = len(times)


def ask(port: int, content: Any) -> int:
    """The status of a short chat."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


# ---- those who attack


async def endless_header(port: int, seconds: float) -> dict[str, Any]:
    """One header without an end; whoever is cut off begins again."""
    end, num_bytes, num_connections = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        num_connections += 1
        with suppress(ConnectionError):
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
            while time.monotonic() < end:
                writer.write(b"a" * PIECE)
                await writer.drain()
                num_bytes += PIECE
                await asyncio.sleep(HEADER_EVERY_S)
        writer.transport.abort()
    return {"sent_mib": num_bytes / MIB, "connections": num_connections}


async def silence(port: int, count: int) -> dict[str, Any]:
    """Connections on which nothing is said, for longer than a head may take."""
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    await asyncio.sleep(SILENT_S)
    left = [writer for reader, writer in opened if not reader.at_eof()]
    for _, writer in opened:
        writer.transport.abort()
    return {"connections": count, "connections_left": len(left)}


async def bodies(port: int, count: int, num_bytes: int, seconds: float) -> dict[str, Any]:
    """Bodies that come all at once: every other one stops short, the others come again."""
    begin = b'{"max_tokens": 1, "messages": [{"role": "user", "content": ['
    part, end = b'{"type": "image_url", "image_url": {"url": "data:image/png;base64,', b'"}}'
    item = part + base64.b64encode(os.urandom(num_bytes * 3 // 8 // 3 * 3)) + end
    body = begin + item + b", " + item + b"]}]}"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    statuses: dict[int, int] = {}
    until = time.monotonic() + seconds

    async def client(number: int) -> None:
        most = len(body) - (MIB if number % 2 else 0)
        while (left := until - time.monotonic()) > 0:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with suppress(ConnectionError, TimeoutError, asyncio.IncompleteReadError):
                async with asyncio.timeout(left):
                    status = await send(reader, writer, most)
                    statuses[status] = statuses.get(status, 0) + 1
            writer.transport.abort()
            if number % 2:  # the place is taken, or was not to be had
                return
            await asyncio.sleep(0.2)

    async def send(reader: Any, writer: Any, most: int) -> int:
        answer = asyncio.ensure_future(reader.readuntil(b"\r\n\r\n"))
        try:
            writer.write(head % len(body))
            for start in range(0, most, PIECE):
                if answer.done():
                    break
                writer.write(body[start : min(start + PIECE, most)])
                await writer.drain()
            return int((await answer).split()[1])
        finally:
            answer.cancel()

    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            tasks.create_task(client(number))
    return {"bodies_mib": len(body) / MIB, "statuses": dict(sorted(statuses.items()))}


# ---- all together


def attack(role: Callable[..., Coroutine[Any, Any, dict[str, Any]]], *arguments: Any) -> Any:
    """What an attack says of itself, run in a process of its own, as its work is not ours."""
    command = [sys.executable, __file__, "--role", role.__name__, "--arguments"]
    found = subprocess.run(
        [*command, json.dumps(arguments)], stdout=subprocess.PIPE, check=True, text=True
    )
    return json.loads(found.stdout)


def measure(server: Server, arguments: argparse.Namespace) -> dict[str, Any]:
    """The phases, one after another."""
    port, seconds = server.port, arguments.seconds
    phases: dict[str, Callable[[], Any]] = {
        "quiet": lambda: time.sleep(seconds),
        "endless_header": lambda: attack(endless_header, port, seconds),
        "silence": lambda: attack(silence, port, arguments.connections),
        "bodies": lambda: attack(bodies, port, arguments.bodies, arguments.body_mib * MIB, seconds),
    }
    result: dict[str, Any] = {}
    start = server.memory()
    for name, run in phases.items():
        server.forget_peak()
        with pinging(port) as figures:
            said = run() or {}
        if name == "bodies":
            time.sleep(REST_S)
        result[name] = {
            **said,
            **figures,
            "memory_start_mib": round(start / MIB, 1),
            "memory_peak_mib": round(server.memory("VmHWM") / MIB, 1),
            "memory_end_mib": round(server.memory() / MIB, 1),
        }
        print(name, result[name], flush=True)
    return result


def broken(result: dict[str, Any]) -> list[str]:
    """The bounds that do not hold, in words."""
    margin, found = MARGIN_BYTES / MIB, []
    for name, phase in result.items():
        if phase["health_max_ms"] > MOST_HEALTH_MS:
            found.append(f"{name}: /health took {phase['health_max_ms']} ms")
        budget = BUDGET_BYTES / MIB if name == "bodies" else 0
        for moment, most in (("peak", budget + margin), ("end", margin)):
            grown = phase[f"memory_{moment}_mib"] - phase["memory_start_mib"]
            if grown > most:
                found.append(f"{name}: {grown:.0f} MiB more than at the start at the {moment}")
    if result["silence"]["connections_left"]:
        found.append(f"{result['silence']['connections_left']} silent connections are left")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="of each phase")
    parser.add_argument("--connections", type=int, default=2000, help="that say nothing")
    parser.add_argument("--bodies", type=int, default=20, help="at once")
    parser.add_argument("--body-mib", type=int, default=58)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--role", default="", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--arguments", type=json.loads, default=[], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if arguments.role == "ping":
        ping(arguments.port)
        return
    for role in (endless_header, silence, bodies):
        if arguments.role == role.__name__:
            print(json.dumps(asyncio.run(role(*arguments.arguments))))
            return
    if arguments.model is None:
        from aioengine import demo_model

        arguments.model = demo_model()
    server = Server(arguments.model)
    try:
        for _ in range(3):
            assert ask(server.port, "Describe the picture.") == 200
        result = measure(server, arguments)
        assert ask(server.port, "Describe the picture.") == 200
    finally:
        server.stop()
    bounds = broken(result)
    for bound in bounds:
        print("BROKEN:", bound)
    print(json.dumps({"benchmark": "hostile_http", **result, "broken": bounds}))
    sys.exit(bool(bounds))


if __name__ == "__main__":
    main()
