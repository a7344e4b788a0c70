PY := .venv/bin/python

.PHONY: proto
proto: ## regenerate the gRPC code
	$(PY) -m grpc_tools.protoc -I proto --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. proto/loco/wire/v1/coordinator.proto
