# make demo                         the whole path on sample corpora; make demo KEEP=1 leaves it up
# make demo DATA=DIR ENCODER=DIR    the same on real dumps, from a pre-trained encoder
# make test-fast                    those without Ray and processes, before a commit
# make test                         the tests of CI
# make test-long                    those that train several times: a quarter of an hour
PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: demo test test-fast test-long lint openapi kuberay clean

demo: .venv/installed
	$(BIN)/python -m jobs.demo $(if $(DATA),--data $(DATA) --work .demo-data) \
	    $(if $(ENCODER),--encoder $(ENCODER)) $(if $(KEEP),--keep)

test: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder  # slow files first; each with a Ray of its own

test-fast: .venv/installed
	$(BIN)/python -m pytest -n 2 -m "not long and not ray and not slow"

test-long: .venv/installed
	$(BIN)/python -m pytest -m long

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# After a change of the HTTP interface; a test compares.
openapi: .venv/installed
	$(BIN)/python -m serve.api > serve/openapi.json

# After a change of kuberay/raycluster.yaml or serve/config.cluster.yaml; a test compares.
kuberay: .venv/installed
	$(BIN)/python kuberay/generate.py

clean:
	rm -rf .demo .demo-data .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The mark is made last, so that an install that was cut off is done again.
.venv/installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@
