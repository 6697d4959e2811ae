"""A tiny model, and a Ray cluster on this machine that serves it by two replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from aioengine import EngineConfig
from tests.support.tiny import save_tiny_llava

try:
    import ray.serve  # noqa: F401
except ModuleNotFoundError:

    class _Skipped(pytest.Module):
        def collect(self) -> list[pytest.Item]:
            pytest.skip("Ray is missing: pip install 'aioengine[ray]'", allow_module_level=True)

    def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
        """The modules import it at their tops."""
        return _Skipped.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's."""
    path = tmp_path_factory.mktemp("served") / "tiny"
    path.mkdir()
    save_tiny_llava(path)
    return path


@pytest.fixture(scope="session")
def engine_config() -> EngineConfig:
    """Of small sizes. In float64 company changes no rounding, and equal means equal."""
    return EngineConfig(
        device="cpu", dtype="float64", max_model_len=1024, kv_cache_bytes=16 << 20, block_size=16
    )
