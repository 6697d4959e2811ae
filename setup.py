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
CORE_FOLDERS = ("include", "arithmetic", "program")  # that others include from
COMMON = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
# Vectors wait for no error codes, and multiply and add may be one instruction. GCC 12 takes what
# its own AVX-512 headers leave open on purpose for a mistake; clang knows one warning of the two.
QUIET = ["-Wno-unknown-warning-option", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
MATHS = ["-fno-math-errno", "-ffp-contract=fast", *QUIET]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
VNNI = [*AVX512, "-mavx512vnni"]
BF16 = [*AVX512, "-mavx512bf16"]
AMX = [*BF16, "-mamx-tile", "-mamx-bf16"]
# GCC would otherwise load so much ahead that sums leave the registers; clang has no such flag.
ARM = ["-fno-schedule-insns", "-Wno-ignored-optimization-argument"]
NEON_DOTPROD = [*ARM, "-march=armv8.2-a+dotprod"]
NEON_BF16 = [*ARM, "-march=armv8.2-a+dotprod+i8mm+bf16"]
GENERIC: dict[str, list[str]] = {"generic": []}
NEON = {"neon": ARM}  # which every 64-bit ARM has
NEON_SETS = {**NEON, "neon_bf16": NEON_BF16}
# The instruction sets of each part, and what the compiler is told of them.
X86_PARTS = {
    "attention": {**GENERIC, "avx2": AVX2, "avx512": AVX512, "avx512_bf16": BF16, "amx_bf16": AMX},
    "linear": {**GENERIC, "avx2": AVX2, "avx512": AVX512, "avx512_bf16": BF16},
    "bf16_gemm": {"avx512_bf16": BF16, "amx_bf16": AMX},
    "int8_gemm": {**GENERIC, "avx2": AVX2, "avx512_vnni": VNNI},
    "grouped_bf16": {"avx512_bf16": BF16},
    "norm": {**GENERIC, "avx2": AVX2, "avx512": AVX512, "avx512_bf16": BF16},
    "rotary": {**GENERIC, "avx2": AVX2, "avx512": AVX512, "avx512_bf16": BF16},
    "argmax": {**GENERIC, "avx2": AVX2, "avx512": AVX512},
    "weights": {**GENERIC, "avx2": AVX2, "avx512": AVX512},
}
ARM_PARTS = {
    "attention": NEON_SETS,
    "linear": NEON_SETS,
    "bf16_gemm": {"neon_bf16": NEON_BF16},
    "int8_gemm": {**NEON, "neon_dotprod": NEON_DOTPROD, "neon_i8mm": NEON_BF16},
    "norm": NEON_SETS,
    "rotary": NEON_SETS,
    "argmax": NEON,
    "weights": NEON,
}
OTHER_PARTS = {part: GENERIC for part, sets in X86_PARTS.items() if "generic" in sets}
Words = list[str | Path]


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


def parts_for(compiler: str) -> dict[str, dict[str, list[str]]]:
    """The kernels for the machine that the compiler compiles for, which may be another one."""
    answer = run([compiler, "-dumpmachine"]).partition("-")[0].strip()
    machines = {"x86_64": X86_PARTS, "amd64": X86_PARTS, "aarch64": ARM_PARTS, "arm64": ARM_PARTS}
    return machines.get(answer, OTHER_PARTS)


def folders(names: tuple[str, ...], sources: Path) -> Words:
    return [word for name in names for word in ("-I", sources / name)]


def core_objects(compiler: str, scratch: Path, sources: Path = SOURCES) -> dict[Path, Words]:
    """The core's objects and how each is compiled: programs, their team and the kernels.

    It finds no header of torch, so that it is built and tried where there is no torch.
    """
    includes = folders(CORE_FOLDERS, sources)
    plain = (sources / "program").glob("*.cpp")
    objects: dict[Path, Words] = {scratch / f"{each.stem}.o": [*includes, each] for each in plain}
    for part, sets in parts_for(compiler).items():
        (source,) = sources.glob(f"*/{part}.cpp")
        for name, flags in sets.items():
            own = [*MATHS, *flags, f"-DAIOENGINE_KERNELS={name}"]
            objects[scratch / f"{part}_{name}.o"] = [*includes, *own, source]
    return objects


def operator_objects(torch: Path, scratch: Path, sources: Path = SOURCES) -> dict[Path, Words]:
    """The objects of what stands between torch and the core."""
    headers = [TORCH_2_11, "-isystem", torch / "include", *folders((*CORE_FOLDERS, "ops"), sources)]
    operators = [each for name in ("ops", "layers") for each in (sources / name).glob("*.cpp")]
    return {scratch / f"{each.stem}.o": [*headers, each] for each in operators}


def compile_objects(compiler: str, objects: dict[Path, Words], *flags: str) -> None:
    """Compile them, as many at a time as there are processors."""
    jobs = [[compiler, *COMMON, *flags, *words, "-c", "-o", to] for to, words in objects.items()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, jobs))


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
        objects = {**operator_objects(torch, scratch), **core_objects(compiler, scratch)}
        compile_objects(compiler, objects)
        # The linker of macOS has no way to leave symbols out.
        strip = [] if sys.platform == "darwin" else ["-s"]
        library = ["-L", torch / "lib", "-ltorch_cpu"]
        run([compiler, "-shared", *strip, "-o", target, *objects, *library])


def run(command: Words) -> str:
    """Run it; what it wrote on its standard output."""
    words = [str(word) for word in command]
    try:
        return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
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
    if os.name != "posix":
        missing.append("a POSIX system")
    if missing:
        lacking = " and ".join(missing)
        sys.stderr.write(f"aioengine: without {lacking}, the C++ kernels are left out\n")
        return []
    # A compiler that fails is reported, and the package is made without its work.
    sources, headers = (sorted(map(str, SOURCES.glob(f"*/*.{end}"))) for end in ("cpp", "h"))
    return [Extension(NAME, sources=sources, depends=headers, optional=True)]


if __name__ == "__main__":  # the tests of the core read this file for how it is compiled
    commands = {"build_ext": BuildKernels, "bdist_wheel": PlatformWheel}
    setup(ext_modules=extensions(), cmdclass=commands)
