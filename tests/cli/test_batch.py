"""`aioengine batch`: each line is answered once, in both forms, also after a kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from aioengine import SamplingParams
from aioengine.cli import batch, batch_lines
from tests.cli.conftest import SIZES, Command, Expect
from tests.support.grids import rest_is_slow

SHORT = (*SIZES, "--max-tokens", "6", "--ignore-eos")


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def images(tmp_path: Path, image_files: list[Path]) -> list[str]:
    """Names of image files that lie beside the lines."""
    for file in image_files:
        shutil.copy(file, tmp_path)
    return [file.name for file in image_files]


def test_each_line_has_its_answer(
    command: Command, expect: Expect, folder: Path, tmp_path: Path, images: list[str]
) -> None:
    lines = [
        {"prompt": "What is this?", "images": [images[0]], "custom_id": "first"},
        "What else?",
        {"prompt": "And these?", "images": images, "max_tokens": 3},
        {"messages": [{"role": "user", "content": "Please describe."}]},
        {"prompt": [5, 6, 7], "custom_id": 4},
        {"prompt": "One", "images": images[1]},
    ]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    done = command("batch", folder, source, target, *SHORT)
    assert (done.status, done.out) == (0, "")
    loaded, summary = done.err.splitlines()
    assert loaded.startswith("loaded in ") and summary.startswith("6 lines in ")

    def message(text: str, names: list[str]) -> list[dict[str, Any]]:
        parts = [{"type": "image", "image": tmp_path / name} for name in names]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]

    def params(num_tokens: int = 6) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)

    expected = [
        expect(folder, message("What is this?", images[:1]), params()),
        expect(folder, message("What else?", []), params()),
        expect(folder, message("And these?", images), params(3)),
        expect(folder, message("Please describe.", []), params()),
        expect(folder, [5, 6, 7], params()),
        expect(folder, message("One", images[1:2]), params()),
    ]
    answers = read(target)
    assert [answer["text"] for answer in answers] == [output.text for output in expected]
    assert [answer.get("custom_id") for answer in answers] == ["first", None, None, None, 4, None]
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [
        output.usage.prompt_tokens for output in expected
    ]
    again = command("batch", folder, source, target, *SHORT)
    assert again.err == "all 6 lines are answered\n"
    assert read(target) == answers


@pytest.mark.parametrize("place", ["IN", "OUT"])
def test_it_reads_and_writes_files(
    command: Command, folder: Path, tmp_path: Path, place: str
) -> None:
    source = write(tmp_path / "in.jsonl", ["a"])
    names = ("-", tmp_path / "out.jsonl") if place == "IN" else (source, "-")
    done = command("batch", folder, *names)
    assert done.status == 1 and f"{place} must be a file" in done.err and "goes on" in done.err


def test_what_cannot_be_answered_has_its_error(
    command: Command, folder: Path, tmp_path: Path, image_files: list[Path]
) -> None:
    (tmp_path / "link.png").symlink_to(image_files[0])
    lines = [
        {"prompt": "a", "temprature": 1},
        {"prompt": "a", "temperature": -1},
        {"prompt": "a", "images": ["missing.png"]},
        {"prompt": "a", "images": [str(image_files[0])]},
        {"prompt": "a", "images": ["link.png"]},
        {"prompt": "a", "images": [5]},
        {"prompt": "a", "images": ["x" * 5000]},
        {"prompt": "a", "images": ["~nouser/x.png"]},
        {"prompt": "a", "images": ["a\0b"]},
        {"prompt": "a", "logit_bias": {"x": 1}},
        {"prompt": "a", "messages": []},
        {"custom_id": "x"},
        {"prompt": "a", "structured_outputs": {"yaml": 1}},
        {"prompt": "a", "images": ["http://a.example/x.png"], "custom_id": "\ud800"},
        {"messages": "a", "custom_id": None},
        {"prompt": "a", "custom_id": [1]},
        [1, 2],
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "/etc/hosts"}]}]},
        {"prompt": "a"},
    ]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    source.write_bytes(source.read_bytes() + b"\n  \n{half\n\xff\n" + b"[" * 100_000 + b"\n")
    done = command("batch", folder, source, target, *SHORT)
    assert done.status == 0 and "22 lines in " in done.err and "21 with an error" in done.err
    answers = read(target)
    assert [answer.get("error", {}).get("parameter") for answer in answers] == [
        *("temprature", "temperature", *["images[0]"] * 7, "logit_bias"),
        *("prompt", "prompt", "structured_outputs.yaml", "images[0]", "messages", "custom_id"),
        *("line", "messages[0].content[0]", None, "line", "line", "line"),
    ]
    numbers = [int(answer["id"].split("-")[1]) for answer in answers]
    assert numbers == [*range(1, 20), 22, 23, 24]  # as an editor counts them
    assert "missing.png" in answers[2]["error"]["message"]
    assert "--local-roots" in answers[3]["error"]["message"]
    assert "--allowed-hosts" in answers[13]["error"]["message"]
    assert answers[13]["custom_id"] == "\ud800" and "custom_id" not in answers[15]
    assert "line 1 column" in answers[19]["error"]["message"]
    allowed = command(
        *("batch", folder, source, tmp_path / "second.jsonl", *SHORT),
        *("--local-roots", image_files[0].parent),
    )
    assert allowed.status == 0
    second = read(tmp_path / "second.jsonl")
    assert second[3]["text"] == second[4]["text"] != answers[18]["text"]


def test_lines_of_openai(
    command: Command, expect: Expect, folder: Path, tmp_path: Path, images: list[str]
) -> None:
    url = (tmp_path / images[0]).as_uri()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    chat = {"model": "any", "messages": [{"role": "user", "content": parts}]}
    sampling = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions"},
        {"custom_id": "c", "method": "POST", "url": "/v1/completions"},
        {"custom_id": "d", "method": "POST", "url": "/v1/embeddings", "body": {}},
        {"custom_id": "e", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}},
    ]
    lines[0]["body"] = chat | sampling
    lines[1]["body"] = {"prompt": "tell me", "n": 2, "logprobs": 1} | sampling
    lines[2]["body"] = {"prompt": "tell me", "max_tokens": -1}
    lines[4]["body"]["stream"] = True  # type: ignore[index]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    done = command("batch", folder, source, target, *SIZES)
    assert done.status == 0 and "3 with an error" in done.err
    answers = read(target)
    assert [answer["custom_id"] for answer in answers] == list("abcde")
    assert [answer["response"]["status_code"] for answer in answers] == [200, 200, 400, 400, 400]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    content = [{"type": "image", "image": tmp_path / images[0]}, parts[1]]
    output = expect(folder, [{"role": "user", "content": content}], params)
    (choice,) = answers[0]["response"]["body"]["choices"]
    assert choice["message"]["content"] == output.text
    body = answers[1]["response"]["body"]
    assert [choice["text"] for choice in body["choices"]] == 2 * [
        expect(folder, "tell me", params).text
    ]
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 5
    assert answers[2]["response"]["body"]["error"]["param"] == "max_tokens"


def test_answers_as_they_come(command: Command, folder: Path, tmp_path: Path) -> None:
    lines = [{"prompt": f"number {i}", "max_tokens": 40 if i == 0 else 2} for i in range(8)]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command("batch", folder, source, tmp_path / "ordered.jsonl", *SHORT)
    command("batch", folder, source, target, *SHORT, "--as-completed")
    ordered, found = read(tmp_path / "ordered.jsonl"), read(target)
    assert found != ordered and found[0]["id"] != ordered[0]["id"]
    key = lambda answer: int(answer["id"].split("-")[1])  # noqa: E731
    assert sorted(found, key=key) == ordered


def test_half_a_line_is_answered_again(command: Command, folder: Path, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", ["a", "b", "c", "d"]), tmp_path / "out.jsonl"
    command("batch", folder, source, target, *SHORT)
    whole = target.read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 3, 0):
        target.write_bytes(whole[:length])
        done = command("batch", folder, source, target, *SHORT, "--max-in-flight", "1")
        assert target.read_bytes() == whole
        assert ("going on: " in done.err) == (whole[:length].count(b"\n") > 0)


def test_answers_to_other_lines_are_left_alone(
    command: Command, folder: Path, tmp_path: Path
) -> None:
    """Before the load: the model's folder holds none."""
    source, target = write(tmp_path / "in.jsonl", ["a", "b"]), tmp_path / "out.jsonl"
    command("batch", folder, source, target, *SHORT)
    answers = target.read_bytes()
    empty = tmp_path / "no-model"
    empty.mkdir()

    def refused(*paths: Path) -> str:
        done = command("batch", empty, *paths)
        assert done.status == 1 and done.out == "" and len(done.err.splitlines()) == 1
        return done.err

    assert "another line 2" in refused(write(tmp_path / "other.jsonl", ["a", "x"]), target)
    assert "another line 2" in refused(write(tmp_path / "short.jsonl", ["a"]), target)
    assert "other lines" in refused(source, write(tmp_path / "mine.jsonl", [{"id": 5}]))
    for text in ("notes", '{"id": 5}', '{"id": ["line-1-ab"]}', "[" * 100_000 + "\n"):
        (tmp_path / "notes.txt").write_text(text)
        assert "other lines" in refused(source, tmp_path / "notes.txt")
        assert (tmp_path / "notes.txt").read_text() == text
    (tmp_path / "half.jsonl").write_text('{"id": "li')
    assert "no requests" in refused(write(tmp_path / "b", []), tmp_path / "half.jsonl")
    assert (tmp_path / "half.jsonl").read_text() == '{"id": "li'
    assert "must be a file" in refused(source, Path(os.devnull))
    assert "is the file of the requests" in refused(source, source)
    assert "there is no file" in refused(tmp_path / "none.jsonl", target)
    assert "no requests" in refused(write(tmp_path / "empty.jsonl", []), tmp_path / "new.jsonl")
    assert "cannot be written" in refused(source, tmp_path / "no" / "folder.jsonl")
    with batch._opened(target):
        assert "another process" in refused(source, target)
    assert target.read_bytes() == answers
    assert read(tmp_path / "mine.jsonl") == [{"id": 5}]


