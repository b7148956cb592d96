"""Fixtures that every test may ask for, and the rule that no test leaves a thread behind."""

from __future__ import annotations

import functools
import gc
import inspect
import linecache
import logging
import os
import re
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.servers import Nginx, NginxMissing, Origin, Tls, make_shards

_LONG = (
    "tests/isolated/", "tests/contract/", "tests/test_examples.py", "tests/clouds/", "tests/deploy/", "tests/cli/",
    "tests/faults/",
)  # fmt: skip
"""Files whose few tests take long. They come first: two processes share the files, and neither should be left with one
of these when the other has nothing more to do."""
_FIRST = (
    "tests/test_examples.py", "tests/distributed/", "tests/faults/", "tests/checkpoint/test_replay.py",
    "tests/checkpoint/test_ddp.py", "tests/checkpoint/test_kill.py",
)  # fmt: skip
"""The longest of all files."""
_SLOW_FIXTURES = {"nginx", "origin", "tls", "gcs", "s3", "azurite", "radosgw", "service", "server", "raylets", "ray"}
_SLOW_WORDS = re.compile(r"subprocess|num_workers|get_context|Process\(|os\.fork|bundle|at_every_point")
_THREADS_END_S = 10.0
_LINES_AT_ONCE = 20

# An example may take long where others want the processor too.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")

# A shell that runs a command in the background without job control has it ignore Ctrl-C, and every program that a test
# starts, to see what Ctrl-C does to it, would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


def is_slow(item: pytest.Item) -> bool:
    """Return whether the test starts a server or a process, or tries many examples, so that it is not a fast one."""
    if item.nodeid.startswith(_LONG) or item.get_closest_marker("slow"):
        return True
    if not _SLOW_FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
        return True
    return _source_is_slow(getattr(item, "function", None))


@functools.cache
def _source_is_slow(function: Callable[..., object] | None) -> bool:
    if function is None or hasattr(function, "hypothesis"):
        return function is not None
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and _SLOW_WORDS.search(_source_of(code)) is not None


def _source_of(code: types.CodeType) -> str:
    """Return the lines of the function from its first decorator on, without the parsing of `inspect.getsource`, which
    takes seconds for thousands of tests."""
    last, inner = code.co_firstlineno, [code]
    while inner:
        one = inner.pop()
        last = max(last, *(line or 0 for _, _, line in one.co_lines()))
        inner += [constant for constant in one.co_consts if isinstance(constant, types.CodeType)]
    return "".join(linecache.getlines(code.co_filename)[code.co_firstlineno - 1 : last])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests, and put `_FIRST` and `_LONG` first, in that order; all else stays in its order."""
    for item in items:
        if is_slow(item):
            item.add_marker("slow")
    for name in reversed(_FIRST + _LONG):
        items.sort(key=lambda item, name=name: not item.nodeid.startswith(name))


def pytest_collection_finish() -> None:
    """Spare the garbage collector what stays until the end: the modules and thousands of tests. It would look through
    them each time that a test makes many objects, or collects garbage itself."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Say what fails at once: a run that is ended from outside prints no summary."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_FailuresAtOnce(config))


class _FailuresAtOnce:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.died = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.died |= report.when not in ("setup", "call", "teardown")  # one of the processes did
            terminal = self.config.get_terminal_writer()
            last = "\n".join(str(report.longreprtext).splitlines()[-_LINES_AT_ONCE:])
            terminal.write(f"\n{report.when} of {report.nodeid} failed:\n{last}\n")
            terminal.flush()

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write down whether all tests were run, for `.ci/run`."""
        if hasattr(self.config, "cache"):  # not with `-p no:cacheprovider`
            whole = not self.died and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
            self.config.cache.set("wds_async/whole", whole)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name long bytes by their length. Two processes must find the same names, and gzip writes the time down."""
    return f"{argname}-{len(val)}-bytes" if isinstance(val, bytes) and len(val) > 16 else None


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
    engine = sys.modules.get("wds_async.transfer.engine")
    if engine is not None:
        engine.end_idle()  # it would wait for another reader, and serve another test
    names = leftover_threads(before)
    assert not names, f"threads left behind: {names}"


@pytest.fixture(autouse=True)
def refusals_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing object is missing, though others of its bucket were read: no test of something else waits for it."""
    monkeypatch.setenv("WDS_REFUSAL_TIMEOUT", "0")


@pytest.fixture(autouse=True)
def one_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank, worker and order of a test are those that it sets."""
    place = ("RANK", "WORLD_SIZE", "WORKER", "NUM_WORKERS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    for name in (*place, "WDS_SEED", "WDS_EPOCH", "WDS_PROGRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable that has a meaning is set."""
    from wds_async.environment import VARIABLES  # not loaded for every test

    for name in list(os.environ):
        if name.startswith("WDS_") or name in {v.name for v in VARIABLES} or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def nothing_in_memory() -> Iterator[None]:
    """What a test put into fsspec's ``memory://``, which is one for the whole process, goes with it."""
    yield
    memory = sys.modules.get("fsspec.implementations.memory")
    if memory is not None:
        memory.MemoryFileSystem.store.clear()
        memory.MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def openers() -> Iterator[None]:
    """``gopen_schemes`` is as it was before, whatever a test does to it."""
    from wds_async.storage.user_openers import gopen_schemes  # not loaded for every test

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


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    """Loggers are one for the whole process, and a command that was run within it sets them up for itself."""
    loggers = [logging.getLogger(name) for name in ("wds_async", "asyncio", "aiohttp")]
    before = [(one, one.handlers[:], one.level, one.propagate) for one in loggers]
    yield
    for one, handlers, level, propagate in before:
        one.handlers[:], one.propagate = handlers, propagate
        if one.level != level:
            one.setLevel(level)
