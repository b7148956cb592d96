"""webdataset leaves files open; what its garbage says must not fail the test that happens to run then."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest

_LEAKS = ("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "contract" in item.path.parts:
            for leak in _LEAKS:
                item.add_marker(pytest.mark.filterwarnings(leak))


@pytest.fixture(autouse=True, scope="module")
def garbage_stays_here() -> Iterator[None]:
    """Collect a module's garbage before a test elsewhere, which allows no such warning, is charged with it."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
