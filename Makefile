# Every target sets up what it needs on a machine that has only Python and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.bench-installed
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt
# The demo takes the environment of the tests if there is one, and a smaller one otherwise.
DEMO := $(if $(wildcard $(STAMP)),$(VENV),.venv-demo)
# Files that find most mistakes in seconds; `make check` runs them.
CORE := tests/test_imports.py tests/test_extending.py tests/shippo_ssm/scan/test_algebra.py tests/shippo_ssm/layers/test_mixer.py

.PHONY: setup demo check core test versions works-with lint types bench docs wheel clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) -e '.[dev]'
	# For their recordings alone: what they depend on themselves is left out.
	$(BIN)/python $(PIP_INSTALL) --no-deps 'scikit-kinematics<0.12' seglearn
	$(BIN)/python tests/shippo_ssm/integrations/transformers_tests.py || echo "Transformers' common tests could not be had; they will be skipped"
	@touch $(STAMP)

.venv-demo/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/python $(PIP_INSTALL) -e '.[plot]'
	@touch $@

$(BENCH_STAMP): $(STAMP)
	$(BIN)/python $(PIP_INSTALL) -e '.[bench]'
	@touch $(BENCH_STAMP)

# Core and matplotlib only: about a minute to install, less than a minute to run.
demo: $(DEMO)/.installed
	$(DEMO)/bin/shippo demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/pyright

core: setup
	$(BIN)/python -m pytest -n 0 $(CORE)

# Lint, then types and a core of the tests side by side: two minutes, for daily work.
check: lint
	$(MAKE) -j 2 types core

# Two workers on two cores; --dist=loadfile keeps the tests of one file together, so that a kernel is compiled once.
test: lint types
	$(BIN)/python -m pytest -n 2 --dist=loadfile

# The core tests with the oldest and the newest torch and Numba; downloads more than a gigabyte.
versions: setup
	$(BIN)/python tests/versions.py

# The tests of docs/works-with.md, and the page made of their outcome.
works-with: setup
	# From an empty file, since cases that do not run again would stay in it.
	echo '{}' > results/works-with.json
	$(BIN)/python -m pytest -n 2 --dist=loadfile -m works_with --works-with=results/works-with.json
	$(BIN)/python docs/generate.py

bench: $(BENCH_STAMP)
	$(BIN)/shippo bench

docs: setup
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

# What a release uploads: source distribution and wheel, checked.
wheel: setup
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

clean:
	rm -rf $(VENV) .venv-demo dist build docs/_build
