"""Bytes that were turned on their way are noticed, by the checksum that came with them, at the shard's end."""

from __future__ import annotations

import base64
import hashlib
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import crc32c
import pytest

import wds_async as wds
from tests.servers import Origin
from tests.servers.behaviour import Request
from tests.servers.shards import make_tar
from tests.transfer.reading import KIB, bytes_of, data, outcomes, quick, snapshot
from wds_async.errors import ChecksumMismatch, ConfigError
from wds_async.logs import Once
from wds_async.shardcache.cache import DiskCache
from wds_async.storage.base import Checksum
from wds_async.storage.registry import locate
from wds_async.transfer.checksums import Comparison, HeldShard, Spool, usable
from wds_async.transfer.options import Span
from wds_async.transfer.reader import open_shards
from wds_async.transfer.shard_state import ShardState
from wds_async.transfer.stats import Counters

SHARD = data(900 * KIB)
FLIP_AT = 500 * KIB


def hash_of(content: bytes) -> dict[str, str]:
    """The head of an answer as Google's has it."""
    return {"x-goog-hash": f"crc32c={base64.b64encode(crc32c.crc32c(content).to_bytes(4, 'big')).decode()}"}


def stated(content: bytes) -> str:
    """The CRC-32C of ``content`` as a shard's dict has it."""
    return f"{crc32c.crc32c(content):08x}"


def has_the_byte(request: Request) -> bool:
    """Whether it asks for the one that is turned."""
    first, _, last = (request.range or "bytes=0-0").removeprefix("bytes=").partition("-")
    return int(first) <= FLIP_AT <= int(last)


def serve(server: Origin, content: bytes = SHARD, **faults: Any) -> str:
    """The URL of ``content``, with its checksum in every answer, and ``faults`` in some."""
    if faults:
        server.behave(path="/x.tar", headers=hash_of(content), etag='"x"', **faults)
    server.behave(path="/x.tar", headers=hash_of(content), etag='"x"')
    return server.add("x.tar", content)


def test_good_shards_are_counted() -> None:
    with Origin() as server:
        counters = Counters()
        url, other = serve(server), server.add("y.tar", SHARD)
        assert bytes_of([url, other, url], counters=counters) == [SHARD] * 3
    assert snapshot(counters).verified_shards == 2  # nobody said anything of the other


def test_a_flipped_byte_is_an_error_at_the_end() -> None:
    with Origin() as server:
        url, counters = serve(server, corrupt_at=FLIP_AT), Counters()
        found = outcomes([url + "?sig=hush", server.add("y.tar", SHARD)], counters=counters)
    (got, error), after = found
    assert len(got) == len(SHARD)
    assert got[FLIP_AT] == SHARD[FLIP_AT] ^ 0xFF
    assert isinstance(error, ChecksumMismatch)
    assert after == (SHARD, None)
    turned = bytearray(SHARD)
    turned[FLIP_AT] ^= 0xFF
    for told in (
        f"{crc32c.crc32c(bytes(turned)):08x}",
        f"{crc32c.crc32c(SHARD):08x}",
        "crc32c",
        "x-goog-hash",
        "/x.tar",
    ):
        assert told in str(error)
    assert "were delivered" in str(error)
    assert "WDS_VERIFY=always" in str(error)
    assert "hush" not in str(error)
    assert error.offset == 0
    assert error.shard is not None
    assert error.shard.startswith(url)
    assert snapshot(counters).verified_shards == 0


def test_never_looks() -> None:
    with Origin() as server:
        ((got, error),) = outcomes([serve(server, corrupt_at=FLIP_AT)], quick(verify="never"))
    assert error is None
    assert got != SHARD


def test_only_the_cheap_one_unless_asked() -> None:
    wrong = {"repr-digest": f"sha-256=:{base64.b64encode(bytes(32)).decode()}:"}
    with Origin() as server:
        server.behave(headers=wrong)
        counters = Counters()
        assert bytes_of([server.add("x.tar", SHARD)], counters=counters) == [SHARD]
    assert snapshot(counters).verified_shards == 0


def test_a_shard_that_is_left_is_not_compared() -> None:
    with Origin() as server:
        url = serve(server, corrupt_at=10)
        with open_shards([url, server.add("y.tar", SHARD)], config=quick()) as reader:
            next(reader).read()
            rest = next(reader)
            assert b"".join(bytes(piece) for piece in iter(rest.read, None)) == SHARD


