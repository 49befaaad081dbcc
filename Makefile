SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-extras test-newest test-gpu test-asan sanitize-gpu lint format wheel

# An active virtual or conda environment is used as it is; otherwise our own, which may be deleted at any time.
ACTIVE := $(or $(VIRTUAL_ENV),$(CONDA_PREFIX))
PREFIX := $(or $(ACTIVE),$(CURDIR)/.venv)
PYTHON := $(PREFIX)/bin/python
WORKERS ?= 2

help:
	@echo "make demo          train a small model in seven arms and report (CPU, minutes)"
	@echo "make test          the tests of library, training and laboratory, without a GPU (minutes)"
	@echo "make test-slow     the tests marked slow: experiments, committed pages, code in pages, killed processes"
	@echo "make test-extras   install the extras eval and integrations, run the tests marked extras"
	@echo "make test-newest   the tests on the newest PyTorch, in an environment of its own (several GB)"
	@echo "make test-gpu      the tests marked gpu"
	@echo "make test-asan     operators under address and undefined-behaviour sanitizers"
	@echo "make sanitize-gpu  CUDA and Triton kernels under compute-sanitizer; logs go to experiments/operators/logs"
	@echo "make lint          ruff and mypy"
	@echo "make format        ruff, which changes files"
	@echo "make wheel         a wheel with compiled kernels in dist/ (KINDS=cpu,cuda: the GPU's, too)"
	@echo "Each first sets up $(PREFIX) if it has to."

demo:
	@.ci/setup "$(PREFIX)" core "$(ACTIVE)"
	"$(PYTHON)" run.py demo

# A worker of pytest has a core: more threads in each would only take turns.
test test-slow test-extras: export OMP_NUM_THREADS ?= 1

test:
	@.ci/setup "$(PREFIX)" test "$(ACTIVE)"
	"$(PYTHON)" -m pytest -q -n $(WORKERS) --dist worksteal

test-slow:
	@.ci/setup "$(PREFIX)" test "$(ACTIVE)"
	"$(PYTHON)" -m pytest -q -n $(WORKERS) --dist worksteal -m 'slow and not extras'

test-extras:
	@.ci/setup "$(PREFIX)" test,eval,integrations "$(ACTIVE)"
	"$(PYTHON)" -m pytest -q -n $(WORKERS) --dist worksteal -m extras

wheel: KINDS ?= cpu
wheel:
	@.ci/setup "$(PREFIX)" test "$(ACTIVE)"
	PACKMAMBA_PREBUILT=$(KINDS) "$(PYTHON)" -m pip -q wheel --no-deps --no-build-isolation -w dist .

test-newest:
	@WORKERS=$(WORKERS) .ci/newest

test-gpu:
	@.ci/setup "$(PREFIX)" test "$(ACTIVE)"
	@PACKMAMBA_TEST_GPU=1 "$(PYTHON)" -m pytest -q -n $(WORKERS) --dist worksteal -m gpu

# The interpreter is not instrumented: the sanitizers' libraries are preloaded, and leaks, which are its own, are ignored.
test-asan:
	@.ci/setup "$(PREFIX)" test "$(ACTIVE)"
	PACKMAMBA_SANITIZE=address,undefined ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so):$$(g++ -print-file-name=libubsan.so):$$(g++ -print-file-name=libstdc++.so)" \
	"$(PYTHON)" -m pytest -q -n $(WORKERS) tests/ops/test_parity.py tests/ops/test_cpu_kernels.py -m "not gpu" -k "not reference"
	PACKMAMBA_SANITIZE=address,undefined ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so):$$(g++ -print-file-name=libubsan.so):$$(g++ -print-file-name=libstdc++.so)" \
	"$(PYTHON)" tests/fuzz.py cpu 2000

# Built first: under a sanitizer the compiler would run there too. Of Triton's kernels initcheck reports tensor descriptors.
sanitize-gpu:
	@.ci/setup "$(PREFIX)" test "$(ACTIVE)"
	"$(PYTHON)" run.py kernels build
	set -o pipefail; for tool in memcheck racecheck initcheck; do PACKMAMBA_TEST_GPU=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
		"$(PYTHON)" -m pytest -q -p no:cacheprovider tests/ops/test_cuda_kernels.py -k test_every_kernel_once | \
		tee experiments/operators/logs/$$tool.log || exit 1; done
	compute-sanitizer --tool memcheck --error-exitcode 1 "$(PYTHON)" tests/fuzz.py cuda 60
	set -o pipefail; for tool in memcheck racecheck; do PACKMAMBA_TEST_GPU=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
		compute-sanitizer --tool $$tool --error-exitcode 1 "$(PYTHON)" -m pytest -q -p no:cacheprovider tests/nn/test_loss.py \
		tests/ops/test_ssd_kernels.py -k "kernel_s_loss or (test_poison and states-nan)" | \
		tee experiments/operators/logs/triton-$$tool.log || exit 1; done

lint:
	@.ci/setup "$(PREFIX)" dev "$(ACTIVE)"
	"$(PYTHON)" -m ruff check .
	"$(PYTHON)" -m ruff format --check .
	"$(PYTHON)" -m mypy

format:
	@.ci/setup "$(PREFIX)" dev "$(ACTIVE)"
	"$(PYTHON)" -m ruff check --fix .
	"$(PYTHON)" -m ruff format .
