"""Packages that some tests need."""

from __future__ import annotations

import importlib.util

from tests.servers.process import ServerMissing, required


def need_package(name: str) -> None:
    """Skip the test where package ``name`` is not installed; fail with ``WDS_REQUIRE_SERVERS=1``."""
    with required():
        if importlib.util.find_spec(name) is None:
            raise ServerMissing(f"{name} is not installed: pip install -e '.[test]'")
