"""The loop thread: one a process, there while a reader is open and a moment longer."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.servers import Origin, Tls
from tests.transfer.reading import KIB, MIB, QUICK, bytes_of, data, outcomes, quick
from wds_async.config import RetryPolicy
from wds_async.errors import FetchTimeout, ReaderClosed, TransferError
from wds_async.transfer import engine as bridge
from wds_async.transfer.reader import ShardReader, open_shards
from wds_async.transfer.resources import Resources

PART = 256 * KIB


def _engines() -> int:
    return sum(thread.name == "wds-async" for thread in threading.enumerate())


def _join_engines() -> None:
    """End the engine that waits for another reader, and wait for those that are still closing."""
    bridge.end_idle()
    for thread in threading.enumerate():
        if thread.name == "wds-async":
            thread.join(10)


def test_nothing_runs_before_the_first_shard_is_asked_for(origin: Origin) -> None:
    reader = open_shards([origin.add("x.tar", b"x")])
    assert _engines() == 0
    assert not origin.requests
    next(reader)
    assert _engines() == 1
    reader.close()
    reader.close()
    assert _engines() == 1
    for thread in threading.enumerate():
        if thread.name == "wds-async":
            thread.join(20)  # it ends by itself
    assert _engines() == 0


def test_readers_share_one_engine(origin: Origin) -> None:
    urls = [origin.add(f"{i}.tar", data(3 * PART, i)) for i in range(6)]
    with open_shards(urls) as outer:
        for _ in outer:
            with open_shards(urls) as inner:
                assert sum(1 for shard in inner if shard.read()) == 6
                assert _engines() <= 1
    _join_engines()
    assert _engines() == 0


def test_the_next_epoch_takes_the_engine_over(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    url = origin.add("x.tar", data(3 * PART))

    def engine_of(budget_bytes: int) -> bridge.Engine:
        with open_shards([url], config=quick(budget_bytes=budget_bytes)) as reader:
            for shard in reader:
                while shard.read() is not None:
                    pass
            return reader.engine()

    first = engine_of(2 * MIB)
    connections = origin.connections
    mapped = first.slabs.mapped_bytes
    for _ in range(3):
        assert engine_of(2 * MIB) is first
    assert (origin.connections, first.slabs.mapped_bytes) == (connections, mapped)
    second = engine_of(4 * MIB)
    assert second is not first
    monkeypatch.setenv("AWS_PROFILE", "another")
    third = engine_of(4 * MIB)
    assert third is not second
    assert [engine.alive for engine in (first, second, third)] == [False, False, True]
    bridge.end_idle()
    assert _engines() == 0
    assert third.slabs.mapped_bytes == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")
def test_no_idle_engine_is_forked(origin: Origin) -> None:
    assert bytes_of([origin.add("x.tar", b"x")]) == [b"x"]
    assert _engines() == 1
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert _engines() == 0


def test_garbage_collection_ends_the_thread(origin: Origin) -> None:
    reader = open_shards([origin.add(f"{i}.tar", data(3 * PART)) for i in range(9)])
    shard = next(reader)
    shard.read()
    cycle: list[object] = [reader, shard]
    cycle.append(cycle)
    engine = reader.engine()
    del reader, shard, cycle
    gc.collect()
    origin.wait_until(lambda server: server.in_flight == 0)
    assert not engine._pumps


def test_a_collection_within_acquire_does_not_deadlock(origin: Origin) -> None:
    # A garbage collection at the worst moment: the finalizer of a reader runs on the thread that holds the lock.
    reader = open_shards([origin.add("x.tar", b"x")])
    next(reader)

    def collect() -> None:
        with bridge._lock:
            reader.close()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    deadline = time.monotonic() + 20
    while _engines() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _engines() == 0


def test_threads_that_open_and_close_at_the_same_time(origin: Origin) -> None:
    contents = [data(100_000, i) for i in range(4)]
    urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(8):
                assert bytes_of(urls) == contents
                with open_shards(urls) as reader:
                    next(reader)
        except BaseException as exn:
            failures.append(exn)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
    _join_engines()
    assert _engines() == 0


def test_the_switch_interval_is_given_back(origin: Origin) -> None:
    _join_engines()
    before = sys.getswitchinterval()
    with open_shards([origin.add("x.tar", b"x")]) as reader:
        next(reader)
        assert sys.getswitchinterval() < before
    _join_engines()
    assert sys.getswitchinterval() == before
    sys.setswitchinterval(0.003)
    try:
        with open_shards([origin.url("x.tar")]) as reader:
            next(reader)
            assert sys.getswitchinterval() == pytest.approx(0.003)
        _join_engines()
        assert sys.getswitchinterval() == pytest.approx(0.003)
    finally:
        sys.setswitchinterval(before)


def test_without_uvloop(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    contents = [data(3 * PART, i) for i in range(4)]
    urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    origin.behave(probability=0.2, cut_after=10_000)
    origin.behave(probability=0.2, hang_up="silent")
    assert bytes_of(urls, quick(retry=quick().retry.__class__(max_attempts=30, base_s=0.001))) == contents


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_forgets_its_parents_engine(origin: Origin) -> None:
    content = data(40 * PART)
    url = origin.add("x.tar", content)
    with open_shards([url], config=quick(budget_bytes=1 * MIB)) as reader:
        shard = next(reader)
        got = bytearray(shard.read() or b"")
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                try:
                    shard.read()
                except ReaderClosed:
                    reader.close()
                    code = 0 if bytes_of([url], quick()) == [content] else 2
            finally:
                os._exit(code)
        while (piece := shard.read()) is not None:
            got += piece
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert got == content


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")
def test_a_child_reads_no_piece_of_its_parent(origin: Origin) -> None:
    """It lies in memory that both share, and that the parent's engine fills anew."""
    with open_shards([origin.add("x.tar", data(PART))], config=quick()) as reader:
        piece = next(reader).read()
        assert piece is not None
        before = bytes(piece)
        pid = os.fork()
        if pid == 0:
            try:
                bytes(piece)
            except ValueError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert bytes(piece) == before