def test_what_cannot_be_written_is_said(command: Command, folder: Path, tmp_path: Path) -> None:
    """A file that may not grow takes half a line, which is not taken for the whole."""
    source, target = write(tmp_path / "in.jsonl", ["a", "b", "c"]), tmp_path / "out.jsonl"
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300)); "
        "from aioengine.__main__ import main; main()"
    )
    arguments = ["batch", str(folder), str(source), str(target), *SHORT]
    done = subprocess.run(
        # Nor may it leave half a compiled module behind (-B).
        [sys.executable, "-B", "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "cannot be written: File too large" in done.stderr.splitlines()[-1]
    assert command(*arguments).status == 0
    assert len(read(target)) == 3


def test_a_line_that_is_too_long(
    command: Command, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "MAX_LINE_BYTES", 64)
    monkeypatch.setattr(batch_lines, "MAX_LINE_BYTES", 64)
    source = write(tmp_path / "in.jsonl", ["a", "b" * 400, "c"])
    command("batch", folder, source, tmp_path / "out.jsonl", *SHORT)
    first, long, last = read(tmp_path / "out.jsonl")
    assert first["text"] and last["text"] and last["id"].startswith("line-3-")
    assert long["error"]["parameter"] == "line" and "more than" in long["error"]["message"]


@pytest.mark.parametrize("goals", rest_is_slow([[30, 31], [1, 30, 31, 80]], [[30, 31]]))
def test_killed_and_gone_on_with(
    command: Command, folder: Path, tmp_path: Path, goals: list[int]
) -> None:
    """No line is lost or doubled, wherever the process was killed, and texts are the same."""
    lines = [{"prompt": f"number {i}", "max_tokens": 2 + i % 9} for i in range(120)]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command("batch", folder, source, tmp_path / "whole.jsonl", *SHORT)
    arguments = [*("batch", str(folder), str(source), str(target)), *SHORT]
    kills = 0
    for goal in goals:
        process = subprocess.Popen(
            [sys.executable, "-m", "aioengine", *arguments, "--max-in-flight", "3"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        while process.poll() is None:
            if target.exists() and target.read_bytes().count(b"\n") >= goal:
                kills += 1
                process.send_signal(signal.SIGTERM if goal == 31 else signal.SIGKILL)
                break
            time.sleep(0.001)
        process.wait()
    assert kills == len(goals) and len(read(target)) < len(lines)
    done = command(*arguments)
    assert done.status == 0 and "going on: " in done.err
    assert read(target) == read(tmp_path / "whole.jsonl")
