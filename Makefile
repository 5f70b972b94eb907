# Everything starts from a bare Python >= 3.10 and a C++ compiler: the first target that needs an environment makes one,
# installs packages from PyPI, and builds. Later runs reuse it.
#   make demo                         train a model with 4 ranks
#   make test [TORCH=2.11] [ARGS=..]  the Python tests, with the newest torch or the one named
#   make conformance                  torch's own suite for process groups (long)
#   make cpp-test [SAN=thread|address] [FILTER=..]    the C++ tests of the layers without torch
#   make faults | soak [ARGS=..]      disturbs jobs at random moments, for minutes or for an hour, and counts what held
#   make leaks [ARGS=..]              the same steps 10,000 times, and what of the ranks grows meanwhile
#   make fuzz [RUNS=..]               the parsers of what comes from outside, and a table of findings
#   make strangers                    a job while strangers knock at its ports
#   make docs                         the documents as a site, in build/site
#   make dist                         a source distribution, and a wheel that was built from it, in dist/
#   make wheel                        a wheel for the torch that is there, in dist/
#   make bench | lint | format | build | clean

PYTHON ?= python3
TORCH ?=
ARGS ?=
SAN ?=
FILTER ?=
NPROC ?= 4

VENV := .venv$(if $(TORCH),-$(TORCH))
# It is below this folder, whose path may contain spaces, so it is relative.
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# ninja, torchrun and the linters are found in the environment that the target uses.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# People who use this file may change the code. OURS_WERROR=0 is for a compiler that warns about more.
export OURS_WERROR ?= 1
# Kernels for devices take minutes to compile, so they are left out without a device. OURS_WITH_CUDA=1 asks for them.
export OURS_WITH_CUDA ?= $(if $(wildcard /dev/nvidia*),auto,0)
# A pipe fails if one of its parts fails.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
export MAX_JOBS ?= $(shell nproc 2>/dev/null || echo 2)

