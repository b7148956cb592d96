"""Everything else that fsspec knows."""

from __future__ import annotations

import importlib.util
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.servers import Origin
from tests.transfer.reading import KIB, bytes_of, data, outcomes, quick
from wds_async.errors import MissingExtra, ObjectChanged, ShardNotFound, StorageError, TransferError
from wds_async.storage.base import Verdict
from wds_async.storage.generic import explain_foreign, reads_local_files
from wds_async.storage.stores import known_protocol

PART = 256 * KIB


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("size", [0, 1, PART, PART + 1, 7 * PART + 3])
def test_memory(memory: MemoryFileSystem, size: int) -> None:
    content = data(size)
    memory.pipe_file("/b/x.tar", content)
    assert bytes_of(["memory://b/x.tar"] * 3) == [content] * 3


def test_missing_and_directories(memory: MemoryFileSystem) -> None:
    memory.pipe_file("/b/folder/x.tar", b"x")
    missing, folder, good = outcomes(["memory://b/none.tar", "memory://b/folder", "memory://b/folder/x.tar"])
    assert isinstance(missing[1], ShardNotFound)
    assert "memory://b/none.tar at byte 0" in str(missing[1])
    assert isinstance(folder[1], StorageError)
    assert "directory" in str(folder[1])
    assert good == (b"x", None)


class Moody(MemoryFileSystem):
    """Fails, gives too little, or too much, in turn."""

    protocol = "moody"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.rpartition("://")[2].lstrip("/")

    moods: list[Any] = []  # noqa: RUF012

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        assert start is not None
        assert end is not None
        mood = self.moods.pop(0) if self.moods else None
        if isinstance(mood, Exception):
            raise mood
        if mood == "short":
            end = start + (end - start) // 2
        content: bytes = super().cat_file(path, start=start, end=end, **kwargs)
        return content + b"!" if mood == "long" else content[:0] if mood == "nothing" else content


@pytest.fixture
def moody() -> Iterator[type[Moody]]:
    fsspec.register_implementation("moody", Moody, clobber=True)
    Moody.moods = []
    yield Moody
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def test_faults_of_the_filesystem(moody: type[Moody]) -> None:
    content = data(3 * PART)
    moody().pipe_file("/x.tar", content)
    moody.moods = ["short", OSError("flaky"), "nothing", "long", TimeoutError(), "short", "short"]
    assert bytes_of(["moody://x.tar"]) == [content]
    moody.moods = [ValueError("a bug of the filesystem")]
    ((got, error),) = outcomes(["moody://x.tar"])
    assert isinstance(error, TransferError)
    assert "ValueError: a bug" in str(error)
    assert "moody://x.tar at byte 0" in str(error)
    assert got == b""
    moody.moods = ["nothing"] * 50
    ((_, error),) = outcomes(["moody://x.tar"])
    assert isinstance(error, TransferError)
    assert "after 3 attempts" in str(error)


