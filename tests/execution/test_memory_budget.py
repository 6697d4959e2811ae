"""Block counts and cache sizes from the configuration, the memory there is and the largest step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from aioengine import AsyncEngine, EngineConfig, SamplingParams
from aioengine.core.plan import Limits
from aioengine.engine.loading import loader
from aioengine.errors import ModelLoadError
from aioengine.execution import memory_budget
from aioengine.execution.memory_budget import ModelSizes, available_bytes, resolve_limits
from aioengine.execution.memory_profiler import measure_activations
from aioengine.types import KVGroup
from tests.support.engines import running_engine
from tests.support.tiny import save_tiny_llava, tiny_image

CPU = torch.device("cpu")
GROUP = KVGroup("self", num_kv_heads=2, key_dim=8, value_dim=8, window=None, num_layers=4)
TOKEN_BYTES = 4 * 2 * (8 + 8) * 4
MIB = 1 << 20


def resolve(free: int, needed: int = 0, rows: int = 100, **options: Any) -> tuple[Limits, int]:
    """The limits where `free` bytes are left and steps take `needed`; how often that was asked."""
    calls = 0

    def measure(_: Limits) -> int:
        nonlocal calls
        calls += 1
        return needed

    model = ModelSizes(
        kv_groups=(GROUP,),
        itemsize=4,
        kv_row_bytes=lambda dim: 4 * dim,
        row_size=64,
        max_position_embeddings=4096,
        max_item_rows=rows,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_budget, "_free_bytes", lambda config, device: free)
        limits = resolve_limits(EngineConfig(**options), model, CPU, measure)
    return limits, calls


def test_with_plenty_of_memory_all_requests_fit_and_nothing_is_measured() -> None:
    limits, calls = resolve(100_000 * MIB)
    assert calls == 0
    assert limits.max_model_len == 4096
    assert limits.num_blocks == 64 * 4096 // 32
    assert limits.encoder_cache_bytes == 4 * 2048 * 64 * 4


def test_what_the_largest_step_needs_is_left_to_it() -> None:
    limits, calls = resolve(40 * MIB, needed=10 * MIB)
    assert calls == 1
    taken = limits.num_blocks * 32 * TOKEN_BYTES + limits.encoder_cache_bytes
    assert 29 * MIB < taken <= 30 * MIB
    assert limits.encoder_cache_bytes <= 30 * MIB // 8


def test_sizes_that_are_given_are_not_measured() -> None:
    limits, calls = resolve(0, kv_cache_bytes=8 * MIB, encoder_cache_bytes=MIB)
    assert calls == 0
    assert limits.num_blocks == 8 * MIB // (32 * TOKEN_BYTES)
    assert limits.encoder_cache_bytes == MIB
    # Nor is a step run for an encoder cache that is small beside the memory that is left.
    limits, calls = resolve(100 * MIB, kv_cache_bytes=8 * MIB)
    assert calls == 0 and limits.encoder_cache_bytes == 4 * 2048 * 64 * 4
    assert resolve(100 * MIB, kv_cache_bytes=90 * MIB)[1] == 1


def test_one_size_that_is_given_leaves_the_rest_to_the_other() -> None:
    limits, _ = resolve(20 * MIB, needed=MIB, encoder_cache_bytes=3 * MIB)
    assert 15 * MIB < limits.num_blocks * 32 * TOKEN_BYTES <= 16 * MIB
    limits, _ = resolve(20 * MIB, needed=2 * MIB, kv_cache_bytes=10 * MIB)
    assert limits.encoder_cache_bytes == MIB


def test_the_largest_item_fits_the_encoder_cache() -> None:
    limits, _ = resolve(40 * MIB, rows=10_000)
    assert limits.encoder_cache_bytes >= 10_000 * 64 * 4
    assert limits.max_num_encoder_input_tokens == 10_000


def test_requests_become_shorter_before_it_fails() -> None:
    limits, _ = resolve(2 * MIB, needed=MIB, rows=0)
    assert limits.max_model_len == limits.num_blocks * 32 < 4096


@pytest.mark.parametrize(
    ("free", "options"),
    [
        (MIB, {"max_model_len": 4096}),
        (1000, {}),
        (0, {"max_model_len": 4096, "kv_cache_bytes": MIB, "encoder_cache_bytes": MIB}),
    ],
)
def test_what_cannot_fit_is_refused_with_the_numbers(free: int, options: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError) as caught:
        resolve(free, needed=100, **options)
    message = str(caught.value)
    assert str(4096 * TOKEN_BYTES) in message and "max_model_len" in message
    if "kv_cache_bytes" in options:
        assert f"kv_cache_bytes is {MIB}" in message
    else:
        assert str(free) in message and "100" in message


def test_more_positions_than_the_model_has() -> None:
    with pytest.raises(ModelLoadError, match="4096"):
        resolve(100 * MIB, max_model_len=5000)


def test_a_peak_is_seen() -> None:
    """In a process of its own: this one may have that much from the allocator already."""
    code = """