def test_each_reader_tries_as_long_as_it_was_told(origin: Origin) -> None:
    """Whoever came first, and made the engine that they share."""
    good, bad = origin.add("x.tar", data(4 * PART)), origin.add("bad.tar", b"")
    origin.behave(path="/bad.tar", status=503)
    patient = RetryPolicy(max_attempts=20, base_s=0.001, cap_s=0.002)
    with open_shards([good, good], config=quick(retry=patient)) as first:
        next(first).read()
        ((_, error),) = outcomes([bad])
    assert isinstance(error, TransferError)
    assert f"after {QUICK.max_attempts} attempts" in str(error)


def test_leaving_while_everything_stalls(origin: Origin) -> None:
    urls = [origin.add(f"{i}.tar", data(3 * PART)) for i in range(20)]
    origin.behave(stall_after=1000)
    with open_shards(urls, config=quick(stall_timeout_s=300.0)) as reader:
        next(reader)
        origin.wait_until(lambda server: server.in_flight > 0)
    origin.release()


def test_a_closed_reader_says_so(origin: Origin) -> None:
    reader: ShardReader = open_shards([origin.add("x.tar", data(10 * PART))] * 2)
    shard = next(reader)
    reader.close()
    with pytest.raises(ReaderClosed):
        shard.read()
    with pytest.raises(ReaderClosed):
        next(reader)
    shard.close()


def test_closed_while_the_next_is_asked_for(origin: Origin) -> None:
    """That is no end: who reads on would take it for a whole epoch."""
    url = origin.add("x.tar", b"x")

    def shards() -> Iterator[str]:
        yield url
        reader.close()

    reader = open_shards(shards(), lookahead=1)
    next(reader)
    with pytest.raises(ReaderClosed):
        next(reader)


def test_the_end_is_sticky(origin: Origin) -> None:
    with open_shards([origin.add("x.tar", b"x")]) as reader:
        shard = next(reader)
        assert shard.read() is not None
        assert [shard.read() for _ in range(3)] == [None] * 3
        with pytest.raises(StopIteration):
            next(reader)
    assert outcomes([]) == []


def _read_all(reader: ShardReader) -> None:
    for shard in reader:
        shard.read()


class Broken:
    """Takes connections and lets every handshake fail: ``silent`` never answers, ``reset`` and ``garbage`` say so."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.taken: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"https://localhost:{self._listening.getsockname()[1]}/x.tar"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Broken:
        return self

    def __exit__(self, *exc: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()
        for client in self.taken:
            client.close()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            self.taken.append(client)
            if self.how == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
            elif self.how == "garbage":
                client.sendall(b"HTTP/1.1 400 no\r\n\r\n")


@pytest.mark.parametrize("uvloop", [True, False])
@pytest.mark.parametrize("how", ["silent", "reset", "garbage"])
@pytest.mark.parametrize("after_s", [0.0, 0.01, None])
def test_leaving_within_handshakes(
    how: str, uvloop: bool, after_s: float | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not uvloop:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    with Broken(how) as server, caplog.at_level(logging.DEBUG, "asyncio"):
        for _ in range(3 if after_s is None else 1):
            reader = open_shards([server.url] * 12, config=quick(connect_timeout_s=0.1))
            leaving = threading.Timer(after_s or 0, reader.close)
            if after_s is not None:
                leaving.start()
            with pytest.raises((TransferError, FetchTimeout, ReaderClosed)):
                _read_all(reader)
            reader.close()
            if after_s is not None:
                leaving.join()
            _join_engines()
        gc.collect()  # what is left open warns now
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("uvloop", [True, False])
def test_a_certificate_that_is_not_trusted(
    tls: Tls, uvloop: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not uvloop:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with Origin({"/x.tar": b"x"}, tls=tls.server_context()) as origin:
        for _ in range(10):
            found = outcomes([origin.url("x.tar")] * 6)
            assert all("certificate" in str(error) for _, error in found)
        _join_engines()
        gc.collect()
        monkeypatch.setenv("SSL_CERT_FILE", str(tls.ca))
        assert bytes_of([origin.url("x.tar")] * 6) == [b"x"] * 6
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert not [line for line in said if "incoming" not in line]


def test_a_backend_that_does_not_close_holds_nobody_up() -> None:
    class Hangs:
        async def close(self) -> None:
            await asyncio.Event().wait()

    async def main() -> None:
        resources = Resources(quick(), asyncio.get_running_loop())
        resources.backends = Hangs()  # type: ignore[assignment]
        async with asyncio.timeout(20):
            await resources.close_backends(0.05)
            await resources.close()

    asyncio.run(main())
