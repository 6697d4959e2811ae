"""Who is asked what, in which order, and what is kept of the answers."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contenders import workloads
from contenders.crew import ContenderError, Settings, Worker, alone, crew

ONE_BY_ONE = "transformers, one by one"
NUM_ONE_BY_ONE = 2  # requests: its rate does not depend on how many there are
NUM_LAG_ONE_BY_ONE = 8  # its two threads are slow, and hinder the loop all the same
LAGGING = ("aioengine", "vllm", "transformers")  # the others have no asynchronous face
LISTENING = ("aioengine", "transformers")
MOST_STOLEN = 0.1  # of the processors' time: a measurement that lost more is taken again
MOST_TRIES = 3
PAUSE_S = 2.0  # after others: vLLM looks for work without pause for a second after its last
Measured = dict[str, list[dict[str, Any]]]


def stolen_s() -> float:
    """Seconds since the boot that each of our processors, on average, was given to other guests
    of this virtual machine's host while there was work here; 0 where the kernel does not tell."""
    try:
        rows = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    except OSError:
        return 0.0
    ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    return sum(int(row[8]) for row in rows if row[0] in ours) / len(ours) / os.sysconf("SC_CLK_TCK")


class Bench:
    """One run of the benchmark."""

    def __init__(self, settings: Settings, options: argparse.Namespace) -> None:
        self.settings = settings
        self.options = options
        self.versions: dict[str, str] = {}
        self.images = options.folder / "images"
        self.images.mkdir(exist_ok=True)

    def run(self, chosen: list[str]) -> Iterator[tuple[str, Measured]]:
        """The workloads, and what each contender answered in each round."""
        if "W3" in chosen:
            yield "W3", self.starts()
        loaded = [name for name in chosen if name in ("W1", "W2", "W4", "W5")]
        if loaded:
            with crew(self.settings.names, self.settings, "llava") as workers:
                self._note_versions(workers)
                if {"W1", "W2"} & set(loaded):
                    yield from self.batches(workers).items()
                if "W4" in loaded:
                    yield "W4", self.first_tokens(workers)
                if "W5" in loaded:
                    yield "W5", self.lags(workers)
        if "W6" in chosen:
            names = [name for name in LISTENING if name in self.settings.names]
            with crew(names, self.settings, "whisper") as workers:
                self._note_versions(workers)
                yield "W6", self.clips(workers)

    def _note_versions(self, workers: dict[str, Worker]) -> None:
        for worker in workers.values():
            self.versions |= worker.loaded["versions"]

    def _rounds(self, names: list[str]) -> Iterator[tuple[int, list[str]]]:
        """Round numbers (below 0: warm-ups), and who goes first: another one in each."""
        for number in range(-self.options.warm_ups, self.options.rounds):
            shift = number % len(names)
            yield number, names[shift:] + names[:shift]

    def _ask(self, into: Measured, number: int, entrant: str, worker: Worker, **job: Any) -> Any:
        """One measurement, or of up to three the one that lost least to the machine's host."""
        answers = []
        for _ in range(MOST_TRIES if number >= 0 else 1):
            with alone(self.options.lock):
                time.sleep(PAUSE_S)
                begin, stolen = time.monotonic(), stolen_s()
                answer = worker.ask(**job)
                taken, stolen = time.monotonic() - begin, stolen_s() - stolen
            answer["stolen"] = round(stolen / taken, 3)
            line = f"{taken:.1f} s, {answer['stolen']:.0%} stolen"
            print(f"  round {number} {entrant}: {line}", file=sys.stderr)
            answers.append(answer)
            if answer["stolen"] <= MOST_STOLEN:
                break
        best = min(answers, key=lambda answer: answer["stolen"])
        if number >= 0:
            into.setdefault(entrant, []).append(best)
        return best

    def batches(self, workers: dict[str, Worker]) -> dict[str, Measured]:
        """W1, and W2 behind it with the same requests."""
        found: dict[str, Measured] = {"W1": {}, "W2": {}}
        for number, order in self._rounds(list(workers)):
            requests = workloads.many_small(self.images, number, workloads.NUM_REQUESTS)
            for name in order:
                self._batch_pair(found, number, name, workers[name], requests)
        return found

    def _batch_pair(
        self,
        found: dict[str, Measured],
        number: int,
        name: str,
        worker: Worker,
        requests: list[dict[str, Any]],
    ) -> None:
        job: dict[str, Any] = {"command": "batch", "max_tokens": workloads.MAX_TOKENS}
        first = self._ask(found["W1"], number, name, worker, requests=requests, is_cold=True, **job)
        if name != "transformers":
            self._ask(found["W2"], number, name, worker, requests=requests, is_cold=False, **job)
            return
        if number >= 0:  # it keeps nothing: the same again is the same again
            found["W2"].setdefault(name, []).append(first)
        job |= {"requests": requests[:NUM_ONE_BY_ONE], "is_one_by_one": True}
        self._ask(found["W1"], number, ONE_BY_ONE, worker, **job)

    def first_tokens(self, workers: dict[str, Worker]) -> Measured:
        """W4: with one token to make, the whole time is that to the first."""
        found: Measured = {}
        for number, order in self._rounds(list(workers)):
            job: dict[str, Any] = {"requests": workloads.eight_large(self.images, number)}
            job |= {"command": "batch", "max_tokens": 1, "is_cold": True}
            for name in order:
                self._ask(found, number, name, workers[name], **job)
        return found

    def lags(self, workers: dict[str, Worker]) -> Measured:
        """W5, without warm-ups: a single slow request tells nothing of the loop."""
        found: Measured = {}
        names = [name for name in LAGGING if name in workers]
        for number, order in self._rounds(names):
            if number < 0:
                continue
            requests = workloads.many_large(self.images, number, 32)
            job = {"command": "lag", "streams": workloads.streams(), "max_tokens": 8}
            for name in order:
                some = requests[:NUM_LAG_ONE_BY_ONE] if name == "transformers" else requests
                self._ask(found, number, name, workers[name], **job, requests=some)
        return found

    def clips(self, workers: dict[str, Worker]) -> Measured:
        """W6."""
        found: Measured = {}
        paths = workloads.clips(self.options.folder, self.options.speech, workloads.NUM_REQUESTS)
        job = {"command": "clips", "paths": paths, "rate": workloads.RATE}
        job["max_tokens"] = workloads.CLIP_TOKENS
        for number, order in self._rounds(list(workers)):
            for name in order:
                self._ask(found, number, name, workers[name], **job)
                if name == "transformers":
                    self._ask(found, number, ONE_BY_ONE, workers[name], **job, is_one_by_one=True)
        return found

    def starts(self) -> Measured:
        """W3: a process of its own each time, its first token too."""
        found: Measured = {}
        request = {"text": workloads.prompt(0), "images": []}
        for number, order in self._rounds(self.settings.names):
            for name in order:
                with alone(self.options.lock):
                    worker = Worker(name, self.settings)
                    try:
                        answer = worker.load(self.settings, "llava")
                        self._first_token(worker, request, answer)
                    finally:
                        worker.close()
                print(f"  round {number} {name}: {answer['ready_s']:.1f} s", file=sys.stderr)
                if number >= 0:
                    found.setdefault(name, []).append(answer)
        return found

    @staticmethod
    def _first_token(worker: Worker, request: dict[str, Any], answer: dict[str, Any]) -> None:
        try:
            first = worker.ask("batch", requests=[request], max_tokens=1, is_cold=False)
            answer["first_token_s"] = answer["ready_s"] + first["seconds"]
        except ContenderError as error:
            print(f"  {error}", file=sys.stderr)
