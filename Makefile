# One command each; `make` alone lists them. Nothing has to be installed by hand but Python 3.11 or newer.

VENV := .venv
BIN := $(VENV)/bin
# What is in it: all that is needed to run gpustream, and all that is needed to develop it, too.
RUNS := $(VENV)/.runs
STAMP := $(VENV)/.installed

# The newest Python on PATH that is new enough; `make install PYTHON=...` for another one.
ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$python" -c '$(ENOUGH)' 2>/dev/null && { echo "$$python"; break; }; done)

# More arguments for pytest: make test ARGS="-k attribution -x"
ARGS ?=

# How many test files run at a time, in the order of tests/real/conftest.py: tests also wait, so that four keep two cores
# busy, and three are enough for those that hardly wait: each collects all tests. Each that runs real tests has servers
# of its own. JOBS=0 runs them one after another.
JOBS ?= 4
PYTEST = $(COMPILED) $(BIN)/pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder

# How long the faults last, and which they are.
SOAK_MINUTES ?= 60
SOAK_SEED ?= $(shell date +%s)

# Tests start some hundred Python processes: what is compiled is kept in .venv, whatever the environment says.
COMPILED = PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX="$(CURDIR)/$(VENV)/pycache"

LOCK = env -u PIP_FIND_LINKS -u PIP_NO_INDEX CUSTOM_COMPILE_COMMAND="make lock" $(VENV)/lock/bin/pip-compile --quiet \
	--generate-hashes --allow-unsafe --strip-extras --no-emit-options --no-emit-index-url --no-emit-find-links --no-emit-trusted-host

SCRIPTS := .ci/run .ci/dist tests/real/build/build
GENERATORS := $(patsubst %.py,%,$(subst /,.,$(wildcard topics/reference.py gpustream/reference.py gpustream/acls.py gpustream/chart.py gpustream/strimzi.py streams/alerts/text/reference.py sinks/series/relabel_reference.py docs/flow.py docs/figures.py k8s/dashboards/files.py k8s/rules.py docs/peers.py)))

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast coverage check docs format bench bench-live bench-growth bench-large soak storm upgrade gpu pictures image dist collector receivers keda kubelet compose real-servers lock

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(STAMP) ## make .venv from the lock files, gpustream in it as an editable install, with all that the other targets need

# The packages of a lock file, counted in one line while pip gets them. Bytecode of all that starts with every process is
# written here, for environments that keep Python from it; of the Kubernetes library's 800 modules, when it is used.
define packages
	@n=0; total=$$(grep -c == $(1)); echo "$$total packages of $(1):"; \
	{ PYTHONUNBUFFERED=1 $(BIN)/pip install --disable-pip-version-check --progress-bar off --no-compile --require-hashes --no-deps -r $(1) || echo failed; } | \
	while read -r word name _; do case "$$word" in \
	  Requirement) n=$$((n + 1));; \
	  Collecting) n=$$((n + 1)); [ ! -t 1 ] || printf '\r\033[K  %s of %s  %s' "$$n" "$$total" "$$name";; \
	  Installing) [ ! -t 1 ] || printf '\r\033[K'; echo "  all here; putting them into $(VENV)";; \
	  failed) exit 1;; esac; done
	@$(BIN)/python -m compileall -qq -j 0 -x kubernetes_asyncio $(VENV)/lib
endef

$(STAMP): $(RUNS) requirements.lock
	$(call packages,requirements.lock)
	@touch $@

$(RUNS): requirements-run.lock pyproject.toml setup.py
	@test -n "$(PYTHON)" || { echo "gpustream needs Python 3.11 or newer, and there is none on PATH:" \
	  "$$(python3 --version 2>&1)" >&2; exit 1; }
	@"$(PYTHON)" -c '$(ENOUGH)' || { echo "gpustream needs Python 3.11 or newer; $(PYTHON) is" \
	  "$$("$(PYTHON)" --version 2>&1)" >&2; exit 1; }
	@"$(PYTHON)" -m venv $(VENV) || { echo "no virtual environment could be made; on Debian and Ubuntu:" \
	  "apt-get install python3-venv" >&2; exit 1; }
	$(call packages,requirements-run.lock)
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: $(RUNS) ## everything in one command: a simulated fleet of 4 nodes of 8 GPUs, which shows all that there is in a minute
	@$(BIN)/gpustream run --simulate 4x8 --story

test: install ## unit and property tests, and every real test whose server is at hand; skips are listed at the end
	$(PYTEST) $(ARGS)

test-fast: JOBS = 3
test-fast: install ## the tests that need neither servers nor seconds, with few examples each: while you write
	GPUSTREAM_HYPOTHESIS=fast $(PYTEST) -m "not real and not slow" --ignore=tests/real $(ARGS)

coverage: install ## the tests that need no server, and which lines of the code none of them runs
	$(PYTEST) -m "not real" --cov --cov-report=term-missing:skip-covered $(ARGS)

