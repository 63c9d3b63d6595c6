# make help        says what there is
# Everything bootstraps from plain python3, g++ and make.

PYTHON := $(or $(PYTHON),python3)
VENV := .venv
BIN := $(VENV)/bin
ENGINE ?= docker
VARIANT ?= cpu
OPS := ops_lib/python/ddl_ops/_ddl_ops.so
OPS_SOURCES := ops_lib/build.py $(shell find ops_lib/cc -name '*.cc' -o -name '*.h')
STAMP := $(VENV)/.installed

# Who names a Python here gets an environment of its version; other tools put one into the
# environment.
version = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
ifeq ($(origin PYTHON),command line)
ANEW := $(if $(filter $(call version,$(PYTHON)),$(call version,$(BIN)/python)),,anew)
endif

# Where a proxy inspects TLS, its certificate is in the system's store; uv brings one of its own.
ifneq ($(shell find /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt -size +0 2>/dev/null),)
export UV_SYSTEM_CERTS ?= true
endif

.PHONY: help install ops ui demo up test test-airflow test-images fuzz test-gpu soak bench bench-mpi
.PHONY: bench-peers bench-dags bench-overhead bench-page bench-staging bench-faults bench-training
.PHONY: bench-scaling bench-progress bench-lineage wheels images
.PHONY: docs screenshots check anew
.PHONY: check-nccl format lock clean

help:  ## Say what there is
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' $(MAKEFILE_LIST) | awk -F': ' '{printf "  make %-14s %s\n", $$1, $$2}'

# Bytecode of our own, too: see scripts/install.
install: $(STAMP) $(OPS)  ## Environment in .venv from the lock file, ops compiled
	@$(BIN)/python -m compileall -q ddl_airflow ops_lib/python tests

$(STAMP): $(ANEW) requirements/bootstrap.txt requirements/lock.txt requirements/legacy.txt \
		pyproject.toml setup.py ops_lib/pyproject.toml ops_lib/setup.py
	@scripts/install $(PYTHON) $(VENV) $(ANEW)
	@touch $@

# Of what is installed only the build knows whether it is another TensorFlow.
$(OPS): $(OPS_SOURCES) $(STAMP)
	@$(BIN)/python ops_lib/build.py
	@touch $@

ops: $(STAMP)  ## Compile the TensorFlow ops again
	@rm -f $(OPS)
	@$(MAKE) --no-print-directory $(OPS)

demo: install  ## Train both examples through a real Airflow, and show the result
	@$(BIN)/ddl-airflow demo

up: install  ## The same, and leave the UI running until Ctrl-C
	@$(BIN)/ddl-airflow demo --keep

test: install build/croissant/.fetched build/azurite/.fetched  ## All tests; says loudly what it has to skip
	@$(if $(TESTS),$(BIN)/python -m pytest $(TESTS),scripts/test $(BIN))

test-airflow: install  ## The Airflow side with each tested Airflow, or VERSION=3.3.0; most of an hour
	@scripts/test_airflow $(BIN) $(VERSION)

test-images: install  ## Build the images by buildah, as root on Debian, and train in them on hosts and in pods
	@DDL_TEST_IMAGES=1 $(BIN)/python -m pytest -s tests/integration/test_images.py \
		tests/integration/test_trainer_pods.py tests/integration/test_kubernetes_executor.py

fuzz: install  ## 10,000 generated bad manifests; some minutes
	@DDL_GENERATED=10000 $(BIN)/python -m pytest -s -k generated tests/unit/ddl_airflow/core/manifest

test-gpu: install  ## The tests that need GPUs, on as many as there are
	@$(BIN)/python -m pytest tests/gpu

soak: install  ## 100,000 random collectives, 200 kills of ranks and 200 of uploads; most of an hour
	@$(BIN)/python -m tests.soak
	@$(BIN)/python -m tests.soak.publications

bench: install  ## Measure allreduce against MPI_Allreduce; a minute on a quiet machine
	@$(BIN)/python -m benchmarks.collectives

bench-mpi: install build/mpi/mpich/.fetched build/mpi/impi/.fetched  ## Measure allreduce against Open MPI, MPICH and Intel MPI; fetches 150 MB
	@$(BIN)/python -m benchmarks.collectives.mpis

