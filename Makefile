# One verb a command; CI runs exactly these. `make demo` and `make test` set everything up themselves.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Real servers and a real browser for tests/deploy and tests/observability; text for benchmarks/.
PACKAGES := prometheus chromium chromium-driver fonts-dejavu-core iproute2 nftables \
	shellcheck systemd slurmctld slurmd slurm-client munge python3-doc
# Tests that bear to share two cores; in the others a site that starves is a fault of its own.
SIDE_BY_SIDE := $(addprefix tests/,benchmarks coordinator docs examples fuzz loco)
GENERATED := loco/wire/v1
PROTO := proto/loco/wire/v1/coordinator.proto
MEMBERS := docs/results/torchft_members_cpu_$(shell date +%F).jsonl
PROTOC = $(BIN)/python -m grpc_tools.protoc -I proto --python_out=$(1) --grpc_python_out=$(1) \
	--mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTO)

.PHONY: setup demo system test check format dashboards docs proto fuzz-wire bench bench-codec bench-scape bench-rounds bench-torchft chaos evidence evidence-torchft clean help

help: ## list the verbs
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(READY) ## create .venv and install the project in it

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,bench]'
	touch $@

demo: $(READY) ## train on real text: a coordinator and two sites of two ranks
	$(BIN)/loco demo

system: ## install the Debian packages that tests drive (root only, and only what is missing)
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! dpkg -s $(PACKAGES) >/dev/null 2>&1; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(PACKAGES); fi

test: $(READY) system ## run all tests
	$(BIN)/python -m pytest -n 2 --dist loadfile $(SIDE_BY_SIDE)
	$(BIN)/python -m pytest $(addprefix --ignore=,$(SIDE_BY_SIDE))

check: $(READY) ## lint, types, import rules, wire format, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python deploy/dashboards --check
	$(BIN)/python docs/tool --check
	$(BIN)/mkdocs build --quiet
	cd proto && ../$(BIN)/buf lint
	rm -rf build/proto && mkdir -p build/proto && PATH=$(BIN):$$PATH && $(call PROTOC,build/proto)
	diff -r -x __init__.py -x __pycache__ build/proto/loco/wire/v1 $(GENERATED) \
		|| { echo "generated code is stale: run make proto and commit"; exit 1; }

bench: bench-codec bench-scape bench-rounds bench-torchft ## speed, each with its rivals in the same run

bench-codec: $(READY) ## bits, error, speed and memory of the codec
	$(BIN)/python -m benchmarks.codec

bench-rounds: $(READY) ## coming back, memory, and what an empty round costs
	$(BIN)/python -m benchmarks.rounds

bench-scape: $(READY) ## step time and bytes inside a site (root: shaped links)
	$(BIN)/python -m benchmarks.scape --ranks 4 --mbit 1000 --params 10e6

format: $(READY) ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dashboards: $(READY) ## regenerate Grafana's dashboards and docs/metrics.md
	$(BIN)/python deploy/dashboards

docs: $(READY) ## regenerate docs/reference, and build the site into build/site
	$(BIN)/python docs/tool
	$(BIN)/mkdocs build --quiet

proto: $(READY) ## regenerate the gRPC code
	PATH=$(BIN):$$PATH && $(call PROTOC,.)

evidence: $(READY) system ## measure again, small, what the tables show, and rewrite them (root; 30 to 50 minutes)
	$(BIN)/python -m benchmarks.evidence

bench-torchft: $(READY) ## what membership costs a step, and what a rank that joins does (6 minutes)
	$(BIN)/python -m benchmarks.torchft_cost --json
	$(BIN)/python -m benchmarks.torchft_heal --json

evidence-torchft: $(READY) ## 500 steps with members 1 -> 2 -> 3 -> 2 -> 3, every bit; 18 faults of ranks (20 minutes)
	rm -f $(MEMBERS)
	LOCO_MEMBER_STEPS=500 LOCO_MEMBER_RECORD=$(MEMBERS) $(BIN)/python -m pytest tests/worker/elastic/test_members.py -k 1_2_3_2_3
	$(BIN)/python -m tests.chaos --runs torchft --faults 18 --seed 1 --json

chaos: $(READY) ## real processes, 200 faults, and what became of the run (root; 30-60 minutes)
	$(BIN)/python -m tests.chaos --faults 200 --seed 1 --json

fuzz-wire: $(READY) ## a million calls at the coordinator with a valid certificate (an hour on 2 cores)
	$(BIN)/python -m tests.fuzz.fuzz_wire --calls 1000000 --seed 1 --json

clean: ## remove the environment and everything built
	rm -rf .venv build dist *.egg-info
