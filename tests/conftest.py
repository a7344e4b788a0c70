"""Options and fixtures of all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

import loco  # noqa: F401 - first: it tells gRPC, which reads its environment at import

BESIDE = ("coordinator", "golden", "loco")
"""Tests that may run beside any other; the rest start whole systems and run one by one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n`, one worker takes the systems and the others take what they can, file by file."""
    root = Path(__file__).parent
    for item in items:
        file = item.path.relative_to(root)
        group = str(file) if file.parts[0] in BESIDE else "systems"
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate-golden",
        action="store_true",
        help="rewrite golden files with what the code gives now; read the difference in review",
    )


@pytest.fixture
def regenerate_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--regenerate-golden"))
