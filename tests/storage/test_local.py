"""Local files of every kind."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.transfer.reading import KIB, MIB, bytes_of, data, open_fds, outcomes, quick
from wds_async.errors import AccessDenied, ObjectChanged, ShardNotFound, StorageError, UrlError
from wds_async.storage.base import Verdict
from wds_async.storage.local import explain_os_error, file_version
from wds_async.transfer.reader import open_shards

PART = 256 * KIB


@pytest.mark.parametrize("size", [0, 1, 64 * KIB, PART - 1, PART, PART + 1, 7 * PART + 5])
def test_files(tmp_path: Path, size: int) -> None:
    content = data(size)
    path = tmp_path / "a b%20ü.tar"
    path.write_bytes(content)
    assert bytes_of([str(path), path.as_uri(), f"file:{path}".replace("%20", "%2520")]) == [content] * 3


def test_many_files_leave_none_open(tmp_path: Path) -> None:
    contents = [data(100 * i, i) for i in range(200)]
    paths = []
    for i, content in enumerate(contents):
        paths.append(str(tmp_path / f"{i}.tar"))
        Path(paths[-1]).write_bytes(content)
    bytes_of(paths[:1])
    before = open_fds()
    assert bytes_of(paths) == contents
    assert open_fds() <= before


def test_symlinks_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"x" * 1000)
    (tmp_path / "link.tar").symlink_to("real")
    (tmp_path / "broken.tar").symlink_to("nowhere")
    (good, _), (_, error) = outcomes([str(tmp_path / "link.tar"), str(tmp_path / "broken.tar")])
    assert good == b"x" * 1000
    assert isinstance(error, ShardNotFound)


def test_errors_name_the_path_and_the_run_goes_on(tmp_path: Path) -> None:
    good = tmp_path / "good.tar"
    good.write_bytes(b"good")
    (tmp_path / "folder.tar").mkdir()
    urls = [str(tmp_path / "missing.tar"), str(good), str(tmp_path / "folder.tar"), str(good), f"{good}/below.tar"]
    assert "taken literally; a range is written {000..999}" in str(outcomes([str(tmp_path / "{0...9}.tar")])[0][1])
    found = outcomes(urls)
    assert [type(error) for _, error in found] == [
        ShardNotFound,
        type(None),
        _kind(found[2][1]),
        type(None),
        _kind(found[4][1]),
    ]
    assert "missing.tar at byte 0: there is no such file" in str(found[0][1])
    assert "this is a directory" in str(found[2][1])
    assert "below.tar" in str(found[4][1])
    assert found[1] == found[3] == (b"good", None)


def _kind(error: object) -> type:
    assert isinstance(error, StorageError)
    return type(error)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="POSIX")
def test_permissions(tmp_path: Path) -> None:
    path, good = tmp_path / "x.tar", tmp_path / "good.tar"
    path.write_bytes(b"x")
    good.write_bytes(b"good")
    path.chmod(0)
    assert outcomes([str(good)]) == [(b"good", None)]  # and all that reading imports is imported
    root = os.geteuid() == 0
    if root:  # who may read everything: be somebody else for a moment
        os.seteuid(65534)
    try:
        ((_, error),) = outcomes([str(path)])
    finally:
        if root:
            os.seteuid(0)
    assert isinstance(error, AccessDenied)
    assert str(path) in str(error)


def test_a_host_in_a_file_url_is_an_error() -> None:
    found = outcomes(["file://elsewhere/x.tar", "/nonexistent/y.tar"])
    assert isinstance(found[0][1], UrlError)
    assert isinstance(found[1][1], ShardNotFound)


def test_a_file_that_is_truncated_while_it_is_read(tmp_path: Path) -> None:
    path, good = tmp_path / "x.tar", tmp_path / "good.tar"
    content = data(40 * PART)
    path.write_bytes(content)
    good.write_bytes(b"good")

    cut = False

    def truncate() -> None:
        nonlocal cut
        if not cut:
            os.truncate(path, 1000)
            cut = True

    (got, error), following = outcomes([str(path), str(good)], quick(budget_bytes=1 * MIB), after=truncate)
    assert isinstance(error, ObjectChanged)
    assert f"x.tar at byte {len(got)}" in str(error)
    assert got == content[: len(got)]
    assert following == (b"good", None)


def test_a_file_that_is_replaced_before_it_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(data(40 * PART))
    other = tmp_path / "other"
    other.write_bytes(data(40 * PART, 1))
    before = file_version(os.stat(path))

    def replace() -> None:
        if other.exists():
            other.replace(path)

    # The file is open by then: it is read to its end, as it was.
    ((got, error),) = outcomes([str(path)], quick(budget_bytes=1 * MIB), after=replace)
    assert (got, error) == (data(40 * PART), None)
    assert file_version(os.stat(path)) != before


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "fifo.tar"
    os.mkfifo(path)
    return path


def _write(path: Path, *pieces: bytes, then: threading.Event | None = None) -> threading.Thread:
    def work() -> None:
        with open(path, "wb", buffering=0) as file:
            for piece in pieces:
                file.write(piece)
            if then is not None:
                then.wait(10)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_fifo_is_read_to_its_end(tmp_path: Path, fifo: Path) -> None:
    content = data(3 * PART + 9)
    good = tmp_path / "good.tar"
    good.write_bytes(b"good")
    writer = _write(fifo, content[:1000], content[1000:])
    assert bytes_of([str(fifo), str(good)]) == [content, b"good"]
    writer.join(5)
    assert not writer.is_alive()


def test_what_a_fifo_gives_late_goes_nowhere(tmp_path: Path, fifo: Path) -> None:
    # The shard is skipped while a thread waits for the FIFO; the memory belongs to the next shard then.
    content = data(30 * PART)
    other = tmp_path / "other.tar"
    other.write_bytes(content)
    hold = threading.Event()
    writer = _write(fifo, b"A" * 100, then=hold)
    late = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    try:
        with open_shards([str(fifo), str(other)], config=quick(budget_bytes=1 * MIB)) as reader:
            piece = next(reader).read()
            assert piece is not None
            assert bytes(piece) == b"A" * 100
            shard = next(reader)
            got = bytearray()
            while (piece := shard.read()) is not None:
                os.write(late, b"B" * 50)
                got += piece
        assert got == content
    finally:
        hold.set()
        writer.join(5)
        os.close(late)


def test_leaving_a_silent_fifo(fifo: Path) -> None:
    before = open_fds()
    with open_shards([str(fifo)]) as reader:
        next(reader)
    assert open_fds() <= before


def test_what_an_os_error_means() -> None:
    assert explain_os_error(OSError(116, "Stale file handle")).verdict is Verdict.TRANSIENT
    assert explain_os_error(OSError(5, "Input/output error")).verdict is Verdict.TRANSIENT
    assert explain_os_error(OSError(28, "No space")).verdict is Verdict.FATAL
    assert explain_os_error(PermissionError(13, "no")).verdict is Verdict.DENIED
    assert "ValueError" in explain_os_error(ValueError("embedded null byte")).reason


def test_a_null_byte_in_a_name() -> None:
    ((_, error),) = outcomes(["/tmp/a\0b.tar"])
    assert isinstance(error, StorageError)
