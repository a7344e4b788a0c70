# One verb a command; CI runs exactly these. `make demo` and `make test` set everything up themselves.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
GENERATED := loco/wire/v1
PROTO := proto/loco/wire/v1/coordinator.proto
PROTOC = $(BIN)/python -m grpc_tools.protoc -I proto --python_out=$(1) --grpc_python_out=$(1) \
	--mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTO)

.PHONY: setup demo test check format proto bench bench-codec evidence clean help

help: ## list the verbs
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(READY) ## create .venv and install the project in it

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,bench]'
	touch $@

demo: $(READY) ## train on real text: a coordinator and two sites of two ranks
	$(BIN)/loco demo

test: $(READY) ## run all tests
	$(BIN)/python -m pytest

check: $(READY) ## lint, types, import rules, wire format, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd proto && ../$(BIN)/buf lint
	rm -rf build/proto && mkdir -p build/proto && PATH=$(BIN):$$PATH && $(call PROTOC,build/proto)
	diff -r -x __init__.py -x __pycache__ build/proto/loco/wire/v1 $(GENERATED) \
		|| { echo "generated code is stale: run make proto and commit"; exit 1; }

format: $(READY) ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(READY) ## regenerate the gRPC code
	PATH=$(BIN):$$PATH && $(call PROTOC,.)

clean: ## remove the environment and everything built
	rm -rf .venv build dist *.egg-info
