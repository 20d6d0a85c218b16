# The two commands of the README.  Each sets up everything it needs in .venv: Python 3.11 or newer, pip, gcc and make
# are all that must be there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint clean

# The main job on real input: one layer's SwiGLU, from its source to a checked gradient and a compiled kernel.
demo: $(VENV)/.ready
	$(BIN)/python examples/swiglu_layer.py

# Everything CI checks.  Tests that need a Hopper GPU are skipped where there is none.
test: lint
	$(BIN)/python -m pytest -n auto

lint: $(VENV)/.ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build