@pytest.mark.parametrize("size", [0, 1])
def test_the_smallest(size: int) -> None:
    with Origin() as server:
        counters = Counters()
        assert bytes_of([serve(server, bytes(size))], counters=counters) == [bytes(size)]
    assert snapshot(counters).verified_shards == size  # an empty one has no answer that says anything of it


def test_parts_that_broke_count_once() -> None:
    with Origin(seed=3) as server:
        url, counters = serve(server, cut_after=70_000, probability=0.5, times=8), Counters()
        assert bytes_of([url], counters=counters) == [SHARD]
    assert snapshot(counters).verified_shards == 1
    assert snapshot(counters).retries > 0


@pytest.mark.parametrize("fault", [{"ignore_range": True}, {"chunked": True, "ignore_range": True}])
def test_streamed_objects(fault: dict[str, Any]) -> None:
    with Origin() as server:
        url, counters = serve(server, **fault), Counters()
        assert bytes_of([url], counters=counters) == [SHARD]
        assert snapshot(counters).verified_shards == 1
        server.forget()
        serve(server, corrupt_at=FLIP_AT, **fault)
        ((_, error),) = outcomes([url])
        assert isinstance(error, ChecksumMismatch)


def test_by_another_client() -> None:
    with Origin() as server:
        url, counters = serve(server), Counters()
        assert bytes_of([url], quick(direct=False), counters) == [SHARD]
        assert snapshot(counters).verified_shards == 1


def test_what_is_unpacked_on_the_way_is_not_compared() -> None:
    with Origin() as server:
        assert bytes_of([serve(server, b"other", gzip=True)]) == [b"other"]


def test_each_sum_in_a_field_of_its_own() -> None:
    with Origin() as server:
        head = hash_of(SHARD)["x-goog-hash"]
        server.behave(headers={"x-goog-hash": f"{head}\r\nx-goog-hash: md5={base64.b64encode(bytes(16)).decode()}"})
        counters = Counters()
        assert bytes_of([server.add("x.tar", SHARD)], counters=counters) == [SHARD]
    assert snapshot(counters).verified_shards == 1


def test_no_cache_keeps_a_bad_shard(tmp_path: Path) -> None:
    with Origin() as server:
        url = serve(server, corrupt_at=FLIP_AT, times=1, when=has_the_byte)
        for expected in (ChecksumMismatch, type(None)):
            with open_shards([url], config=quick(), cache=DiskCache(tmp_path)) as reader:
                error: Exception | None = None
                try:
                    for _ in iter(next(reader).read, None):
                        pass
                except ChecksumMismatch as exn:
                    error = exn
            assert type(error) is expected
        kept = [path.read_bytes() for path in tmp_path.rglob("*.tar") if path.is_file()]
    assert kept == [SHARD]


def test_the_handler_is_asked() -> None:
    good = make_tar((f"{i}.bin", data(30_000, i)) for i in range(20))
    seen: list[Exception] = []

    def note(exn: Exception) -> bool:
        seen.append(exn)
        return True

    with Origin() as server:
        serve(server, good, corrupt_at=5000)
        urls = [server.url("x.tar"), server.add("y.tar", good)]
        dataset = wds.WebDataset(urls, handler=note, shardshuffle=False)
        keys = [sample["__key__"] for sample in dataset]
    # All but the last, which was not handed on when the shard ended so; and those of the next shard.
    assert keys == [str(i) for i in range(19)] + [str(i) for i in range(20)]
    assert [type(exn) for exn in seen] == [ChecksumMismatch]


def test_a_checksum_that_comes_later() -> None:
    """Of a copy that another process is fetching, which is read to its end from its store."""
    state, comparison = ShardState(locate("x.tar")), Comparison(lambda state: Checksum("crc32c", b""))
    for piece in (b"12345", b"6789"):
        comparison.add(state, memoryview(piece))
    assert comparison.matches(state) is None
    for digest, good in (("e3069283", True), ("00000000", False)):
        state.checksum = Checksum("crc32c", bytes.fromhex(digest))
        assert comparison.matches(state) is good


def test_a_missing_package_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("wds_async.logs._process", Once())
    monkeypatch.setitem(__import__("sys").modules, "xxhash", None)
    with caplog.at_level(logging.WARNING, "wds_async"):
        assert not usable(Checksum("xxhash", bytes(8)))
        assert not usable(Checksum("xxhash", bytes(8)))
    assert [record for record in caplog.messages if "wds-async[ais]" in record] == caplog.messages[:1]
    assert not usable(Checksum("crc64nvme", bytes(8)))
    assert not usable(None)


