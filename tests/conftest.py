"""Options and fixtures of all tests."""

from __future__ import annotations

import pytest

import loco  # noqa: F401 - first: it tells gRPC, which reads its environment at import


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate-golden",
        action="store_true",
        help="rewrite golden files with what the code gives now; read the difference in review",
    )


@pytest.fixture
def regenerate_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--regenerate-golden"))
