"""What is imported by whom, and when. The floors themselves are import-linter's (`make lint`)."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOMS, ROOT, files, imports, top_level_imports, tree

STANDARD = sys.stdlib_module_names
HEAVY = ("torch", "transformers", "numpy", "PIL", "matplotlib", "rich")


def run_python(code: str, *, cwd: Path = ROOT) -> str:
    """Run code in a fresh interpreter, as `make` would; what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "code",
    [
        "import aioengine",
        "from aioengine import AsyncEngine, SamplingParams",
        "from aioengine import *",
        "import aioengine; dir(aioengine); aioengine.errors.MediaError",
        "import aioengine; aioengine.AsyncEngine.from_pretrained(aioengine.demo_model())",
        "import aioengine.asgi",
        "import aioengine.kernels, aioengine.models, aioengine.processors, aioengine.streams",
    ],
)
def test_importing_loads_nothing_heavy(code: str) -> None:
    probe = f"{code}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    loaded = {name.partition(".")[0] for name in json.loads(run_python(probe))}
    # Samples are numpy arrays, wherever they are cut.
    assert not loaded & set(HEAVY) - ({"numpy"} if code == "import aioengine.asgi" else set())


def test_importing_starts_and_changes_nothing(tmp_path: Path) -> None:
    code = """if True:
        import os, signal, sys, threading
        before = dict(os.environ), [signal.getsignal(s) for s in (2, 15)], sys.getswitchinterval()
        from aioengine import *
        after = dict(os.environ), [signal.getsignal(s) for s in (2, 15)], sys.getswitchinterval()
        assert before == after
        assert threading.active_count() == 1
    """
    run_python(code, cwd=tmp_path)


@pytest.mark.parametrize("room", ROOMS)
def test_root_folders_are_not_importable(room: str) -> None:
    """A bare `kernels` on the path would be taken for the Hugging Face package of that name."""
    code = f"import importlib.util; print(importlib.util.find_spec({room!r}))"
    assert str(ROOT / room) not in run_python(code)
    assert str(ROOT) not in sys.path, "run the tests with PYTHONSAFEPATH=1, as `make test` does"


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_are_linked_into_the_package(room: str) -> None:
    link = ROOT / "aioengine" / room
    assert link.is_symlink()
    assert os.readlink(link) == f"../{room}"


def test_ground_floor_needs_the_standard_library_only() -> None:
    room = ROOT / "aioengine"
    names = "errors.py", "types/__init__.py", "types/messages.py", "config.py", "sampling_params.py"
    assert {room / name for name in names} >= {*(room / "types").glob("*.py")}
    for name in names:
        assert top_level_imports(room / name) <= {*STANDARD, "aioengine"}, name


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("kernels", {"torch"}),
        ("streams", {"torch", "cuda", "uvloop"}),
        (
            "processors",
            {
                *("torch", "transformers", "numpy", "PIL", "anyio", "cachetools"),
                *("soundfile", "soxr", "av", "httpx", "h11", "threadpoolctl"),
            },
        ),
        ("models", {"torch", "transformers", "safetensors"}),
        (
            "aioengine",
            {
                *("torch", "transformers", "anyio", "cachetools", "rich", "matplotlib", "uvloop"),
                *("llguidance", "numpy", "tqdm"),
                *("starlette", "uvicorn", "httptools", "prometheus_client", "opentelemetry", "ray"),
                "openai",
            },
        ),
    ],
)
def test_rooms_import_few_distributions(folder: str, allowed: set[str]) -> None:
    for path in files(folder):
        own = {"triton"} if path.parent.name == "triton" else set()
        assert top_level_imports(path) <= {*STANDARD, "aioengine", *allowed, *own}, path.name


def test_nothing_dangerous_is_imported() -> None:
    """No unpickling, no child processes, no signal handlers, no work at interpreter exit.

    ctypes only where `serve`, in a process of its own, calls the allocator.
    """
    refused = {"pickle", "shelve", "marshal", "dill", "joblib", "cloudpickle"}
    refused |= {"subprocess", "multiprocessing", "signal", "atexit", "ctypes"}
    for path in files():
        is_known = path.match("cli/memory.py") or path.match("cpu/decode_queue.py")
        own = {"ctypes"} if is_known else set()
        assert not top_level_imports(path) & refused - own, path.name


def _calls(path: Path) -> list[tuple[str, ast.Call]]:
    """Every call in a file with the dotted name of what is called."""
    return [
        (ast.unparse(node.func), node)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)
    ]


def test_nothing_dangerous_is_called() -> None:
    refused = {"eval", "exec", "compile", "__import__", "torch.load", "os.system", "os.fork"}
    # Settings of the whole process belong to the application.
    refused |= {"torch.set_num_threads", "torch.set_num_interop_threads", "sys.setswitchinterval"}
    refused |= {"torch.manual_seed", "torch.set_default_device", "torch.set_grad_enabled"}
    refused |= {"random.seed", "logging.basicConfig", "asyncio.set_event_loop_policy"}
    for path in files():
        for name, node in _calls(path):
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            # A server's process is its own.
            own = {"sys.setswitchinterval"} if path.match("cli/serve.py") else set()
            assert name not in refused - own, where
            allows = [k for k in node.keywords if k.arg == "allow_pickle"]
            assert all(ast.unparse(k.value) == "False" for k in allows), where
            if name in ("np.load", "numpy.load"):
                assert allows, f"{where}: say allow_pickle=False"


def test_network_is_left_to_the_application() -> None:
    refused = {"socket", "ssl", "http", "urllib3", "requests", "httpx", "aiohttp"}
    for path in files():
        found = set(imports(path))
        if path.name != "http.py":  # off unless the application names hosts
            assert not {name.partition(".")[0] for name in found} & refused, path.name
        assert "urllib.request" not in found or path.name == "fetch.py", path.name
