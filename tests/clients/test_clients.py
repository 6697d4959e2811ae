"""Clients of other people, unmodified, against our server: `make clients-test` fetches them.

AIOENGINE_CLIENTS is the folder that packages.py fills; without it these tests are skipped.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from aioengine.asgi import service_app
from tests.asgi.serving import serving
from tests.support.engines import running_engine
from tests.support.scripts import script_by
from tests.support.tools_model import save_tiny_text_caller

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = Path(os.environ.get("AIOENGINE_CLIENTS", "/nowhere"))
MAX_S = 100.0
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
FIRST, LAST = f"<think>\nhm\n</think>\n\nI look.\n{CALL}", "Yes, it will."

pytestmark = pytest.mark.skipif(not PACKAGES.is_dir(), reason="make clients-test fetches them")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_text_caller(tmp_path_factory.mktemp("tools"))


@pytest.fixture
async def url(folder: Path) -> AsyncIterator[str]:
    """Of a server whose model calls a tool, and goes on once it has the result."""
    async with running_engine(folder, max_model_len=1024) as engine:
        script_by(engine, answer)
        async with serving(service_app(engine, model_names="tiny")) as url:
            yield f"{url}/v1"


def answer(prompt: str) -> str:
    """The model's. Agents of pydantic-ai take the first text for the answer, in streams."""
    if "It will rain." in prompt:
        return LAST
    return FIRST.replace("I look.\n", "") if "Just call." in prompt else FIRST


async def printed(*words: str, reads: Callable[[str], Any] = json.loads) -> Any:
    """What a program prints, its last line as JSON."""
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": f"{PACKAGES / 'python'}:{ROOT}"}
    process = await asyncio.create_subprocess_exec(
        *words,
        env={**os.environ, **quiet},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), MAX_S)
    assert process.returncode == 0, err.decode()
    return reads(out.decode().strip().splitlines()[-1])


async def python(name: str, url: str) -> Any:
    return await printed(sys.executable, str(HERE / f"{name}.py"), url)


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node")
async def test_openai_s_for_node(url: str) -> None:
    found = await printed("node", str(HERE / "chat.mjs"), str(PACKAGES / "node"), url)
    for message in (found["message"], found["streamed"]):
        assert message["content"] == "I look." and message["role"] == "assistant"
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert found["message"]["reasoning_content"] == "hm"
    assert found["reason"] == "tool_calls" and found["last"] == LAST
    assert found["error"] == [400, "temprature"]
    assert found["response"] == "I look." and found["events"][-1] == "response.completed"


async def test_litellm(url: str) -> None:
    found = await python("chat_litellm", url)
    for answer in found.values():
        assert answer == {
            "content": "I look.",
            "reasoning": "hm",
            "calls": [["weather", '{"city": "Paris"}']],
        }


async def test_an_agent_of_pydantic_ai(url: str) -> None:
    found = await python("agent_pydantic", url)
    assert found == {"whole": LAST, "streamed": LAST, "asked": ["Paris", "Paris"]}


async def test_the_example_of_pydantic_ai_in_process() -> None:
    words = sys.executable, "-m", "tests.clients.run_example"
    assert await printed(*words, reads=str) == "It is 42."


async def test_langchain(url: str) -> None:
    found = await python("agent_langchain", url)
    call = ["weather", {"city": "Paris"}]
    assert found == {"call": call, "last": LAST, "streamed": [call]}


async def test_anthropic_s(url: str) -> None:
    found = await python("chat_anthropic", url)
    assert found["blocks"] == found["streamed"] == ["thinking", "text", "tool_use"]
    assert found["call"] == ["weather", {"city": "Paris"}] and found["last"] == LAST
    assert found["reason"] == ["tool_use", "tool_use", "end_turn"]
