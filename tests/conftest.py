"""Options and fixtures of all tests."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest

import loco  # noqa: F401 - first: it tells gRPC, which reads its environment at import

# isort: split
from support.live import left_running

END_SECONDS = 60.0


def pytest_unconfigure() -> None:
    """A thread that a failed test has left must not keep CI waiting: its traceback, and the end."""
    faulthandler.dump_traceback_later(END_SECONDS, exit=True)


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """Stop the coordinators that a test has left, so that it fails alone."""
    before = set(left_running)
    yield
    for coordinator in left_running - before:
        coordinator.stop()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate-golden",
        action="store_true",
        help="rewrite golden files with what the code gives now; read the difference in review",
    )


@pytest.fixture
def regenerate_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--regenerate-golden"))
