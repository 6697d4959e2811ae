"""Models whose encoder rows are more than the embeddings of placeholders: what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aioengine import AsyncEngine, Embeddings, SamplingParams
from aioengine.errors import InvalidRequestError, UnsupportedModalityError
from tests.parity.families import save
from tests.parity.unnamed_families import UNNAMED
from tests.support.tiny import tiny_image

PARAMS = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def ovis2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ovis2")
    save(UNNAMED["ovis2"], folder)
    return folder


async def test_markers_belong_to_images(ovis2: Path) -> None:
    """A marker's embedding outside of images depends on whether the prompt has one."""
    async with AsyncEngine.from_pretrained(ovis2, device="cpu", max_model_len=512) as engine:
        for text in ("a <IMG_START> <image>", "<image> b <IMG_END>"):
            with pytest.raises(InvalidRequestError, match="a marker of images"):
                await engine.generate(text, PARAMS, images=[tiny_image(0)])
        output = await engine.generate("a <IMG_START> b", PARAMS)
        assert len(output.token_ids) == 4
        rows = Embeddings(torch.zeros(16, 64))
        with pytest.raises(UnsupportedModalityError, match="markers between rows"):
            await engine.generate("a <image>", PARAMS, images=[rows])
