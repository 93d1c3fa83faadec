# Everything runs in .venv, which these targets make; nothing is installed outside it.
# (Java, which Spark needs, is the exception: see scripts/java.)

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: test lint bench-receive clean help
.DEFAULT_GOAL := help

help:            ## what can be done here
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */\1\t/' | expand -t 16

$(READY): pyproject.toml constraints.txt scripts/venv
	PYTHON=$(PYTHON) scripts/venv $(VENV)
	@touch $@

test: $(READY) lint   ## lint, types and every test, on real PostgreSQL servers
	@scripts/java
	$(BIN)/pytest

lint: $(READY)   ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench-receive: $(READY)  ## receiving, side by side with pg_recvlogical
	$(BIN)/python -m bench.receive

clean:           ## remove what these targets made
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis bench/results