check: install ## lint, format, types, imports, schemas, docs and their links, the Dockerfile and scripts; never writes
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy docs/consumers/*.py docs/flow.py docs/figures.py docs/terminal.py docs/site.py
	$(BIN)/mypy -p k8s
	$(BIN)/lint-imports
	@for generator in $(GENERATORS); do echo "$$generator --check"; $(BIN)/python -m $$generator --check || exit 1; done
	$(BIN)/hadolint Dockerfile
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir $(VENV)/site
	@for script in $(SCRIPTS); do echo "bash -n $$script"; bash -n $$script || exit 1; done

format: install ## format the code, mend what lint can mend, write the schemas and the generated docs
	$(BIN)/ruff check --fix --exit-zero
	$(BIN)/ruff format
	@for generator in $(GENERATORS); do echo "$$generator"; $(BIN)/python -m $$generator || exit 1; done

docs: install ## the documentation as a site, in build/site: every link and anchor of it checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: install ## measure: what each step costs, in minutes; ARGS=score for one of tests/bench, ARGS=all for all of them
	$(BIN)/python -m tests.bench $(ARGS)

bench-live: install ## measure: how many nodes two cores carry at 1 Hz, on a quiet machine, in minutes; ARGS=--write keeps it
	$(BIN)/python -m tests.bench.live $(ARGS)

bench-growth: install ## measure: 100 to 10,000 nodes, 1 and 2 workers, catching up after an hour, in half an hour; ARGS=--write
	$(BIN)/python -m tests.bench.growth $(ARGS)

bench-large: install ## measure: 10,000 nodes at once through every component, on a quiet machine with 8 GiB free, in half an hour; ARGS=--write
	$(BIN)/python -m tests.bench.large $(ARGS)

soak: install ## faults at random against real servers, every sample counted: an hour, or SOAK_MINUTES=10 SOAK_SEED=7
	SOAK_MINUTES=$(SOAK_MINUTES) SOAK_SEED=$(SOAK_SEED) $(BIN)/pytest tests/real/test_soak.py -s -rs --show-capture=no $(ARGS)

storm: ## ten minutes of make soak
	@$(MAKE) --no-print-directory soak SOAK_MINUTES=10

upgrade: install ## this tree and an older commit side by side, each with the other's producers, and back: ARGS=COMMIT
	$(BIN)/python -m tests.real.upgrade $(ARGS)

gpu: install ## the node producer on the GPUs of this machine, ten minutes beside nvidia-smi: a report in build/gpu
	$(BIN)/python -m tests.gpu

pictures: install ## the pictures of the docs, of the program while it runs, into docs/pictures; it needs Chromium, and 4 minutes
	@mkdir -p docs/pictures
	$(BIN)/python -m docs.terminal docs/pictures
	$(BIN)/python -m tests.real.pictures docs/pictures

image: install ## the stages of the Dockerfile without a container engine, and how large what they make is
	$(BIN)/python -m tests.image

dist: install ## what a release consists of, of the last commit, in dist/: the wheel, the chart, the SBOM, the changelog, checksums
	.ci/dist dist

collector: ## build the OpenTelemetry Collector beside those servers: make bench has a row for it if it is there
	tests/real/build/build collector

receivers: install ## the tests of remote write and dashboards with Mimir, Cortex, Thanos and VictoriaMetrics, which it builds
	tests/real/build/build receivers
	set -e; for receiver in mimir cortex thanos victoria-metrics; do \
	  GPUSTREAM_RECEIVER=$$receiver $(BIN)/pytest -n 0 tests/real/test_remote_write.py tests/real/test_alert_series.py \
	    tests/real/test_usage_series.py tests/real/test_dashboards.py $(ARGS); done

keda: install ## the tests of scaling with KEDA itself, which it builds
	tests/real/build/build keda
	$(BIN)/pytest -n 0 tests/real/with_keda.py $(ARGS)

kubelet: install ## the tests of a node with a kubelet and containers that run, which it builds; as root
	tests/real/build/build kubelet
	$(BIN)/pytest -n 0 tests/real/with_kubelet.py $(ARGS)

compose: install ## the tests of docker-compose.yml and of the image that it builds, with Docker and its plugin Compose
	$(BIN)/pytest -n 0 tests/real/with_compose.py $(ARGS)

real-servers: ## build the servers of the tests (Kafka, Prometheus, kube-apiserver, ...) into $GPUSTREAM_REAL_DIR or ~/.cache/gpustream-real
	tests/real/build/build

lock: install ## choose the newest allowed versions of all dependencies again: both lock files
	$(PYTHON) -m venv $(VENV)/lock
	$(VENV)/lock/bin/pip install --quiet --disable-pip-version-check pip-tools==7.6.2
	$(LOCK) --upgrade --all-build-deps --extra dev --extra docs --output-file requirements.lock pyproject.toml
	$(LOCK) --build-deps-for wheel --constraint requirements.lock --output-file requirements-run.lock pyproject.toml