def test_hosts_have_filesystems_of_their_own() -> None:
    class Hosts(MemoryFileSystem):
        protocol = "hosts"
        cachable = False

        def __init__(self, host: str = "", **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.host = host

        @staticmethod
        def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
            return {"host": path.removeprefix("hosts://").partition("/")[0]}

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return "/" + path.removeprefix("hosts://").partition("/")[2]

        def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
            return {"name": path, "size": len(self.host), "type": "file"}

        def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
            return self.host.encode()[start:end]

    fsspec.register_implementation("hosts", Hosts, clobber=True)
    assert bytes_of(["hosts://a.example/x.tar", "hosts://b.example/x.tar"]) == [b"a.example", b"b.example"]


def test_blocking_filesystems_are_called_by_one_thread_at_a_time() -> None:
    class Alone(MemoryFileSystem):
        protocol = "alone"
        inside = threading.Lock()

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return "/" + path.rpartition("://")[2].lstrip("/")

        def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
            return self._alone(super().info, path, **kwargs)

        def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> Any:
            return self._alone(lambda: bytes(self.store[path].getbuffer()[start:end]))

        def _alone(self, call: Any, *args: Any, **kwargs: Any) -> Any:
            assert self.inside.acquire(blocking=False), "two threads at once"
            try:
                threading.Event().wait(0.002)
                return call(*args, **kwargs)
            finally:
                self.inside.release()

    fsspec.register_implementation("alone", Alone, clobber=True)
    contents = [data(2 * PART, i) for i in range(6)]
    for number, content in enumerate(contents):
        Alone().pipe_file(f"/{number}.tar", content)
    assert bytes_of([f"alone://{number}.tar" for number in range(6)]) == contents
    MemoryFileSystem.store.clear()


def test_chains_over_archives(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as archive:
            archive.writestr("x.tar", name.encode() * 1000)
    urls = [f"zip://x.tar::file://{tmp_path}/{name}.zip" for name in ("one", "two", "one")]
    assert bytes_of(urls) == [name.encode() * 1000 for name in ("one", "two", "one")]


def test_chains_over_http(origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    content = data(PART + 1)
    url = origin.add("x.tar", content)
    assert bytes_of([f"simplecache::{url}"] * 2) == [content] * 2
    fsspec.implementations.cached.SimpleCacheFileSystem.clear_instance_cache()


@pytest.mark.parametrize(
    ("scheme", "package", "extra"), [("s3", "s3fs", "s3"), ("gs", "gcsfs", "gcs"), ("az", "adlfs", "azure")]
)
def test_a_missing_package_names_its_extra(scheme: str, package: str, extra: str) -> None:
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    for url in (f"{scheme}://bucket/x.tar", f"simplecache::{scheme}://bucket/x.tar"):
        ((_, error),) = outcomes([url])
        assert isinstance(error, MissingExtra)
        assert f'pip install "wds-async[{extra}]"' in str(error)
        assert url in str(error)


def test_what_reads_local_files() -> None:
    for url in (
        "local:///x",
        "file:///x",
        "simplecache::file:///x",
        "zip://a::/x.zip",
        "zip://a::file:///x.zip",
        "git://a:b@c",
        "asynclocal:///x",
        "generic://file:///x",
        "reference://x.tar::http://h/references.json",
    ):
        assert reads_local_files(url), url
    for url in ("s3://b/x", "simplecache::http://h/x", "zip://a::s3://b/x.zip", "memory://x"):
        assert not reads_local_files(url), url


def test_known_protocols() -> None:
    assert known_protocol("s3")
    assert known_protocol("memory")
    assert not known_protocol("nosuch")


def test_reading_while_the_filesystem_hangs(moody: type[Moody]) -> None:
    """Leaving does not wait for a store that does not answer."""

    release = threading.Event()

    class Hangs(moody):  # type: ignore[misc, valid-type]
        protocol = "hangs"

        def cat_file(self, *args: Any, **kwargs: Any) -> bytes:
            release.wait(1000)
            return b""

    fsspec.register_implementation("hangs", Hangs, clobber=True)
    Hangs().pipe_file("/x.tar", b"x" * 1000)
    from wds_async.transfer.reader import open_shards

    with open_shards(["hangs://x.tar"], config=quick()) as reader:
        next(reader)
    release.set()


def test_missing_credentials_are_named_with_what_to_do() -> None:
    class NoCredentialsError(Exception):
        """As botocore's."""

    fault = explain_foreign(NoCredentialsError("none"))
    assert fault.verdict is Verdict.DENIED
    assert "AWS_*" in fault.advice


def test_an_object_that_is_replaced_is_noticed_at_its_end(memory: MemoryFileSystem) -> None:
    """The bytes have the right number: only the filesystem's own word of the object tells."""
    size = 20 * PART
    memory.pipe_file("/b/x.tar", data(size))
    replaced = []

    def replace() -> None:
        if not replaced:
            replaced.append(memory.pipe_file("/b/x.tar", data(size, 1)))

    config = quick(budget_bytes=1 << 20, connections=2)
    ((got, error),) = outcomes(["memory://b/x.tar"], config, after=replace)
    assert isinstance(error, ObjectChanged)
    assert len(got) < size


def test_an_object_that_was_cut_is_no_broken_server(memory: MemoryFileSystem) -> None:
    memory.pipe_file("/b/x.tar", data(20 * PART))
    config = quick(budget_bytes=1 << 20, connections=2)
    after = lambda: memory.pipe_file("/b/x.tar", b"")  # noqa: E731
    ((_, error),) = outcomes(["memory://b/x.tar"], config, after=after)
    assert isinstance(error, ObjectChanged)
