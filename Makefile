# Every target sets up what it needs on a machine that has only Python and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.bench-installed

.PHONY: setup demo test works-with lint types bench docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	# For its recordings alone: what it depends on for its own windows is left out.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps scikit-kinematics
	$(BIN)/python tests/models/transformers_tests.py || echo "Transformers' common tests could not be had; they will be skipped"
	@touch $(STAMP)

$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@touch $(BENCH_STAMP)

demo: setup
	$(BIN)/shippo demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/pyright

# Two workers on two cores; --dist=loadfile keeps the tests of one file together, so that a kernel is compiled once.
test: lint types
	$(BIN)/python -m pytest -n 2 --dist=loadfile

# The tests of docs/works-with.md, and the page made of their outcome.
works-with: setup
	$(BIN)/python -m pytest -n 2 --dist=loadfile -m works_with --works-with results/works-with.json
	$(BIN)/python docs/generate.py

bench: $(BENCH_STAMP)
	$(BIN)/shippo bench

docs: setup
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

clean:
	rm -rf $(VENV) dist build docs/_build