def test_an_empty_shard_is_read_again_too() -> None:
    expected, content, counted = Checksum("crc32c", bytes.fromhex("e3069283")), memoryview(b"123456789"), list[bool]()
    state = ShardState(locate("x"))

    def receive() -> None:
        if not held.comparison.matches(state):
            raise held.comparison.error("x")

    def reread(_: Any, comparison: Comparison) -> Any:
        comparison.add(state, content)
        yield content
        assert comparison.matches(state)

    verifier: Any = SimpleNamespace(
        spool=lambda: Spool(4),
        take_back=lambda spool: spool.clear(),
        expected=lambda stream, state: expected,
        reread=reread,
        count=lambda stream, *, matched: counted.append(matched),
    )
    stream: Any = SimpleNamespace(url="x", span=Span())
    held = HeldShard(stream, receive, verifier)
    assert b"".join(bytes(piece) for piece in iter(held.read, None)) == content
    assert counted == [True]


# -- checksums that the list of shards states --------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["auto", "always"])
@pytest.mark.parametrize("direct", [True, False])
def test_a_stated_checksum(verify: str, direct: bool) -> None:
    with Origin() as server:
        url, counters = server.add("x.tar", SHARD), Counters()
        good, bad = {"url": url, "crc32c": stated(SHARD).upper()}, {"url": url, "crc32c": stated(b"other")}
        found = outcomes([good, bad, good], quick(verify=verify, direct=direct), counters)
    assert [got for got, _ in found] == [SHARD, SHARD if verify == "auto" else b"", SHARD]
    assert [type(error) for _, error in found] == [type(None), ChecksumMismatch, type(None)]
    assert f"x.tar: the crc32c of its {len(SHARD)} bytes is {stated(SHARD)}, and its list of shards gives" in str(
        found[1][1]
    )
    assert snapshot(counters).verified_shards == 2


@pytest.mark.parametrize("verify", ["auto", "always"])
def test_a_stated_checksum_counts_and_not_the_stores(verify: str) -> None:
    with Origin() as server:
        server.behave(path="/x.tar", headers=hash_of(b"other"))
        server.add("x.tar.sha256", hashlib.sha256(b"other").hexdigest().encode())
        shard = {"url": server.add("x.tar", SHARD), "crc32c": stated(SHARD)}
        assert bytes_of([shard], quick(verify=verify)) == [SHARD]
        assert {request.path for request in server.requests} == {"/x.tar"}, "nothing else is asked for"


def test_a_stated_checksum_of_a_shard_that_was_damaged_on_the_way_once() -> None:
    with Origin() as server:
        server.behave(path="/x.tar", corrupt_at=FLIP_AT, times=1, when=has_the_byte)
        shard = {"url": server.add("x.tar", SHARD), "crc32c": stated(SHARD)}
        assert bytes_of([shard], quick(verify="always")) == [SHARD]


def test_a_stated_checksum_of_bytes_without_end_or_place(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(SHARD)
    (tmp_path / "empty.tar").write_bytes(b"")
    for url in (f"pipe:cat {tmp_path}/x.tar", f"{tmp_path}/x.tar"):
        good, bad = {"url": url, "crc32c": stated(SHARD)}, {"url": url, "crc32c": "0" * 8}
        assert [type(error) for _, error in outcomes([good, bad])] == [type(None), ChecksumMismatch]
        assert bytes_of([bad], quick(verify="never")) == [SHARD]
        assert bytes_of([{**bad, "start": 5}]) == [SHARD[5:]]
    empty = [{"url": f"{tmp_path}/empty.tar", "crc32c": crc} for crc in ("00000000", "00000001")]
    assert [type(error) for _, error in outcomes(empty)] == [type(None), ChecksumMismatch]


@pytest.mark.parametrize("crc", ["", "1234567", "123456789", "1234567g", 7, b"12345678", "0x345678"])
def test_what_is_no_checksum_is_told_in_its_place(tmp_path: Path, crc: Any) -> None:
    (tmp_path / "x.tar").write_bytes(SHARD)
    with pytest.raises(ConfigError, match=r"x\.tar: crc32c=.*: eight hexadecimal digits"):
        bytes_of([{"url": f"{tmp_path}/x.tar", "crc32c": crc}])
