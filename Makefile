# Two commands do everything on a fresh machine: `make serve` and `make test`.
# They need Python 3.11 or newer, a C++ compiler (GCC 11, clang 14 or newer) and a package index; the
# rest is fetched.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
NATIVE := CMakeLists.txt $(wildcard src/headrace/backends/cpu/kernels/*)

.PHONY: serve test quick test-slow test-floors test-clients test-engines test-ray fuzz attack lint lock chat model bench-peers clean

# make serve SERVE_FLAGS="--port 9000 --api-key secret"
SERVE_FLAGS ?=

serve: model
	$(BIN)/headrace serve $(SERVE_FLAGS)

chat: model
	$(BIN)/headrace chat

test: $(VENV)/.dev lint model
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tests/beside.py

# A quick look while working: no lints, and none of what tests/marks.py calls slow.
quick: $(VENV)/.dev model
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest -q -m "not slow"

# What takes many minutes: builds by every compiler that is installed (GCC 11 and clang 14 and newer),
# and the kernels on an emulated ARM processor. On Debian, what it needs:
#   apt-get install --no-install-recommends g++-11 g++-12 clang-14 clang-16 g++-aarch64-linux-gnu qemu-user
# A test that finds something missing skips and says what.
test-slow: $(VENV)/.dev
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest -m builds -rs

# The oldest dependencies that pyproject.toml allows, then the newest: environments below build/floors.
test-floors: model
	$(BIN)/python tests/floors.py build/floors

# Real clients, in their newest versions, against a real server: some 5 GB are installed in the
# cache folder first, and brought up to date every time. `make test` does without them.
# make test-clients CLIENTS_FLAGS="-k 'langchain or codex'"
CLIENTS_FLAGS ?=

test-clients: $(VENV)/.dev model
	$(BIN)/python -m pytest tests/clients $(wildcard tests/server/observe/test_prometheus.py) -rs $(CLIENTS_FLAGS)

# The flags that we write for other engines, parsed by those engines: their wheels and what their
# parsers import, some 3 GB, are installed in the cache folder first. `make test` skips these tests
# where that was never done.
test-engines: $(VENV)/.dev
	$(BIN)/python tests/dialects/engines.py
	$(BIN)/python -m pytest tests/dialects/test_real_parsers.py -rs

# A real Ray cluster on this machine: Ray and what the tests need, some 600 MB, in an environment of
# their own. `make test` skips what needs Ray.
test-ray: model
	test -x build/ray/bin/python || $(PYTHON) -m venv build/ray
	build/ray/bin/python -m pip install --quiet --editable '.[ray]' pytest pytest-timeout httpx
	build/ray/bin/python -m pytest tests/ray_serve -rs

# Odd requests to a real server for as long as you like; `make test` has half a minute of it.
# make fuzz FUZZ_FLAGS="--seconds 3600 --health-ms 250"
FUZZ_FLAGS ?= --count 1000000

fuzz: $(VENV)/.dev model
	$(BIN)/python benchmarks/fuzz_requests.py $(FUZZ_FLAGS)

# Every known attack, each on a server of its own, and what others felt meanwhile: some 40 minutes.
# make attack ATTACK_FLAGS="--rows 1 2"
ATTACK_FLAGS ?=

attack: $(VENV)/.dev model
	mkdir -p build
	$(BIN)/python benchmarks/attacks.py --json build/attacks.json $(ATTACK_FLAGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The image's packages, each in one version and with the hashes of its wheels: what runs, and what
# builds. Resolved for both of the image's processors, which must come to the same; the CUDA image is
# for x86_64, with the torch and Triton that were tested on a GPU.
LOCK := build/lock
LOCK_FLAGS := --quiet --generate-hashes --only-binary :all: --python-version 3.11 --no-header
BUILD_NEEDS := import tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], "cmake", "ninja", sep="\n")

lock:
	$(PYTHON) -m venv $(LOCK) && $(LOCK)/bin/pip install --quiet uv
	for cpu in x86_64 aarch64; do \
		flags="--python-platform $$cpu-manylinux_2_28 --output-file $(LOCK)/$$cpu"; \
		rm -f $(LOCK)/$$cpu.* && \
		$(LOCK)/bin/uv pip compile pyproject.toml --extra otel --extra hub $(LOCK_FLAGS) $$flags.run && \
		$(PYTHON) -c '$(BUILD_NEEDS)' | $(LOCK)/bin/uv pip compile - $(LOCK_FLAGS) $$flags.build || exit 1; \
	done
	rm -f $(LOCK)/cuda.run && $(LOCK)/bin/uv pip compile pyproject.toml --extra otel --extra hub --extra cuda \
		--constraint deploy/cuda-constraints.txt $(LOCK_FLAGS) --python-platform x86_64-manylinux_2_28 \
		--output-file $(LOCK)/cuda.run
	cmp $(LOCK)/x86_64.run $(LOCK)/aarch64.run && cmp $(LOCK)/x86_64.build $(LOCK)/aarch64.build
	(echo "# What runs in the image. Made by: make lock"; cat $(LOCK)/x86_64.run) > deploy/requirements.lock
	(echo "# What runs in the CUDA image. Made by: make lock"; cat $(LOCK)/cuda.run) > deploy/requirements-cuda.lock
	(echo "# What builds the image's wheel. Made by: make lock"; cat $(LOCK)/x86_64.build) > deploy/build-requirements.lock

# The default model, checked against its pinned hash, in the user's cache folder.
model: $(VENV)/.installed
	$(BIN)/headrace models pull

$(VENV)/.python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Headrace needs Python 3.11 or newer: set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	touch $@

# Editable: Python sources are read where they lie; the native module is built when it changed. An
# editable install lists the Python files by name, so it is made again when one is added or moved.
FILES := $(shell find src -name '*.py' | LC_ALL=C sort | cksum | cut -d' ' -f1)

$(VENV)/.files-$(FILES): $(VENV)/.python
	rm -f $(VENV)/.files-*
	touch $@

$(VENV)/.installed: $(VENV)/.python $(VENV)/.files-$(FILES) pyproject.toml $(NATIVE)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --group dev
	touch $@

# Headrace beside llama.cpp, OpenVINO GenAI and vLLM, which are installed in the cache folder first.
# make bench-peers PEERS_FLAGS="--engines headrace llama.cpp --rounds 1"
PEERS_FLAGS ?=

bench-peers: model
	mkdir -p build
	PYTHONPATH=benchmarks $(BIN)/python -m peers.run --table build/peers.md --json build/peers.json $(PEERS_FLAGS)

clean:
	rm -rf $(VENV) build dist
