"""Fixtures that every test may ask for, and the rule that no test leaves a thread behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Nginx, NginxMissing, Origin, Tls, make_shards

_THREADS_END_S = 3.0


def leftover_threads(before: set[threading.Thread], timeout_s: float = _THREADS_END_S) -> list[str]:
    """Names of threads that are not in ``before``, and keep the interpreter alive or are the engine's own,
    and have not ended within ``timeout_s``. Garbage is collected once before giving up, because an iterator in a
    reference cycle ends its thread only then."""

    def left() -> list[str]:
        return [
            thread.name
            for thread in threading.enumerate()
            if thread not in before and (not thread.daemon or thread.name.startswith("wds-async"))
        ]

    deadline = time.monotonic() + timeout_s
    collected = False
    while (names := left()) and time.monotonic() < deadline:
        if not collected:
            gc.collect()
            collected = True
        time.sleep(0.002)
    return names


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Fail a test that leaves a non-daemon thread or one of the engine's threads behind."""
    before = set(threading.enumerate())
    yield
    names = leftover_threads(before)
    assert not names, f"threads left behind: {names}"


@pytest.fixture
def openers() -> Iterator[None]:
    """``gopen_schemes`` is as it was before, whatever a test does to it."""
    from wds_async.storage.schemes import gopen_schemes  # not loaded for every test

    before = dict(gopen_schemes)
    yield
    gopen_schemes.clear()
    gopen_schemes.update(before)


@pytest.fixture
def origin() -> Iterator[Origin]:
    """A scripted server without files; `Origin.add` puts some there."""
    with Origin() as running:
        yield running


@pytest.fixture
def nginx() -> Iterator[Callable[..., Nginx]]:
    """``nginx(root, **options)`` starts one; all stop with the test. Skips where there is no nginx, fails
    instead with ``WDS_REQUIRE_SERVERS=1``."""
    running: list[Nginx] = []

    def start(root: Path, **options: Any) -> Nginx:
        server = Nginx(root, **options)
        try:
            running.append(server.start())
        except NginxMissing as exn:
            if os.environ.get("WDS_REQUIRE_SERVERS") == "1":
                raise
            pytest.skip(str(exn))
        return server

    yield start
    for server in running:
        server.stop()


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """One throw-away authority and a certificate for localhost and 127.0.0.1."""
    return Tls.create(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def shards(tmp_path: Path) -> Callable[..., list[Path]]:
    """``shards(count, samples, **options)`` writes small deterministic shards (`make_shards`); the paths."""

    def make(count: int = 2, samples: int = 5, **options: Any) -> list[Path]:
        return make_shards(options.pop("directory", tmp_path / "shards"), count, samples, **options)

    return make
