"""``verify="always"``: a flip that comes once is healed, one that stays delivers nothing, no memory grows."""

from __future__ import annotations

import gc
import hashlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.servers import Origin
from tests.servers.shards import make_tar
from tests.transfer.reading import KIB, MIB, bytes_of, data, open_fds, outcomes, quick, snapshot
from tests.transfer.test_verify import FLIP_AT, SHARD, has_the_byte, serve
from wds_async.config import RetryPolicy, TransferConfig
from wds_async.errors import ChecksumMismatch, ReaderClosed, StorageError, TransferError, WdsError
from wds_async.shardcache.cache import DiskCache
from wds_async.transfer.checksums import Spool
from wds_async.transfer.reader import open_shards
from wds_async.transfer.stats import Counters

pytestmark = pytest.mark.filterwarnings("error")


def always(**overrides: Any) -> TransferConfig:
    return quick(verify="always", **overrides)


@pytest.fixture
def server() -> Iterator[Origin]:
    with Origin() as running:
        yield running


def beside(content: bytes) -> bytes:
    return f"{hashlib.sha256(content).hexdigest()}  x.tar\n".encode()


@pytest.mark.parametrize("times", [1, 2])
def test_a_passing_flip_is_healed(server: Origin, times: int, caplog: pytest.LogCaptureFixture) -> None:
    url, counters = serve(server, corrupt_at=FLIP_AT, times=times, when=has_the_byte), Counters()
    assert bytes_of([url, url], always(), counters) == [SHARD, SHARD]
    stats = snapshot(counters)
    assert stats.verified_shards == 2
    # What was read ahead of the second has its own flip, where there are two.
    assert stats.retries == times
    assert stats.wire_bytes == (2 + times) * len(SHARD)
    assert sum("it is read again" in message for message in caplog.messages) == times


def test_a_lasting_one_delivers_nothing(server: Origin) -> None:
    url, counters = serve(server, corrupt_at=FLIP_AT), Counters()
    (got, error), after = outcomes([url, server.add("y.tar", b"next")], always(), counters)
    assert got == b""
    assert isinstance(error, ChecksumMismatch)
    assert "no sample of it was delivered" in str(error)
    assert "3 times" in str(error)
    assert (error.shard, error.offset) == (url, 0)
    assert after == (b"next", None)
    assert sum(request.path == "/x.tar" and request.range == "bytes=0-65535" for request in server.requests) == 3
    assert snapshot(counters).verified_shards == 0


def test_a_file_of_checksums_that_is_not_there_is_not_asked_for_again(
    server: Origin, caplog: pytest.LogCaptureFixture
) -> None:
    """A shard that is refused is, for half a minute; but most shards have one file beside them at most."""
    url = server.add("x.tar", SHARD)
    server.add("SHA256SUMS", beside(SHARD))
    counters = Counters()
    patient = RetryPolicy(refusal_timeout_s=20.0, base_s=0.001, cap_s=0.01)
    assert bytes_of([url], always(retry=patient), counters) == [SHARD]
    assert snapshot(counters).verified_shards == 1
    assert "asking again" not in caplog.text


def test_samples_as_a_user_takes_them(server: Origin) -> None:
    good = make_tar((f"{i}.bin", data(30_000, i)) for i in range(20))
    url = serve(server, good, corrupt_at=5000)
    seen: list[Exception] = []
    urls = [url, server.add("y.tar", good)]
    dataset = wds.WebDataset(
        urls, handler=lambda exn: not seen.append(exn), shardshuffle=False, transfer={"verify": "always"}
    )
    assert [sample["__key__"] for sample in dataset] == [str(i) for i in range(20)]
    assert [type(exn) for exn in seen] == [ChecksumMismatch]


def test_an_error_on_the_way_delivers_nothing(server: Origin) -> None:
    url = serve(server, cut_after=0, when=has_the_byte)
    ((got, error),) = outcomes([url], always())
    assert got == b""
    assert isinstance(error, TransferError)
    assert not isinstance(error, ChecksumMismatch)


def test_more_than_memory_goes_to_the_cache_s_folder(server: Origin, tmp_path: Path) -> None:
    big = data(5 * MIB)  # the bound is a quarter of the budget: 2 MiB
    url = serve(server, big, corrupt_at=4 * MIB, times=1)
    assert bytes_of([url], always()) == [big]
    gone = tmp_path / "gone"
    cache = DiskCache(gone)
    with open_shards([url], config=always(), cache=cache) as reader:
        shard = next(reader)
        assert b"".join(bytes(piece) for piece in iter(shard.read, None)) == big
    assert [path.read_bytes() for path in gone.rglob("*.tar") if path.is_file()] == [big]


