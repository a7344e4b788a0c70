"""`active_operations` runs a test twice: on the NumPy operations and on the compiled ones."""

from collections.abc import Iterator

import pytest

from loco.codec import backend, reference


@pytest.fixture(scope="package", params=["numpy", "numba"])
def active_operations(request: pytest.FixtureRequest) -> Iterator[str]:
    """The operations that `loco.codec` uses meanwhile."""
    before = backend.operations()
    if request.param == "numba":
        assert backend.warm_up() == "numba"
    else:
        backend._active = reference
    yield request.param
    backend._active = before