import torch
from aioengine.execution.memory_profiler import peak_bytes
print(peak_bytes(torch.device("cpu"), lambda: float(torch.ones(1 << 24).sum())))
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert 60 * MIB < int(done.stdout) < 100 * MIB


async def test_an_engine_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest step and the largest item are run before the first request."""
    save_tiny_llava(tmp_path)
    measured: list[int] = []

    def measure(*args: Any, **kwargs: Any) -> int:
        measured.append(measure_activations(*args, **kwargs))
        return measured[-1]

    monkeypatch.setattr(loader, "measure_activations", measure)
    monkeypatch.setattr(memory_budget, "available_bytes", lambda: 400 * MIB)
    monkeypatch.setattr(memory_budget, "PLENTY", 10**6)
    sizes = {"kv_cache_bytes": None, "max_num_batched_tokens": 64}
    async with running_engine(tmp_path, **sizes) as engine:
        image = tiny_image(1)
        await engine.generate("<image>", SamplingParams(max_tokens=3), images=[image])
        statistics = engine.statistics()
        assert statistics.encoder_items_run == 1, "what was tried at the start is not counted"
        assert statistics.encoder_cache_entries == 1
    assert len(measured) == 1 and measured[0] < 100 * MIB
    monkeypatch.setattr(memory_budget, "available_bytes", lambda: 1000)
    with pytest.raises(ModelLoadError, match="KV cache"):
        await AsyncEngine.from_pretrained(tmp_path, device="cpu").start()


# ---- the host


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n"}


def test_the_machine_alone(tmp_path: Path) -> None:
    write(tmp_path, MEMINFO)
    assert available_bytes(tmp_path) == 8000 * 1024


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


@pytest.mark.parametrize("path", ["/", "/host/only"])
def test_a_container_of_version_2(tmp_path: Path, path: str) -> None:
    write(tmp_path, MEMINFO | {"proc/self/cgroup": f"0::{path}\n"})
    group = "sys/fs/cgroup"
    write(tmp_path, {f"{group}/memory.max": "5000\n", f"{group}/memory.current": "3000\n"})
    assert available_bytes(tmp_path) == 2000
    write(tmp_path, {f"{group}/memory.stat": "anon 1\ninactive_file 700\n"})
    assert available_bytes(tmp_path) == 2700


def test_the_smallest_of_nested_groups_counts(tmp_path: Path) -> None:
    write(tmp_path, MEMINFO | {"proc/self/cgroup": "0::/a/b\n"})
    for name, most, now in (("a", "900", "500"), ("a/b", "max", "400"), ("", "max", "1")):
        folder = f"sys/fs/cgroup/{name}"
        write(tmp_path, {f"{folder}/memory.max": most, f"{folder}/memory.current": now})
    assert available_bytes(tmp_path) == 400


def test_version_1(tmp_path: Path) -> None:
    write(tmp_path, MEMINFO | {"proc/self/cgroup": "5:cpu:/x\n4:memory:/job\n"})
    group = "sys/fs/cgroup/memory"
    for name, most in (("", str(2**63 - 4096)), ("/job", "6000")):
        write(tmp_path, {f"{group}{name}/memory.limit_in_bytes": most})
        write(tmp_path, {f"{group}{name}/memory.usage_in_bytes": "7000"})
    assert available_bytes(tmp_path) == 0, "more is in use than the limit allows"


def test_limits_of_the_process_itself(tmp_path: Path) -> None:
    limits = "Limit  Soft Limit  Hard Limit  Units\nMax address space  9000000  unlimited  bytes\n"
    write(tmp_path, MEMINFO | {"proc/self/limits": limits})
    write(tmp_path, {"proc/self/status": "Name: python\nVmSize: 5000 kB\n"})
    assert available_bytes(tmp_path) == 9_000_000 - 5000 * 1024


def test_this_machine() -> None:
    found = available_bytes()
    assert found is None or found > MIB


def test_a_gpu_has_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since `torch.cuda.set_device` refuses one without."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    names = ("auto", "cuda", "cuda:0", "cuda:1", "cpu")
    found = [memory_budget.find_device(name) for name in names]
    assert [each.index for each in found] == [0, 0, 0, 1, None]
    with pytest.raises(ModelLoadError, match=r"torch finds 2 \(cuda:0 to cuda:1\)"):
        memory_budget.find_device("cuda:2")


def test_a_memory_that_fits_nowhere_is_refused_before_a_step_is_measured() -> None:
    def measure(_: Limits) -> int:
        raise AssertionError("a step over such a memory takes minutes")

    cross = KVGroup("cross", num_kv_heads=2, key_dim=8, value_dim=8, window=None, num_layers=4)
    model = ModelSizes(
        kv_groups=(GROUP, cross),
        itemsize=4,
        kv_row_bytes=lambda dim: 4 * dim,
        row_size=64,
        max_position_embeddings=4096,
        max_item_rows=10**9,
        max_encoder_len=10**9,
    )
    with pytest.raises(ModelLoadError, match="limit_mm_per_prompt"):
        resolve_limits(EngineConfig(kv_cache_bytes=64 * MIB), model, CPU, measure)
