"""Services of the bucket ``b``, which is the folder ``/d/`` of a scripted origin; and tests that are coroutines."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin
from tests.service.serving import Inside


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine on a loop of its own, for a minute at most."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), 60))
    return True


@pytest.fixture
def serve(request: pytest.FixtureRequest, origin: Origin, tmp_path: Path) -> Iterator[Callable[..., Inside]]:
    """``serve(**settings)`` starts one, with the module's ``SETTINGS``; ``folder`` and ``socket`` lie in tmp_path."""
    running: list[Inside] = []

    def start(**settings: Any) -> Inside:
        given = {"allow": (origin.base,), "buckets": {"b": f"{origin.base}/d/"}, "private": True}
        given |= {**getattr(request.module, "SETTINGS", {}), **settings}
        for name in {"folder", "socket"} & set(given):
            given[name] = tmp_path / given[name]
        running.append(Inside(**given).__enter__())
        return running[-1]

    yield start
    for one in running:
        one.stop()
