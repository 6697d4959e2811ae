"""The contenders' processes: how they are started, asked and ended."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NAMED_ERROR = re.compile(r"\b[A-Za-z_.]*(?:Error|Exception): .+")
MOST_REASON = 200


class ContenderError(Exception):
    """A contender could not do what it was asked to."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Whom to start, and how. `pythons` and `models` are by name."""

    names: list[str]
    pythons: dict[str, Path]
    models: dict[str, Path]
    dtype: str
    threads: int
    logs: Path
    environment: dict[str, str] = field(default_factory=dict)


class Worker:
    """A contender's process."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.loaded: dict[str, Any] = {}
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **settings.environment}
        environment.pop("PYTHONSAFEPATH", None)  # the workers import what lies beside them
        self._log = (settings.logs / f"{name}.log").open("a")
        self._log_begin = self._log.tell()
        self._process = subprocess.Popen(
            [str(settings.pythons[name]), str(HERE / f"{name}_worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            env=environment,
        )

    def ask(self, command: str, **job: Any) -> dict[str, Any]:
        """The answer to one question. Raises ContenderError for one that is an error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": command, **job}) + "\n")
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": "it ended"}
        if "error" in answer:
            raise ContenderError(f"{self.name}: {answer['error']} (see {self._log.name})")
        return answer

    def load(self, settings: Settings, kind: str) -> dict[str, Any]:
        name = "whisper" if kind == "whisper" and "whisper" in settings.models else self.name
        model = settings.models[name]
        job = {"model": str(model), "dtype": settings.dtype, "kind": kind}
        self.loaded = self.ask("load", **job, threads=settings.threads)
        return self.loaded

    def reason(self, error: object) -> str:
        """A line about why it failed: what its log named first, for an engine in processes of its
        own says no more than that these have ended."""
        log = Path(self._log.name).read_bytes()[self._log_begin :].decode(errors="replace")
        named = [found.group(0) for found in map(NAMED_ERROR.search, log.splitlines()) if found]
        causes = [line for line in named if "initialization failed" not in line]
        said = str(error).partition(": ")[2].partition(" (see ")[0]
        if causes and ("initialization failed" in said or said == "it ended"):
            said = causes[-1]
        return " ".join(said.split())[:MOST_REASON]

    def close(self) -> None:
        if self._process.poll() is None:
            try:
                self.ask("close")
                self._process.wait(timeout=30)
            except (ContenderError, subprocess.TimeoutExpired):
                self._process.kill()
        self._process.wait()
        self._log.close()


@contextmanager
def crew(
    names: list[str], settings: Settings, kind: str, failures: dict[str, str] | None = None
) -> Iterator[dict[str, Worker]]:
    """All of them, loaded one after the other.

    With `failures`, one that does not load is noted there with its reason, and the others go on.
    """
    workers: dict[str, Worker] = {}
    try:
        for name in names:
            workers[name] = Worker(name, settings)
            try:
                ready_s = workers[name].load(settings, kind)["ready_s"]
            except ContenderError as error:
                if failures is None:
                    raise
                worker = workers.pop(name)
                failures[name] = worker.reason(error)
                worker.close()
                print(f"  {name}: failed: {failures[name]}", file=sys.stderr)
                continue
            print(f"  {name}: ready after {ready_s:.1f} s", file=sys.stderr)
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


@contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Hold the lock file, by which those who share a machine take turns at measuring."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
