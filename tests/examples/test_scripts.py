"""Every example runs as it is and says what it promises."""

from __future__ import annotations

import datetime
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import aioengine
from tests.examples.conftest import skip_unless_shipped
from tests.support.scripts import script_all
from tests.support.tools_model import save_tiny_caller

FOLDER = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))
WANTED = [
    "agent",
    "cancel",
    "chat",
    "embed_in_aiohttp",
    "embed_in_fastapi",
    "embed_in_starlette",
    "hello",
    "many",
    "openai_client",
    "pydantic_agent",
    "ray_serve",
    "script",
    "stream",
    "structured",
    "transcribe",
    "two_engines",
]
MAX_LINES = 40
MAX_SERVICE_LINES = 60


def run(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run `examples/<name>.py` as a script; the lines it prints."""
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_all_are_there() -> None:
    assert SCRIPTS == WANTED


@pytest.mark.parametrize("name", SCRIPTS)
def test_is_short_and_uses_public_names_only(name: str) -> None:
    source = (FOLDER / f"{name}.py").read_text()
    is_service = name.startswith("embed_in_")
    assert len(source.splitlines()) < (MAX_SERVICE_LINES if is_service else MAX_LINES)
    imports = [line for line in source.splitlines() if "aioengine" in line and "import" in line]
    assert imports
    for line in imports:
        homes = ("aioengine", "aioengine.asgi", "aioengine.ray_serve")
        assert line.startswith(tuple(f"from {home} import " for home in homes))
    assert "#" not in source, "an example that needs a comment shows a fault of the API"
    assert "._" not in source


def test_hello(assets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "".join(run("hello", capsys)).strip()


def test_stream(assets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *text, usage, first_token = run("stream", capsys)
    assert "".join(text).strip()
    assert usage.endswith("out") and " tokens in, " in usage
    assert first_token.startswith("first token after ")


def test_stream_and_hello_agree(tiny_assets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aioengine, "ASSETS", tiny_assets)
        assert run("hello", capsys) == run("stream", capsys)[:-2]


def test_script_and_hello_agree(tiny_assets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aioengine, "ASSETS", tiny_assets)
        assert run("script", capsys)[0] == run("hello", capsys)[0]


def test_script(assets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(run("script", capsys)) >= len(aioengine.demo_images())


def test_many(assets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run("many", capsys)
    images = aioengine.demo_images()
    for image in images:
        assert sum(line.startswith(f"{image.name}: ") for line in lines) == 2
    assert lines[-1] == f"{len(images)} images were encoded"


def test_agent(tmp_path: Path, tiny_assets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three turns: a tool, the other one with what the first has said, and the answer."""
    save_tiny_caller(tmp_path)
    today, asked = datetime.date.today().isoformat(), []
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'

    def choose(prompt: str) -> str:
        asked.append(prompt)
        assert "What is six times seven?" in prompt and "<image>" in prompt
        if f"{today}<" not in prompt:
            return call % ("today", "{}")
        return "It is 42." if "42<" in prompt else call % ("multiply", '{"a": 6, "b": 7}')

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aioengine, "ASSETS", tiny_assets)
        patch.setattr(sys, "argv", ["agent.py", str(tmp_path), "What is six times seven?"])
        script_all(patch, choose)
        assert run("agent", capsys) == ["It is 42."] and len(asked) == 3


def test_openai_client(assets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "".join(run("openai_client", capsys)).strip()


def test_openai_client_and_hello_agree(
    tiny_assets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aioengine, "ASSETS", tiny_assets)
        assert run("openai_client", capsys) == run("hello", capsys)


def test_cancel(assets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cancelled, following, requests, blocks, outputs = run("cancel", capsys)
    assert cancelled == "cancelled"
    assert following == "the next request got 4 tokens"
    assert requests == "0 running, 0 waiting"
    free, _, total, *_ = blocks.split()
    assert free == total != "0"
    assert outputs == "0 encoder outputs in use"


def test_structured(assets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    word, schema, _ = run("structured", capsys)
    assert word in ("One.", "Two.", "Three.")
    assert 0 <= json.loads(schema)["objects"] <= 9


def test_chat(assets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = run("chat", capsys)[-1]
    cached, _, total, *_ = last.split()
    assert 0 < int(cached) < int(total)


def test_two_engines(assets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(run("two_engines", capsys))
    assert text.startswith("float32: ")
    assert "\nbfloat16: " in text


def test_from_a_shell(tmp_path: Path) -> None:
    """In a process of its own, from another folder."""
    skip_unless_shipped()
    done = subprocess.run(
        [sys.executable, str(FOLDER / "hello.py")],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert not list(tmp_path.iterdir())
