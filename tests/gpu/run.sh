#!/bin/sh
# Runs every test that needs a GPU, from a copy of the tree on a machine with one.
#
#     sh tests/gpu/run.sh [further arguments of pytest]
#
# A copy may have lost the package's links to the root folders: they are put back first. Python needs
# torch with CUDA, transformers and the packages of the extra "dev".
set -e
cd "$(dirname "$0")/../.."
for room in kernels models processors streams; do
    [ -L "aioengine/$room" ] || { rm -rf "aioengine/$room"; ln -s "../$room" "aioengine/$room"; }
done
export PYTHONSAFEPATH=1 HF_HUB_OFFLINE=1
PYTHON="${PYTHON:-python3}"
"$PYTHON" -m pip install --quiet --no-deps --no-build-isolation --editable .
"$PYTHON" - <<'EOF'
import torch, transformers
print(torch.cuda.get_device_name(), "| torch", torch.__version__, "| transformers", transformers.__version__)
EOF
# pytest-benchmark, where it is installed, warns beside xdist, and a warning is an error here.
exec "$PYTHON" -m pytest -q -p no:benchmark -m gpu tests/gpu "$@"