bench-peers: install  ## Measure allreduce through TensorFlow against Horovod and gloo; compiles Horovod once
	@$(BIN)/python -m benchmarks.collectives.peers

bench-overhead: install  ## Measure the overhead around a training, against tasks that do nothing
	@$(BIN)/python -m benchmarks.run_overhead

bench-dags: install  ## Measure manifests to DAGs against dag-factory; installs it once
	@$(BIN)/python -m benchmarks.dag_parse

bench-page: install  ## Measure the page on 200 trainings of 10,000 points and 8 ranks
	@$(BIN)/python -m benchmarks.trainings_page

bench-progress: install  ## Measure what progress lines cost a training; minutes
	@$(BIN)/python -m benchmarks.progress_lines

bench-lineage: install  ## Measure questions about 10,000 models, in a folder and in Ceph; minutes
	@$(BIN)/python -m benchmarks.lineage_answers

bench-staging: install  ## Measure data from a store and to it against s5cmd, aws-cli and rclone; installs these once, needs Ceph
	@$(BIN)/python -m benchmarks.staging

bench-faults: install  ## Put faults on the way of data, of ours, s5cmd, aws-cli and rclone; installs these once, needs Ceph
	@$(BIN)/python -m benchmarks.staging.faults

bench-training: install  ## Measure training against Horovod and one rank alone; compiles Horovod once
	@$(BIN)/python -m benchmarks.training

bench-scaling: install  ## Measure 1, 2 and 3 hosts over limited links, beside the scaling model; needs root
	@$(BIN)/python -m benchmarks.scaling

wheels: install  ## Both wheels in dist, and the time from them to a first model; PYTHONS="3.12 3.13" tries others
	@scripts/wheels $(BIN) dist
	@$(BIN)/python -m benchmarks.first_model dist $(PYTHONS)

images:  ## Images of trainer, Airflow, worker and example, by ENGINE=docker; VARIANT=cuda for GPUs
	@scripts/images $(ENGINE) $(VARIANT)

docs:  ## The documentation as a site that needs no server, in build/docs; in an environment of its own
	@scripts/docs $(PYTHON)

screenshots: install  ## Pictures of the page, in docs/screenshots, by the browser tests of a running Airflow; ten minutes
	@mkdir -p docs/screenshots
	@DDL_DOCS_SCREENSHOTS=1 $(BIN)/python -m pytest tests/ui

check: install  ## Style, types, what must never go in; build/sbom.json, and what is known against it
	@scripts/check $(BIN)

check-nccl: install build/nvidia/.fetched  ## Our declarations of NCCL against its headers; fetches 370 MB
	@$(BIN)/python -m pytest tests/unit/ops_lib_cc/comm

build/croissant/.fetched: requirements/croissant.txt | $(STAMP)
	@rm -rf $(@D)
	@$(BIN)/uv pip install --quiet --no-deps --require-hashes --target $(@D) -r $<
	@touch $@

build/azurite/.fetched: $(addprefix tests/integration/azurite/, .npmrc package.json package-lock.json)
	@mkdir -p $(@D) && cp $^ $(@D)
	@cd $(@D) && npm ci --silent --fetch-retries 1 && touch $(@F) || \
		echo "no npm, or no packages for it: tests of Azure's store will be skipped, loudly"

build/mpi/%/.fetched: requirements/%.txt | $(STAMP)
	@rm -rf $(@D)
	@$(BIN)/uv pip install --quiet --no-deps --require-hashes --target $(@D) -r $<
	@touch $@

build/nvidia/.fetched: requirements/nccl.txt | $(STAMP)
	@rm -rf build/nvidia
	@$(BIN)/uv pip install --quiet --no-deps --require-hashes --target build/nvidia -r $<
	@touch $@

ui:  ## The page in Airflow's UI, of ui/ into ddl_airflow/plugin/built; needs npm, fetches 70 MB once
	@cd ui && npm ci --silent && npm run --silent build

format: install  ## Format Python and C++ in place
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

lock: $(STAMP)  ## Resolve requirements/*.in again
	@scripts/lock $(BIN)

clean:  ## Remove what make made, but the environment
	rm -rf build dist ops_lib/build .demo *.egg-info ops_lib/python/*.egg-info $(OPS) .pytest_cache .mypy_cache .ruff_cache
