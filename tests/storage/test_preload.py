"""Imports of the clients of stores: on several threads at once, and what is said where they fail."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry, known_implementations

from wds_async.errors import MissingExtra
from wds_async.storage.filesystems import filesystem_of
from wds_async.storage.http.backend import HttpBackend
from wds_async.storage.preload import client_imports

_FILES = "from fsspec.implementations.memory import MemoryFileSystem as Files\n"
_PACKAGE = """
import circle_order
first = 1
circle_order.package_begun.set()
circle_order.wait_for_the_other_thread()
from circle.sub import second
"""
_SUB = """
import circle_order
circle_order.sub_begun.set()
from circle import first
second = 2
"""
_ORDER = """
import sys, threading, time
package_begun, sub_begun = threading.Event(), threading.Event()
other = []

def wait_for_the_other_thread():
    "Until it waits for the lock of the package, whose submodule it holds; or for its turn to import at all."
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        code = getattr(sys._current_frames().get(other[0].ident if other else None), "f_code", None)
        name = getattr(code, "co_name", "")
        if name == "client_imports" or (name == "acquire" and sub_begun.is_set()):
            return
        time.sleep(0.001)
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages that can be imported, and forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules, known, loaded = set(sys.modules), set(known_implementations), set(_registry)
    yield tmp_path
    for registered, before in ((sys.modules, modules), (known_implementations, known), (_registry, loaded)):
        for name in set(registered) - before:
            del registered[name]


def _register(folder: Path, name: str, source: str) -> None:
    """Make a package with a filesystem of the protocol ``name``."""
    (folder / f"client_{name}.py").write_text(source + _FILES)
    fsspec.register_implementation(name, f"client_{name}.Files", errtxt=f"install client_{name}")


def test_two_clients_that_share_a_package_are_imported_at_once(packages: Path) -> None:
    """One imports the package, the other a module of it. Python's import locks would be in a deadlock, which Python
    ends by giving the first thread a module that is not complete."""
    (packages / "circle").mkdir()
    (packages / "circle" / "__init__.py").write_text(_PACKAGE)
    (packages / "circle" / "sub.py").write_text(_SUB)
    (packages / "circle_order.py").write_text(_ORDER)
    _register(packages, "circleone", "import circle\n")
    _register(packages, "circletwo", "import circle.sub\n")
    order: Any = importlib.import_module("circle_order")

    def second() -> Any:
        assert order.package_begun.wait(30)
        order.other.append(threading.current_thread())
        return filesystem_of("circletwo://x", {})

    with ThreadPoolExecutor() as threads:
        one, two = threads.submit(filesystem_of, "circleone://x", {}), threads.submit(second)
        assert isinstance(one.result()[0], MemoryFileSystem)
        assert isinstance(two.result()[0], MemoryFileSystem)


def test_what_is_installed_and_broken_says_why(packages: Path) -> None:
    _register(packages, "broken", "from fsspec import no_such_name\n")
    for url in ("broken://x/y.tar", "simplecache::broken://x/y.tar"):
        with pytest.raises(
            MissingExtra, match=r"broken://x/y.tar needs .* cannot be imported: .*'no_such_name'"
        ) as error:
            filesystem_of(url, {})
        assert "pip install" not in str(error.value)
        assert isinstance(error.value.__cause__, ImportError)


def test_what_is_not_installed_says_what(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _register(packages, "absent", "import no_such_module\n")
    with pytest.raises(MissingExtra, match=r"absent://x needs a package that is not installed: install client_absent"):
        filesystem_of("absent://x", {})
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)
    with pytest.raises(MissingExtra, match=r'needs: pip install "wds-async\[s3\]" \(.*s3fs.*\)'):
        filesystem_of("s3://bucket/x", {})


def test_the_engines_http_client_waits_for_other_imports_and_its_loop_does_not() -> None:
    async def run() -> None:
        backend = HttpBackend(call=asyncio.to_thread)
        with client_imports():
            session = asyncio.create_task(backend.session())
            for _ in range(10):
                await asyncio.sleep(0)
            assert not session.done()
        await session
        await backend.close()

    asyncio.run(run())
