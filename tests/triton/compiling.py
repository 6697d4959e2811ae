"""Kernels compiled for real chips on a machine without one, as a launch would have them compiled.

A launch is recorded in place of being done: its arguments are specialised by Triton's own rules,
and ptxas, which comes with Triton, makes the program of a chip.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
CHIPS = (80, 90, 100)


@dataclass(frozen=True)
class Launch:
    """A launch that was asked for."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    def specialised(self, chip: int = 90) -> tuple[Any, ...]:
        """Source and options, as Triton makes them of the arguments, and a name of all that."""
        target = GPUTarget("cuda", chip, 32)
        backend = make_backend(target)
        kernel = self.kernel
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        given = {**self.options, "debug": False}
        bound, specialisation, options = bind(*self.args, **given)
        options, signature, constants, attributes = kernel._pack_args(
            backend, given, bound, specialisation, options
        )
        source = ASTSource(kernel, signature, constants, attributes)
        return source, options, target, (self.name, repr(specialisation), options.hash())


@dataclass(frozen=True)
class Program:
    """What a chip's program takes; `spilled`: bytes a thread that do not fit in the registers."""

    registers: int
    spilled: int
    shared_bytes: int
    code: str


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches inside are written down, and not done."""
    launches: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append(Launch(kernel, args, options, tuple(grid)))

    before = JITFunction.run
    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = before


def launches_of(call: Callable[[], object]) -> list[Launch]:
    """The launches of a call."""
    with recorded() as launches:
        call()
    return launches


_DONE: dict[Any, Program] = {}


def compiled(launch: Launch, chip: int) -> Program:
    """The program of a chip."""
    source, options, target, name = launch.specialised(chip)
    if (name, chip) not in _DONE:
        made = triton.compile(source, target=target, options=options.__dict__)
        _DONE[name, chip] = _read(made.asm["cubin"], made.metadata.shared)
    return _DONE[name, chip]


def _read(cubin: bytes, shared_bytes: int) -> Program:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = _dump("--dump-resource-usage", file.name)
        code = _dump("--dump-sass", file.name)
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    return Program(found["REG"], found["STACK"] + found["LOCAL"], shared_bytes, code)


@cache
def _tool() -> str:
    return str(CUOBJDUMP)


def _dump(what: str, name: str) -> str:
    done = subprocess.run([_tool(), what, name], capture_output=True, text=True, check=True)
    return done.stdout
