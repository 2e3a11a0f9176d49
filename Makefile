# Everything lives in .venv; wheels that had to be built here are kept in .wheels.
SHELL := bash
VENV := .venv
WHEELS := .wheels
BIN := $(VENV)/bin
READY := $(VENV)/.pipesd-installed
ARGS ?=
# Test files run side by side; each worker holds models of its own (some 2 GB).
JOBS ?= 2
export PYTHON TORCH_INDEX CMAKE_ARGS

.PHONY: help demo test check format models bench install clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make demo       install everything, then generate one answer with both halves on this machine"
	@echo "make test       install everything, then check and run the whole test suite"
	@echo "make check      ruff and mypy only"
	@echo "make format     put the source into the project's format"
	@echo "make bench      run the benchmarks; ARGS='NAME ...' picks some"
	@echo "make models     prepare the demo models, which demo and test do when they need them"
	@echo "make install    install everything into $(VENV)"
	@echo "make clean      remove $(VENV), caches and build output; make distclean also $(WHEELS)"
	@echo
	@echo "ARGS='...' is passed on: make demo ARGS='--max-tokens 32', make test ARGS='-k noise'."
	@echo "JOBS=4 runs more test files side by side (2); JOBS=0 all in one process, for a debugger."
	@echo "PYTHON=python3.12 picks the interpreter of a new $(VENV), TORCH_INDEX=URL where torch"
	@echo "comes from, CMAKE_ARGS=-DGGML_CUDA=on how llama-cpp-python is built."

install: $(READY)

$(READY): pyproject.toml constraints/pins.txt constraints/llama-only.cmake \
		scripts/install.sh scripts/llama-wheel.sh
	@scripts/install.sh $(VENV) $(WHEELS)
	@touch $@

demo: $(READY)
	@$(BIN)/edge-agent demo $(ARGS)

models: $(READY)
	@for pair in smollm2 gemma3; do \
		$(BIN)/python -m edge_agent.prepare --pair $$pair >/dev/null && \
		$(BIN)/python -m cloud_verifier.engine.prepare --pair $$pair >/dev/null || exit 1; \
	done; echo "pipesd: demo models ready after $$SECONDS s"

check: $(READY)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && \
		echo "pipesd: checked in $$SECONDS s"

format: $(READY)
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

test: check models
	@echo "pipesd: running the tests, $(JOBS) files at a time (JOBS=)"
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --max-worker-restart 0 $(ARGS)

bench: $(READY)
	@$(BIN)/python -m benchmarks $(ARGS)

clean:
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find broker edge_agent cloud_verifier dashboards benchmarks tests -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	@rm -rf $(WHEELS)