def test_no_room_is_said(server: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent/folder")
    (_, error), after = outcomes([serve(server, data(5 * MIB)), server.add("y.tar", b"next")], always())
    assert isinstance(error, StorageError)
    assert "TMPDIR" in str(error)
    assert after == (b"next", None)


def test_a_cache_keeps_only_what_was_good(server: Origin, tmp_path: Path) -> None:
    url = serve(server, corrupt_at=FLIP_AT, times=1, when=has_the_byte)
    hits = []
    for _ in range(3):
        counters = Counters()
        with open_shards([url], config=always(), cache=DiskCache(tmp_path), stats=counters) as reader:
            assert b"".join(bytes(piece) for piece in iter(next(reader).read, None)) == SHARD
            assert next(reader, None) is None
        hits.append((snapshot(counters).cache_hits, snapshot(counters).verified_shards))
    # Healed, but what had been written down was not: the next one keeps it, and what is kept is not compared again.
    assert hits == [(0, 1), (0, 1), (1, 0)]


def test_local_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good, bad, plain = (tmp_path / name for name in ("x.tar", "y.tar", "z.tar"))
    for path in (good, bad, plain):
        path.write_bytes(SHARD)
    (tmp_path / "x.tar.sha256").write_bytes(beside(SHARD))
    (tmp_path / "y.tar.md5").write_text("0" * 32)
    counters = Counters()
    found = outcomes([str(good), str(bad), str(plain)], always(), counters)
    assert [(got, type(error)) for got, error in found] == [
        (SHARD, type(None)),
        (b"", ChecksumMismatch),
        (SHARD, type(None)),
    ]
    assert "y.tar.md5" in str(found[1][1])
    assert snapshot(counters).verified_shards == 1
    (told,) = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING and "once" in record.msg
    ]
    assert "1 of 2 shards" in told  # the bad one is an error of its own
    assert str(plain) in told
    assert "sha256sum" in told


def test_what_nobody_vouches_for_is_handed_on_as_it_comes(caplog: pytest.LogCaptureFixture) -> None:
    assert bytes_of(["pipe:printf hello", "pipe:printf again"], always()) == [b"hello", b"again"]
    assert sum("2 of 2 shards could not be verified" in message for message in caplog.messages) == 1


def test_left_and_closed(server: Origin) -> None:
    url = serve(server)
    with open_shards([url, url, url], config=always()) as reader:
        first = next(reader)
        assert first.read() is not None
        first.close()
        assert first.read() is None
        second = next(reader)
        piece = second.read()
        assert piece is not None
        assert bytes(piece) == SHARD[: len(piece)]
        third = next(reader)
        assert third.read() is not None
        reader.close()
        with pytest.raises(ReaderClosed):
            third.read()
    gc.collect()


def test_closed_while_its_store_is_asked(server: Origin) -> None:
    url = server.add("x.tar", SHARD)
    server.behave(when=lambda request: request.method == "HEAD", stall_after=-1)
    reader = open_shards([url], config=always())
    failed: list[BaseException] = []

    def read() -> None:
        try:
            next(reader).read()
        except WdsError as exn:
            failed.append(exn)

    thread = threading.Thread(target=read)
    thread.start()
    server.wait_until(lambda here: any(request.method == "HEAD" for request in here.requests))
    reader.close()
    thread.join(10)
    server.release()
    assert not thread.is_alive()
    assert [type(exn) for exn in failed] == [ReaderClosed]


def test_closed_while_a_file_beside_it_is_read(server: Origin) -> None:
    url = server.add("x.tar", SHARD)
    server.behave(path="*.sha256", stall_after=-1)
    reader = open_shards([url], config=always())
    failed: list[BaseException] = []

    def read() -> None:
        try:
            next(reader).read()
        except WdsError as exn:
            failed.append(exn)

    thread = threading.Thread(target=read)
    thread.start()
    server.wait_until(lambda here: any(request.path.endswith(".sha256") for request in here.requests))
    reader.close()
    thread.join(10)
    ended = not thread.is_alive()
    server.release()
    thread.join(10)
    assert ended
    assert [type(exn) for exn in failed] == [ReaderClosed]


def test_a_checksum_that_cannot_be_asked_for_is_no_checksum_that_fits(server: Origin) -> None:
    """Where the file beside a shard may be there and cannot be read, nothing is known to be good."""
    url = server.add("x.tar", SHARD)
    server.behave(path="*.sha256", status=500)
    ((got, error),) = outcomes([url], always())
    assert got == b""
    assert isinstance(error, TransferError)
    assert "x.tar.sha256" in str(error)
    server.forget()
    assert bytes_of([url], always()) == [SHARD]  # not there: told once, and handed on


def fill(spool: Spool, content: bytes, step: int) -> None:
    for at in range(0, len(content), step):
        spool.write(memoryview(content)[at : at + step])


def drain(spool: Spool) -> bytes:
    return b"".join(bytes(piece) for piece in iter(spool.read, None))


@pytest.mark.parametrize("size", [0, 1, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 3 * MIB + 5])
def test_round_trips(size: int, tmp_path: Path) -> None:
    spool, before = Spool(64 * KIB, str(tmp_path)), open_fds()
    for seed in range(2):  # the same memory twice
        content = data(size, seed)
        fill(spool, content, 40_000)
        assert spool.size == size
        assert drain(spool) == content
        assert spool.read() is None
        assert not list(tmp_path.iterdir())  # the file has no name
        spool.clear()
    assert open_fds() == before


def test_no_room(tmp_path: Path) -> None:
    spool = Spool(64 * KIB, str(tmp_path / "missing"))
    fill(spool, data(64 * KIB), 64 * KIB)
    with pytest.raises(OSError, match="missing"):
        spool.write(memoryview(b"x"))
    spool.clear()
