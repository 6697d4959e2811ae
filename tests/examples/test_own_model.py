"""The family from outside the package: the tokens of the one that is shipped, however it is run."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from aioengine import AsyncEngine, SamplingParams, demo_model
from aioengine.models.runtime import registry
from tests.support.engines import running_engine
from tests.support.tiny import tiny_image

SCRIPT = Path(__file__).parents[2] / "examples" / "own_model" / "own_llava.py"
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = (
    ("USER: <image>\nDescribe the picture. ASSISTANT:", (0,)),
    ("First <image> then <image>, how many?", (1, 0)),
    ("<image>", (2,)),
    ("no picture at all", ()),
)


@pytest.fixture
def own_llava(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module, and nothing registered for longer than the test."""
    spec = importlib.util.spec_from_file_location("own_llava", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "own_llava", module)
    spec.loader.exec_module(module)
    yield module
    del registry._CLASSES[module.ARCHITECTURE]


async def ask(engine: AsyncEngine) -> list[Any]:
    """The tokens of all prompts, at once."""
    outputs = await asyncio.gather(
        *(
            engine.generate(text, PARAMS, images=[tiny_image(seed, 60, 50) for seed in seeds])
            for text, seeds in PROMPTS
        )
    )
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("budget", [1024, 7])
async def test_tokens_are_those_of_the_shipped_family(
    own_llava: ModuleType, assets: Path, tmp_path: Path, budget: int
) -> None:
    own_llava.write_checkpoint(tmp_path)
    async with running_engine(demo_model()) as engine:
        expected = await ask(engine)
    assert len(set(expected)) == len(PROMPTS)
    async with running_engine(tmp_path, max_num_batched_tokens=budget) as engine:
        assert type(engine._core.loaded.runner.model).__name__ == own_llava.ARCHITECTURE
        assert await ask(engine) == expected
        assert await ask(engine) == expected  # with all caches warm


async def test_it_runs_as_a_script(
    own_llava: ModuleType, assets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await own_llava.main()
    assert capsys.readouterr().out.strip()


def test_it_uses_public_names_only() -> None:
    source = SCRIPT.read_text()
    imports = [line for line in source.splitlines() if "aioengine" in line and "import" in line]
    packages = ("aioengine", "aioengine.models", "aioengine.processors")
    assert imports
    for line in imports:
        assert line.startswith(tuple(f"from {package} import " for package in packages))
    assert "#" not in source, "an example that needs a comment shows a fault of the API"