CPP_FILES := $(shell find csrc ourddp examples tests benchmarks -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | grep -v '/build/')
SOURCES := $(filter csrc/% ourddp/%,$(CPP_FILES))
CUDA_SOURCES := $(wildcard csrc/cuda/*.cu csrc/cuda/*.cuh)
EXPORTS := $(shell find csrc -name exports.map)
TIDY_FILES := $(shell find $(addprefix csrc/,common kernels device transport collectives) -name '*.cpp')

.PHONY: demo test conformance faults soak leaks cpp-test fuzz strangers bench docs dist wheel lint format tidy build \
  clean python-is-new-enough
.DELETE_ON_ERROR:

# What torchrun would choose, with a warning.
demo: export OMP_NUM_THREADS ?= 1
demo: build
	$(BIN)/torchrun --nproc_per_node=$(NPROC) examples/train.py $(ARGS)

test: build
	$(BIN)/python -m pytest $(or $(ARGS),tests)

conformance: build
	$(BIN)/python tests/conformance/run.py $(ARGS)

faults: build
	$(BIN)/python tests/faults/make_faults.py $(ARGS)

soak: build
	$(BIN)/python tests/faults/make_faults.py --minutes 60 $(ARGS)

leaks: build
	PYTHONPATH=tests:tests/support $(BIN)/python -m faults.growth $(ARGS)

cpp-test:
	@$(MAKE) --no-print-directory -j $(MAX_JOBS) -f tests/cpp/Makefile run SAN=$(SAN) FILTER="$(FILTER)"

# Needs a C++ compiler and Python only. clang's libFuzzer is used where it is found.
RUNS ?= 100000
fuzz:
	@$(PYTHON) tests/fuzz/fuzz.py --runs $(RUNS) $(ARGS)

strangers: build
	@PYTHONPATH=tests/support $(BIN)/python tests/fuzz/strangers.py $(ARGS)

bench: build $(VENV)/.bench
	$(BIN)/python benchmarks/collectives.py $(ARGS)
	$(BIN)/python benchmarks/ddp.py

# --- the environment and the build: each stamp file says that a step is up to date -----------------------------------

python-is-new-enough:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$(PYTHON) is older than 3.10: run make PYTHON=/path/to/a/newer/python"; exit 1; }

$(VENV)/.venv: | python-is-new-enough
	$(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade pip
	@touch $@

$(VENV)/.packages: pyproject.toml $(VENV)/.venv
	@echo "Installing $(if $(TORCH),torch $(TORCH),the newest torch) and the test tools into $(VENV)"
	@$(PIP) install "torch$(if $(TORCH),==$(TORCH).*)" --group test
	@touch $@

# The extension in ourddp/ is for the torch and options that built it last; build/.options changes when they do.
OPTIONS := $(VENV) CUDA=$(OURS_WITH_CUDA) MPI=$(OURS_WITH_MPI) WERROR=$(OURS_WERROR)
build/.options: FORCE
	@mkdir -p build
	@echo "$(OPTIONS)" | cmp --silent - $@ || echo "$(OPTIONS)" > $@

.PHONY: FORCE
FORCE:

# ninja counts the files that are compiled, and every tenth line is shown.
build/.built: $(SOURCES) $(CUDA_SOURCES) $(EXPORTS) $(wildcard setup*.py) $(VENV)/.packages build/.options
	@echo "Building ourddp (log: build/build.log)"
	@$(BIN)/python setup.py build_ext --inplace 2>&1 | tee build/build.log | \
	  sed --unbuffered -n 's|^\(\[[0-9]*0/[0-9]*\]\) .*|  \1 files compiled|p' || { cat build/build.log; exit 1; }
	@sed -n '/^ourddp build summary/,/^  MPI/p; /^ourddp build warning/p' build/build.log
	@touch $@

# Makes the package importable from anywhere in the environment, and the backend known to torch's entry points.
$(VENV)/.installed: pyproject.toml setup.py | build/.built
	@PYTHONWARNINGS="ignore:Editable installation" $(PIP) install --no-build-isolation --editable ".[examples]"
	@touch $@

build: build/.built $(VENV)/.installed

# Open MPI, for comparison.
$(VENV)/.bench: pyproject.toml $(VENV)/.venv
	@$(PIP) install --group bench
	@touch $@

# --- the documents ---------------------------------------------------------------------------------------------------

# In an environment without torch. The API reference is read from the sources, so nothing has to be built.
DOCS := .venv-docs
$(DOCS)/.packages: pyproject.toml | python-is-new-enough
	$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip --disable-pip-version-check --quiet install --upgrade pip
	@$(DOCS)/bin/python -m pip --disable-pip-version-check --quiet install --group docs
	@touch $@

# NO_MKDOCS_2_WARNING: mkdocs is pinned.
docs: $(DOCS)/.packages
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict
	@echo "Open build/site/index.html, or with search: $(PYTHON) -m http.server --directory build/site"

# --- wheels for others -----------------------------------------------------------------------------------------------

# auditwheel finds out which glibc and libstdc++ the libraries need, and names the platform after them. torch's and
# MPI's libraries come from their own wheels, so they are neither copied nor counted.
AUDIT := $(BIN)/auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libmpi*' --wheel-dir dist
wheel: build $(VENV)/.wheel
	@rm -rf build/wheel
	@$(PIP) wheel --no-build-isolation --no-deps --wheel-dir build/wheel .
	$(AUDIT) build/wheel/*.whl

# What a package index takes. The wheel is built from the source distribution in an environment of its own, which shows
# that the source distribution has all that a build needs; it is for the newest torch.
dist: $(VENV)/.wheel
	@rm -rf build/dist dist/*
	$(BIN)/python -m build --outdir build/dist
	$(AUDIT) build/dist/*.whl
	@mv build/dist/*.tar.gz dist
	$(BIN)/python -m twine check --strict dist/*

$(VENV)/.wheel: pyproject.toml $(VENV)/.venv
	@$(PIP) install --group wheel
	@touch $@

# --- style -----------------------------------------------------------------------------------------------------------

# The linters come from PyPI in pinned versions, so that everybody has the same.
$(VENV)/.linters: pyproject.toml $(VENV)/.venv
	@$(PIP) install --group lint
	@touch $@

lint: $(VENV)/.linters
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo "clang-format --dry-run: $(words $(CPP_FILES)) files"; $(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	@$(MAKE) --no-print-directory tidy

tidy: $(VENV)/.linters
	@echo "clang-tidy: $(words $(TIDY_FILES)) files"
	@printf '%s\n' $(TIDY_FILES) | xargs -P $(MAX_JOBS) -n 1 $(BIN)/clang-tidy --quiet --warnings-as-errors='*' \
	  --extra-arg=-std=c++17 --extra-arg=-Icsrc --extra-arg=-pthread

format: $(VENV)/.linters
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

clean:
	rm -rf build dist tests/cpp/build .venv .venv-* *.egg-info ourddp/*.so ourddp/_build_info.py
	find . -name __pycache__ -prune -exec rm -rf {} +
