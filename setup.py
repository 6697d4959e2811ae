"""Builds the C++ kernels along with the package, where there is a compiler and PyTorch's headers.

Everything else about the package stands in pyproject.toml. What is built knows nothing of a Python
version: PyTorch's stable ABI makes one library serve every Python and every torch from 2.11. Where
it cannot be built the package is pure Python, and runs on PyTorch's own kernels.

The headers are those of the torch that is installed beside this Python. A build environment of its
own would have to fetch another one, of gigabytes; so pip's isolation is looked through.
AIOENGINE_TORCH names torch's folder where it is elsewhere, CXX the compiler.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCES = Path("kernels/cpu")
NAME = "aioengine.kernels.cpu.libaioengine_cpu"
TORCH_2_11 = "-DTORCH_TARGET_VERSION=0x020b000000000000"
FOLDERS = ("include", "arithmetic", "program", "ops")  # that others include from
INCLUDES = [word for folder in FOLDERS for word in ("-I", SOURCES / folder)]
COMMON = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
# Vectors wait for no error codes, and multiply and add may be one instruction. GCC 12 takes what
# its own AVX-512 headers leave open on purpose for a mistake.
MATHS = ["-fno-math-errno", "-ffp-contract=fast", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
VNNI = [*AVX512, "-mavx512vnni"]
BF16 = [*AVX512, "-mavx512bf16"]
AMX = [*BF16, "-mamx-tile", "-mamx-bf16"]
PARTS = {
    "attention": {"avx2": AVX2, "avx512": AVX512, "avx512_bf16": BF16, "amx_bf16": AMX},
    "linear": {"avx2": AVX2, "avx512": AVX512, "avx512_bf16": BF16},
    "bf16_gemm": {"avx512_bf16": BF16, "amx_bf16": AMX},
    "int8_gemm": {"avx2": AVX2, "avx512_vnni": VNNI},
    "norm": {"avx2": AVX2, "avx512": AVX512, "avx512_bf16": BF16},
    "rotary": {"avx2": AVX2, "avx512": AVX512, "avx512_bf16": BF16},
    "argmax": {"avx2": AVX2, "avx512": AVX512},
    "weights": {"avx2": AVX2, "avx512": AVX512},
}


def find_torch() -> Path | None:
    """The folder of a torch whose headers have the stable ABI."""
    named = os.environ.get("AIOENGINE_TORCH")
    places = [Path(sysconfig.get_path(kind)) / "torch" for kind in ("platlib", "purelib")]
    for place in [Path(named)] if named else places:
        if (place / "include/torch/csrc/stable/ops.h").exists():
            return place
    return None


def find_compiler() -> str | None:
    """A C++ compiler's path."""
    named = os.environ.get("CXX")
    return next(
        filter(None, map(shutil.which, [named] if named else ["c++", "g++", "clang++"])), None
    )


class BuildKernels(build_ext):
    """Compiles with plain calls of the compiler: there is no Python module to be built."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        compiler, torch = find_compiler(), find_torch()
        assert compiler is not None and torch is not None, "or there is no extension"
        target = Path(self.get_ext_fullpath(ext.name))
        scratch = Path(self.build_temp)
        scratch.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        is_x86 = platform.machine() in ("x86_64", "AMD64")
        headers = [TORCH_2_11, "-isystem", torch / "include"]
        folders = ("ops", "layers", "program")
        operators = [each for name in folders for each in (SOURCES / name).glob("*.cpp")]
        objects = {scratch / f"{each.stem}.o": [*headers, each] for each in operators}
        for part, sets in PARTS.items():
            generic = {} if part == "bf16_gemm" else {"generic": []}
            for name, flags in {**generic, **(sets if is_x86 else {})}.items():
                own = [*MATHS, *flags, f"-DAIOENGINE_KERNELS={name}"]
                (source,) = SOURCES.glob(f"*/{part}.cpp")
                objects[scratch / f"{part}_{name}.o"] = [*own, source]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            common = [compiler, *COMMON, *INCLUDES]
            jobs = [[*common, *words, "-c", "-o", to] for to, words in objects.items()]
            list(pool.map(run, jobs))
        library = ["-L", torch / "lib", "-ltorch_cpu"]
        run([compiler, "-shared", "-s", "-o", target, *objects, *library])


def run(command: list[str | Path]) -> None:
    words = [str(word) for word in command]
    try:
        subprocess.run(words, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(f"aioengine: the C++ kernels are left out: {error}") from error


class PlatformWheel(bdist_wheel):
    """Named for the platform and the oldest C library that will do, and for no Python version."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, system = super().get_tag()
        if self.root_is_pure:
            return python, abi, system
        versions = [(2, 17)]  # the oldest that wheels are named for
        for library in Path(self.bdist_dir).rglob("*.so"):
            found = re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())
            versions += [(int(major), int(minor)) for major, minor in found]
        major, minor = max(versions)
        return "py3", "none", system.replace("linux_", f"manylinux_{major}_{minor}_", 1)


def extensions() -> list[Extension]:
    """The kernels, if they can be built here."""
    missing = []
    if find_compiler() is None:
        missing.append("a C++ compiler (CXX)")
    if find_torch() is None:
        missing.append("the headers of torch >= 2.11 (AIOENGINE_TORCH)")
    if missing or sys.platform != "linux":
        lacking = " and ".join(missing) or "a build for this system"
        sys.stderr.write(f"aioengine: without {lacking}, the C++ kernels are left out\n")
        return []
    # A compiler that fails is reported, and the package is made without its work.
    sources, headers = (sorted(map(str, SOURCES.glob(f"*/*.{end}"))) for end in ("cpp", "h"))
    return [Extension(NAME, sources=sources, depends=headers, optional=True)]


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
