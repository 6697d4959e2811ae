"""The attention backend is the configuration's to choose, and may be somebody's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from aioengine import AsyncEngine, SamplingParams
from aioengine.errors import InvalidRequestError, ModelLoadError
from aioengine.kernels import attention
from aioengine.kernels.attention import register_backend
from aioengine.kernels.cpu import library
from aioengine.kernels.reference import ReferenceBackend
from tests.support.engines import running_engine
from tests.support.tiny import save_tiny_llava, tiny_image

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backends") / "llava"
    save_tiny_llava(folder)
    return folder


async def answer(folder: Path, name: str) -> tuple[int, ...]:
    async with running_engine(folder, attention_backend=name, dtype="float64") as engine:
        output = await engine.generate("See <image>.", PARAMS, images=[tiny_image(1)])
    return tuple(output.token_ids)


async def test_all_give_the_same_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ReferenceBackend] = []

    def own() -> ReferenceBackend:
        made.append(ReferenceBackend())
        return made[-1]

    monkeypatch.setattr(attention, "_FACTORIES", dict(attention._FACTORIES))
    register_backend("own", own)
    wanted = await answer(folder, "auto")
    names = ["gather", "reference", "own", *(["cpu"] if library.is_available() else [])]
    assert [await answer(folder, name) for name in names] == [wanted] * len(names)
    assert len(made) == 1


async def test_one_that_there_is_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        AsyncEngine.from_pretrained(folder, attention_backend=None)
    assert caught.value.parameter == "attention_backend"
    with pytest.raises(ModelLoadError, match=r"attention_backend 'flash'.*gather"):
        await AsyncEngine.from_pretrained(folder, attention_backend="flash").start()
    monkeypatch.setattr("aioengine.kernels.cpu.backend.is_available", lambda: False)
    with pytest.raises(ModelLoadError, match="were not built"):
        await AsyncEngine.from_pretrained(folder, attention_backend="cpu").start()
