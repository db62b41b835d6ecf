# make chat: everything from a bare Python 3.11+ to a conversation. make test: everything the tests need, and all of them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
MODEL  := smollm2-135m

# Threads of a pool that spin while they wait make a shared machine ten times slower; torch reads this when it loads.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: chat test faults night lint model bench clean help

help: ## Say what there is to make
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

chat: $(VENV)/chat.stamp ## Install, fetch the small model, start the daemon and open the terminal client
	@$(BIN)/chatd chat

test: $(VENV)/dev.stamp model ## Install what the tests need and run all of them
	$(BIN)/python -m pytest -m "not night"
	@echo "once more with a constant as the block hash: it finds candidates, and is no proof"
	$(BIN)/python -m pytest -m "not night and not default_hash" -p chatd.testing.constant_hash \
		tests/kvcache tests/sessions tests/engine \
		--ignore tests/engine/test_simulation.py --ignore tests/engine/interpreted

faults: $(VENV)/dev.stamp ## Break the source in many ways, and see each caught by a test
	$(BIN)/python tests/faults/fault_runner.py

night: $(VENV)/dev.stamp model faults ## The same checks, for hours
	$(BIN)/python -m pytest

lint: $(VENV)/dev.stamp ## Linters, types and the layers of the imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

model: $(VENV)/dev.stamp ## Fetch and convert the small model
	@$(BIN)/chatd pull $(MODEL)

bench: $(VENV)/dev.stamp model ## Where a decode step's time goes
	$(BIN)/python -m chatd.bench step

clean: ## Remove the virtual environment and what tools left
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$$($(PYTHON) --version) is too old, chatd needs Python 3.11 or newer (make PYTHON=...)" >&2; exit 3; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "$(PYTHON) cannot make a virtual environment; install its venv package" >&2; rm -rf $(VENV); exit 3; }

$(VENV)/chat.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing chatd (about a minute the first time)"
	@$(PIP) -e ".[server,tui]"
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing chatd and its test tools (about a minute the first time)"
	@$(PIP) -e ".[server,tui,dev]"
	@touch $(VENV)/chat.stamp $@
