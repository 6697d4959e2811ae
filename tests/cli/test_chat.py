"""`aioengine chat`: what is said, what is kept of it, and how an answer is stopped."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine, SamplingParams
from aioengine.cli import chat, main
from tests.cli.conftest import SIZES, Command, Expect
from tests.support.engines import running_engine

SHORT = (*SIZES, "--max-tokens", "8")
FIRST, SECOND = "What is in the picture?", "How many colours are there?"


def typed(*lines: object) -> str:
    return "".join(f"{line}\n" for line in lines)


def test_a_turn_follows_from_those_before(
    command: Command, expect: Expect, folder: Path, image_files: list[Path]
) -> None:
    lines = typed(f"/image {image_files[0]}", FIRST, "", SECOND)
    done = command("chat", folder, *SHORT, "--verbose", "--ignore-eos", stdin=lines)
    asked: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": image_files[0]},
                {"type": "text", "text": FIRST},
            ],
        }
    ]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    first = expect(folder, asked, params)
    asked += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": SECOND},
    ]
    second = expect(folder, asked, params)
    assert (done.status, done.out) == (0, f"{first.text}\n{second.text}\n")
    loaded, *summaries = done.err.splitlines()
    assert loaded.startswith("loaded in ")
    assert len(summaries) == 2
    assert f"{second.usage.prompt_tokens} prompt tokens (" in summaries[1]
    assert "(0 cached)" not in summaries[1], "the first turn's blocks are found"


def test_the_system_message_survives_clear(command: Command, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "said.json"
    lines = typed(FIRST, "/clear", SECOND, f"/save {file}", "/quit", "never asked")
    done = command("chat", folder, *SHORT, "--system", "Please describe.", stdin=lines)
    assert done.status == 0
    answer = done.out.splitlines()[1]
    assert json.loads(file.read_text()) == [
        {"role": "system", "content": "Please describe."},
        {"role": "user", "content": SECOND},
        {"role": "assistant", "content": answer},
    ]


def test_what_cannot_be_done_is_told_and_forgotten(
    command: Command, folder: Path, image_files: list[Path], tmp_path: Path
) -> None:
    bad, file = tmp_path / "bad.png", tmp_path / "said.json"
    bad.write_bytes(b"no image")
    lines = typed(
        "/nothing", "/image none.png", "/image ", f"/save {tmp_path}", "/help",
        f"/image {bad}", f"/audio {image_files[0]}", FIRST, f"/save {file}",
    )  # fmt: skip
    done = command("chat", folder, *SHORT, stdin=lines)
    assert done.status == 0
    told = done.out.splitlines()
    assert told[:3] == [
        "there is no /nothing; /help lists the commands",
        "there is no file 'none.png'",
        "name a file or a URL: /image FILE",
    ]
    assert told[3].startswith(f"'{tmp_path}' cannot be written: ")
    assert told[4:-3] == chat.HELP.splitlines()
    assert told[-3].startswith(f"{str(bad)[:80]} is not a usable image")
    assert told[-2].endswith(": the model takes no audio items")
    assert told[-1] == "The message is not part of the conversation."
    assert json.loads(file.read_text()) == []


def test_a_model_that_was_not_taught_to_chat(command: Command, plain_folder: Path) -> None:
    done = command("chat", plain_folder, *SHORT, stdin=typed(FIRST))
    assert (done.status, done.out) == (1, "")
    assert "no chat template" in done.err.splitlines()[-1]


class Interrupting(io.StringIO):
    """A terminal on which Ctrl-C is pressed when so many pieces of an answer were shown."""

    def __init__(self, *presses: int) -> None:
        super().__init__()
        self.num_pieces = 0
        self._presses = presses

    def write(self, text: str) -> int:
        self.num_pieces += 1
        if self.num_pieces in self._presses:
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C as a terminal's programs have it: a shell's background jobs are started without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_stops_the_answer_and_keeps_what_came(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, file = Interrupting(2), tmp_path / "said.json"
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed(FIRST, SECOND, f"/save {file}")))
    long = ("--max-tokens", "200", "--ignore-eos")
    assert main(["chat", str(folder), *SIZES, *long]) == 0
    _, stopped, _, whole = json.loads(file.read_text())
    assert 0 < len(stopped["content"]) < len(whole["content"])
    assert terminal.getvalue() == f"{stopped['content']} ...\n{whole['content']}\n"


async def test_an_answer_that_was_stopped_before_it_began(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise asyncio.CancelledError

    async with running_engine(folder) as engine:
        conversation = chat.Conversation(engine, Namespace(system=None, verbose=True))
        with monkeypatch.context() as patch:
            patch.setattr(AsyncEngine, "stream", stop)
            await conversation.answer(FIRST)
        assert conversation._messages == []
        await conversation.answer(SECOND)
        assert [message["role"] for message in conversation._messages] == ["user", "assistant"]
    assert capsys.readouterr().out.startswith(" ...\n")


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_twice_leaves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Interrupting(2, 3))
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed(FIRST, SECOND)))
    long = ("--max-tokens", "200", "--ignore-eos")
    assert main(["chat", str(folder), *SIZES, *long]) == 130


def test_ctrl_c_at_the_prompt_leaves(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(_: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", press)
    assert command("chat", folder, *SHORT).status == 0
