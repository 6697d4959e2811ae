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
(cd "$ROOT" && git ls-files -z --cached --others --exclude-standard | tar -c --null -T -) \
    | tar -x -C "$COPY"
cd "$COPY"
# Neither the CPU nor Linux is asked for tiles.
sed -i '/1u << 22/d; s/return syscall(SYS_arch_prctl.*;/return true;/' kernels/cpu/program/dispatch.cpp
cat > compiler <<'EOF'
#!/bin/sh
case " $* " in
    *=amx_bf16\ *) exec g++ -include tests/kernels/emulator/software_tiles.h "$@" ;;
    *) exec g++ "$@" ;;
esac
EOF
chmod +x compiler
rm -f kernels/cpu/*.so
CXX="$COPY/compiler" "$PYTHON" setup.py -q build_ext --inplace
export PYTHONPATH="$COPY" PYTHONSAFEPATH=1 HF_HUB_OFFLINE=1
"$PYTHON" -c 'from aioengine.kernels.cpu import library
assert library.is_available() and library.instruction_set() == "amx_bf16"'
exec "$PYTHON" -m pytest -q tests/kernels "$@"
