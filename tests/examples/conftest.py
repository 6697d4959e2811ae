"""What `demo_model()` and `demo_images()` give while the examples run."""

from __future__ import annotations

from pathlib import Path

import pytest

import aioengine
from tests.support.tiny import save_tiny_llava, tiny_image

SHIPPED = aioengine.ASSETS


def skip_unless_shipped() -> None:
    """The weights and the images come with the repository once they are trained and rendered."""
    has_model = (SHIPPED / "demo_llava" / "model.safetensors").exists()
    if not has_model or not aioengine.demo_images():
        pytest.skip("the demo model and its images are not in aioengine/assets")


@pytest.fixture(scope="session")
def tiny_assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like the shipped one, with a tiny random model in it."""
    folder = tmp_path_factory.mktemp("assets")
    save_tiny_llava(folder / "demo_llava")
    (folder / "images").mkdir()
    for seed in range(3):
        tiny_image(seed).save(folder / "images" / f"{seed}.png")
    return folder


@pytest.fixture(params=["tiny", "shipped"])
def assets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model in place of the demo model, and then the demo model itself."""
    if request.param == "shipped":
        skip_unless_shipped()
        return SHIPPED
    folder: Path = request.getfixturevalue("tiny_assets")
    monkeypatch.setattr(aioengine, "ASSETS", folder)
    return folder
