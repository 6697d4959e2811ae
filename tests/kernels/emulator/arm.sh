#!/bin/sh
# Tries the kernels for 64-bit ARM on a machine of another kind: under qemu, beside plain references.
#
#     sh tests/kernels/emulator/arm.sh FOLDER [SEED [INSTRUCTION_SET]]
#
# FOLDER takes what is made. Needs g++-aarch64-linux-gnu, qemu-user, and a Python with setuptools, which is
# $PYTHON or `python`. Takes a minute. The last line of each instruction set says how many checks there were and
# how many failed. The team of threads is tried as well, with threads that stop at random.
set -e
ROOT="$(cd "$(dirname "$0")/../../.." && pwd)"
FOLDER="$1"
shift
"${PYTHON:-python}" "$ROOT/tests/kernels/core/run.py" "$FOLDER" \
    --compiler aarch64-linux-gnu-g++ --emulator "qemu-aarch64 -cpu max" "$@"
aarch64-linux-gnu-g++ -std=c++20 -O2 -Wall -Wextra -Werror -static -pthread -I "$ROOT/kernels/cpu/program" \
    -I "$ROOT/kernels/cpu/include" "$ROOT/tests/kernels/team_soak.cpp" "$ROOT/kernels/cpu/program/team.cpp" \
    -o "$FOLDER/soak"
qemu-aarch64 -cpu max "$FOLDER/soak" 4 20 "${1:-1}"
