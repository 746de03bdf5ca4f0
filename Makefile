# Everything a fresh machine needs is a Python >= 3.11; `make` alone lists the targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
STUDIES := $(sort $(patsubst %/intro.md,%,$(wildcard results/records/*/intro.md)))

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all torture lint smoke index tables recompute evidence docs clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1	\2/'

# torch comes first and alone: torchvision would otherwise pull whichever torch is newest.
$(BIN)/fedcli: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(BIN)/fedcli

install: $(BIN)/fedcli ## Make the environment in .venv with the tested versions

demo: install ## FedFM against FedAvg on the built-in digits, two seeds: a table and a figure in demo/
	rm -rf demo
	$(BIN)/fedcli run fedavg,fedfm --dataset digits --seeds 0,1 --jobs 2 --out demo

# A thread that waits leaves its core to the other worker of the tests.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -n $(WORKERS) --dist worksteal -q

test: install ## Run the quick tests on two cores, in minutes: the laws for one method of each kind, see tests/slow.py
	$(PYTEST) -m "not slow"

test-all: install ## Run all tests on two cores, in a quarter of an hour, as continuous integration does
	$(PYTEST)

torture: install ## Kill, damage and fuzz for a quarter of an hour; the table goes into results/reliability.md
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.torture --write

lint: install ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy fedcli papers

smoke: install ## Run every method for two rounds on built-in data
	$(BIN)/fedcli smoke

index: install ## Write papers/index.json, from which list, show and help read, after a change in papers/ or of options
	$(BIN)/python -m fedcli.cli.describe

tables: install ## Write the pages and figures in results/ anew from the records, and results/report.html
	$(BIN)/python results/pages.py
	$(BIN)/python results/board/board.py --page
	$(BIN)/fedcli report $(STUDIES) --title "fedcli: the committed runs" --out results/report.html

recompute: install ## Hold the pages to the records, and the claims to a script that shares no code with fedcli
	FEDCLI_DATA=$(CURDIR)/build/none $(BIN)/python results/pages.py --check
	$(BIN)/fedcli claims --runs results/records --format csv | $(BIN)/python results/recompute/recompute.py

evidence: install ## Go on with claims that have not been run; TIME=9m, JOBS=4, CARRY=folder, FROM=folder, PRECISION=tf32
	$(BIN)/python results/evidence/run_open_claims.py $(if $(TIME),--time $(TIME)) $(if $(JOBS),--jobs $(JOBS)) \
		$(if $(CARRY),--carry $(CARRY)) $(if $(FROM),--from $(FROM)) $(if $(PRECISION),--precision $(PRECISION))

docs: install ## Make the documentation site in build/site: README, docs, results, and the reference from docstrings
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	rm -rf build/pages build/site && mkdir -p build/pages
	for name in README.md CHANGELOG.md LICENSE CITATION.cff pyproject.toml docs papers results agreement; do \
		ln -s ../../$$name build/pages/$$name; done
	$(BIN)/python -m pdoc --docformat google --output-directory build/pages/api \
		fedcli fedcli.core fedcli.returned fedcli.runs.rounds fedcli.papers
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --config-file docs/mkdocs.yml

clean: ## Remove the environment and what demo and docs wrote
	rm -rf $(VENV) demo build
