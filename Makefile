# Two commands: `make demo` trains a drafter for a real model, `make test` runs the tests. Both set up what they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo demo-quick test lint setup clean

demo: $(VENV)/.run
	$(BIN)/paceline demo

demo-quick: $(VENV)/.run
	$(BIN)/paceline demo --quick

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyrefly check --python-interpreter-path $(BIN)/python && $(BIN)/lint-imports

setup: $(VENV)/.dev

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Paceline needs Python 3.11 or newer, and $(PYTHON) is older: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(VENV)/bin/pip requirements.txt pyproject.toml
	$(BIN)/pip install --quiet --requirement requirements.txt
	$(BIN)/pip install --quiet --no-deps --editable .
	@touch $@

# The method's authors' package is a witness in the tests; its own pins would replace torch and transformers.
$(VENV)/.dev: $(VENV)/.run requirements-dev.txt
	$(BIN)/pip install --quiet --requirement requirements-dev.txt
	$(BIN)/pip install --quiet --no-deps dflash==0.1.0
	@touch $@

clean:
	rm -rf $(VENV)
