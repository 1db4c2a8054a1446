# make demo                         the whole path on sample corpora; KEEP=1 leaves it up, at port 8000 or PORT=…
# make demo DATA=DIR ENCODER=DIR    the same on real dumps, from a pre-trained encoder
# make setup                        the environment, .venv, alone
# make test-fast                    those without Ray, processes and whole jobs, before a commit
# make test                         the tests of CI
# make test-avx2                    what depends on the processor, as on one that has AVX2 and nothing later
# make test-long                    those that train several times, kill nodes, or run a whole benchmark; all as with AVX2
# make cluster-demo                 a cluster on this machine by the files of a real one; KEEP=1 leaves it up
# make cluster-test                 nodes that die, on a cluster of four in this machine
# make benchmark                    all benchmarks in their small form, to .benchmark/results: half an hour
PYTHON ?= $(shell for minor in 11 12 13; do python3.$$minor -c '' 2> /dev/null && echo python3.$$minor && break; done)
BIN := .venv/bin

DEMO ?= .demo
RESULTS ?= .benchmark/results
BENCHMARKS ?= cluster corpora pretrain finetune embed search serve convert intents tables paper

.PHONY: setup demo cluster-demo test test-fast test-avx2 test-long cluster-test benchmark lint openapi lock clean

setup: .venv/installed

demo: .venv/installed
	$(BIN)/python -m jobs.demo $(if $(PORT),--port $(PORT)) $(if $(DATA),--data $(DATA) --work .demo-data) \
	    $(if $(ENCODER),--encoder $(ENCODER)) $(if $(KEEP),--keep)

cluster-demo: .venv/installed
	$(BIN)/python -m jobs.cluster_demo $(if $(PORTS_FROM),--ports-from $(PORTS_FROM)) $(if $(KEEP),--keep true)

test: .venv/installed
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder  # slow files first; one has a Ray

test-fast: .venv/installed
	$(BIN)/python -m pytest -n 2 -m "not long and not ray and not slow"

# Where the processor has no more than AVX2, `make test` was this.
IF_NEWER := case $$($(BIN)/python -m pipeline.processor) in plain|avx2) echo "the processor has no more than AVX2";; *)

# In one process: another one would import and read all tests for 12 s more.
test-avx2: .venv/installed
	$(IF_NEWER) POLYRANK_PROCESSOR=avx2 $(BIN)/python -m pytest -m "processor and not long and not ray";; esac

test-long: .venv/installed
	$(BIN)/python -m pytest -m long
	$(IF_NEWER) POLYRANK_PROCESSOR=avx2 $(BIN)/python -m pytest -m "long or not long";; esac

cluster-test: .venv/installed
	POLYRANK_KILLS=10 $(BIN)/python -m pytest -m long -s tests/cluster/test_chaos.py

# It takes the rankers and corpora of `make demo`; DEMO=.demo-data takes those of real dumps. The peers need the
# extra `bench`. A part that cannot run here says why, and the others go on.
DATA_OF_search := --model $(DEMO)/rankers/poly --corpus $(DEMO)/corpora/convai2
DATA_OF_serve := $(DATA_OF_search)
DATA_OF_cluster := --model $(DEMO)/rankers/poly
DATA_OF_finetune := --encoder $(or $(ENCODER),$(DEMO)/encoder) --corpus $(DEMO)/corpora/convai2
DATA_OF_paper := $(DATA_OF_finetune) --only bi poly-64 --finetune.max-steps 100
DATA_OF_convert := --corpus $(DEMO)/corpora/reddit
DATA_OF_embed := --data $(or $(DATA),.data) $(if $(PEERS),--peers $(PEERS))
DATA_OF_intents := --data $(or $(DATA),.data)
DATA_OF_tables := $(DATA_OF_intents)

benchmark: $(BENCHMARKS:%=benchmark-%)
	$(BIN)/python -m jobs.benchmarks.report --results $(RESULTS)

benchmark-%: .venv/installed
	-$(BIN)/python -m jobs.benchmark $* --size small $(DATA_OF_$*) --json $(RESULTS)/$*-small.json

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# After a change of the HTTP interface; a test compares.
openapi: .venv/installed
	$(BIN)/python -m serve.http.api > serve/openapi.json

clean:
	rm -rf .demo .demo-data .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# After a change of versions in requirements.lock: the hashes of all their files, for any Python, by uv.
lock:
	grep -oE '^[A-Za-z0-9._-]+==[^ ]+' requirements.lock | uv pip compile - --quiet --no-deps --no-annotate --no-header \
	    --generate-hashes --universal --python-version 3.11 --output-file requirements.lock

# The lock is complete, so nothing is resolved, but for torch's own libraries: of CUDA, in its build for GPUs.
# uv unpacks on all cores what takes pip four times as long. It does not read pip's settings, so where only these lead
# to an index, pip does it; torch comes by pip, because its build is often chosen there. The lock's own pip comes first,
# so that uv does not replace the one that is at work.
# All cores compile; pip would take one, and some files of others' tests do not compile. It has to be done here:
# where PYTHONDONTWRITEBYTECODE is set, as in many images, each process would compile anew (a demo of 5.2 minutes, not 3.7).
# What is left out is hardly ever imported, or compiled by pytest in its own way: half of all.
# The mark is made last, so that an install that was cut off is done again.
NOT_COMPILED := /tests?/|/testing/|transformers/models/(?!auto|bert/|modernbert/)|/(moto|openai|cohere|databricks|rllib|llm|fontTools|onnxruntime|onnxscript|_inductor|networkx|physics|lexers|mypy|mypyc|pip|setuptools|pyasn1_modules|distutils|schemathesis|hypothesis|graphql|wcwidth|gunicorn|torchgen|virtualenv|distlib|typer|cffi|pycparser|huey)/
INSTALL := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python $(if $(PIP_INDEX_URL),--default-index $(PIP_INDEX_URL))
.SILENT: .venv/installed demo
.venv/installed: requirements.lock torch.lock pyproject.toml
	test -n "$(PYTHON)" || { echo "polyrank needs Python 3.11, 3.12 or 3.13; name one: make PYTHON=…" >&2; exit 2; }
	echo "makes the environment, .venv: 1 to 4 minutes"
	$(PYTHON) -m venv .venv
	sed -n -e '/^pip==/,/[^\\]$$/p' -e '/^uv==/,/[^\\]$$/p' requirements.lock > .venv/first.lock
	$(INSTALL) -r .venv/first.lock
	$(INSTALL) --no-deps -r torch.lock & torch=$$!; \
	    ($(UV) --no-deps -r requirements.lock || $(INSTALL) --no-deps -r requirements.lock) && wait $$torch
	$(INSTALL) -r torch.lock
	$(BIN)/python -m compileall -qq -j 0 -x '$(NOT_COMPILED)' .venv/lib || true
	$(UV) --no-deps --no-build-isolation -e .
	touch $@
