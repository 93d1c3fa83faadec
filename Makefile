# Everything runs in .venv, which these targets make; nothing is installed outside it.
# (Java, which Spark needs, and Chromium, for tests of the page, are exceptions: see scripts/java and scripts/chromium.)

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# tests side by side: each worker has servers and a Spark of its own
WORKERS ?= 2

.PHONY: demo test test-long test-matrix lint docs reference bench bench-receive screenshots clean help
.DEFAULT_GOAL := help

demo: $(READY)   ## a minute: a PostgreSQL of its own, live writers, Spark, and the proof; ARGS="--json --seconds 10"
	@scripts/java >&2
	@$(BIN)/walmere demo $(ARGS)

help:            ## what can be done here
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */\1\t/' | expand -t 16

$(READY): pyproject.toml constraints.txt scripts/venv
	PYTHON=$(PYTHON) scripts/venv $(VENV) >&2
	@touch $@

test: $(READY) lint   ## lint, types and every test, on real PostgreSQL servers
	@scripts/java
	@scripts/chromium
	@$(BIN)/walmere warm
	$(BIN)/pytest -n $(WORKERS) --dist worksteal

test-long: $(READY)   ## the tests that take most of a minute each
	@scripts/java
	@scripts/versitygw
	@scripts/azurite
	@scripts/fake-gcs-server
	@scripts/yarn
	@scripts/chromium
	@$(BIN)/walmere warm
	$(BIN)/pytest -m long --timeout 600 -n $(WORKERS) --dist worksteal

test-matrix: $(READY)  ## the stories on every PostgreSQL from 14 to 18; ARGS="--postgres 14 -k mirror"
	@scripts/java
	@$(BIN)/python scripts/matrix.py $(ARGS)

lint: $(READY) docs   ## ruff, mypy, and the documentation builds without a warning
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)   ## the documentation as a site, in site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # --quiet would keep it from counting warnings

reference: $(READY)  ## make the pages of docs/reference that follow from the code
	@$(BIN)/python scripts/reference.py
	@$(BIN)/python scripts/type_table.py

bench: $(READY)  ## every benchmark, side by side with the limit tools: two hours
	@scripts/java
	@missed=0; for each in receive snapshot stream changes verify updates postgres store cluster; do $(BIN)/python -m bench.$$each || missed=1; done; exit $$missed

bench-receive: $(READY)  ## receiving, side by side with pg_recvlogical
	$(BIN)/python -m bench.receive

screenshots: $(READY)  ## the pictures of the dashboard in docs/images: three minutes
	@scripts/java
	@scripts/chromium
	PYTHONPATH=tests $(BIN)/python scripts/screenshots.py

clean:           ## remove what these targets made
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .servers bench/results walmere-demo site
