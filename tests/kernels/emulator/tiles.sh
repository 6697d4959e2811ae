#!/bin/sh
# Tries the kernels for AMX on a CPU with AVX512-BF16 but without tiles, which are software here.
#
#     sh tests/kernels/emulator/tiles.sh FOLDER [what pytest is told]
#
# FOLDER takes a copy of the package, with a library whose tiles are those of software_tiles.h, and the
# kernels' tests run there, with AMX for the best of the instruction sets. Needs g++ and the
# environment of the tests, whose Python is $PYTHON or `python`.
set -e
ROOT="$(cd "$(dirname "$0")/../../.." && pwd)"
PYTHON="${PYTHON:-python}"
mkdir -p "$1"
COPY="$(cd "$1" && pwd)"
shift
TORCH="$("$PYTHON" -c 'import torch; print(torch.__path__[0])')"
(cd "$ROOT" && git ls-files -z --cached --others --exclude-standard | tar -c --null -T -) \
    | tar -x -C "$COPY"
cd "$COPY"
# Neither the CPU nor Linux is asked for tiles.
sed -i '/1u << 22/d; s/return syscall(SYS_arch_prctl.*;/return true;/' kernels/cpu/ops.cpp
BASE="-std=c++20 -O3 -fPIC -fvisibility=hidden -w"
MATHS="-fno-math-errno -ffp-contract=fast"
BF16="-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16"
TILES="-include tests/kernels/emulator/software_tiles.h"
mkdir -p objects
build() { g++ $BASE "$@"; }
build -DTORCH_TARGET_VERSION=0x020b000000000000 -isystem "$TORCH/include" \
    -c kernels/cpu/ops.cpp -o objects/ops.o
for part in attention linear norm rotary pairs; do
    for set in generic avx2 avx512 avx512_bf16 amx_bf16; do
        flags=""
        case "$part $set" in
            "pairs generic" | "pairs avx2" | "pairs avx512") continue ;;
            "linear amx_bf16" | "norm amx_bf16" | "rotary amx_bf16") continue ;;
            *generic) ;;
            *avx2) flags="-mavx2 -mfma -mf16c" ;;
            *avx512) flags="${BF16% -mavx512bf16}" ;;
            *avx512_bf16) flags="$BF16" ;;
            *amx_bf16) flags="$BF16 $TILES" ;;
        esac
        build $MATHS $flags -DAIOENGINE_KERNELS=$set -c kernels/cpu/$part.cpp \
            -o objects/${part}_$set.o
    done
done
g++ -shared -s -o kernels/cpu/libaioengine_cpu.so objects/*.o -L "$TORCH/lib" -ltorch_cpu
export PYTHONPATH="$COPY" PYTHONSAFEPATH=1 HF_HUB_OFFLINE=1
"$PYTHON" -c 'from aioengine.kernels.cpu import library
assert library.is_available() and library.instruction_set() == "amx_bf16"'
exec "$PYTHON" -m pytest -q tests/kernels "$@"
