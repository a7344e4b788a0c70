"""Options and fixtures of all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

import loco  # noqa: F401 - first: it tells gRPC, which reads its environment at import

MACHINE = ("benchmarks", "deploy", "observability")
"""Tests that need what a machine has once: fixed ports, the packet filter, services."""


@pytest.hookimpl(tryfirst=True)  # xdist reads the mark in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n` workers take file by file; those that need the machine to themselves are one."""
    root = Path(__file__).parent
    for item in items:
        file = item.path.relative_to(root)
        alone = file.parts[0] in MACHINE or item.get_closest_marker("root") is not None
        item.add_marker(pytest.mark.xdist_group("machine" if alone else str(file)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate-golden",
        action="store_true",
        help="rewrite golden files with what the code gives now; read the difference in review",
    )


@pytest.fixture
def regenerate_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--regenerate-golden"))
