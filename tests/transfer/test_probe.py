"""A look at shards: one ranged GET each, judged as the engine judges, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.servers import BEFORE_HEAD, Origin
from tests.transfer.reading import MIB, data, open_fds, quick, snapshot, spans
from wds_async.config import RetryPolicy
from wds_async.errors import (
    AccessDenied,
    FetchTimeout,
    PipeError,
    ShardNotFound,
    StorageError,
    TransferError,
    UnsafeContent,
    UrlError,
)
from wds_async.storage.options import StorageOptions
from wds_async.transfer import probe as module
from wds_async.transfer.probe import HEAD_BYTES, Probed, describe, probe
from wds_async.transfer.stats import Counters

posix = pytest.mark.skipif(os.name != "posix", reason="signals and FIFOs as POSIX has them")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("WDS_REWRITE", "GOPEN_REWRITE", "WDS_SECURE", "WDS_DIRECT", "AIS_ENDPOINT", "USE_AIS_FOR", "HTTP_PROXY")
    for name in (*names, "http_proxy"):
        monkeypatch.delenv(name, raising=False)


def look(*urls: str, **more: Any) -> list[Probed]:
    return list(probe(urls, config=more.pop("config", quick()), **more))


def test_one_ranged_get_a_shard(origin: Origin) -> None:
    contents = [data(3 * MIB, seed) for seed in range(40)]
    urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    counters = Counters()
    found = look(*urls, counters=counters)
    assert [one.url for one in found] == urls
    assert [one.head for one in found] == [content[:HEAD_BYTES] for content in contents]
    assert {one.size for one in found} == {3 * MIB}
    assert all(one.error is None and one.checked and one.version.startswith("etag ") for one in found)
    assert all(0 < one.seconds < 10 for one in found)
    assert sorted(request.path for request in origin.requests) == sorted(f"/{i}.tar" for i in range(40))
    assert set(spans(origin.requests)) == {(0, HEAD_BYTES)}
    assert origin.most_in_flight <= 32
    assert origin.connections <= 32
    assert snapshot(counters).wire_bytes == 40 * HEAD_BYTES


def test_many_at_once_but_not_more_than_connections(origin: Origin) -> None:
    origin.latency_s = 0.1
    urls = [origin.add(f"{i}.tar", b"x" * 1000) for i in range(24)]
    assert all(one.error is None for one in look(*urls, config=quick(connections=8)))
    assert origin.most_in_flight == 8


def test_short_and_empty_shards(origin: Origin, tmp_path: Path) -> None:
    (tmp_path / "empty.tar").touch()
    short, empty = origin.add("short.tar", b"short"), origin.add("empty.tar", b"")
    found = look(short, empty, str(tmp_path / "empty.tar"))
    assert [(one.head, one.size, one.error) for one in found] == [(b"short", 5, None), (b"", 0, None), (b"", 0, None)]


def test_what_is_wrong_is_said_in_its_place(origin: Origin) -> None:
    good = origin.add("good.tar", b"good")
    origin.behave(path="/denied.tar", status=403)
    found = look(good, origin.url("missing.tar"), origin.url("denied.tar"), "nonsense://x", good)
    assert [type(one.error) for one in found] == [type(None), ShardNotFound, AccessDenied, UrlError, type(None)]
    assert "/missing.tar at byte 0: the server answered 404" in str(found[1].error)
    assert found[3].location is None
    assert len(origin.requests) == 4


def test_transient_faults_are_tried_again_as_in_a_training(origin: Origin) -> None:
    url = origin.add("x.tar", b"x" * 2000)
    origin.behave(status=503, times=2)
    counters = Counters()
    assert look(url, counters=counters)[0].error is None
    assert snapshot(counters).retries == 2
    origin.forget()
    origin.behave(status=503)
    (found,) = look(url)
    assert isinstance(found.error, TransferError)
    assert "after 3 attempts" in str(found.error)


def test_redirects_are_followed_and_credentials_stay_behind(origin: Origin) -> None:
    with Origin({"/x.tar": b"there" * 200}) as other:
        url = origin.add("x.tar", b"here").replace("http://", "http://user:secret@")
        origin.behave(redirect=other.url("x.tar"))
        (found,) = look(url)
        assert found.head == (b"there" * 200)[:HEAD_BYTES]
        assert "authorization" in origin.requests[0].headers
        assert "authorization" not in other.requests[0].headers


@pytest.mark.parametrize("fault", [{"ignore_range": True}, {"chunked": True}, {"gzip": True}])
def test_a_server_without_ranges_is_left_after_the_first_bytes(origin: Origin, fault: dict[str, bool]) -> None:
    content = data(16 * MIB)
    url = origin.add("x.tar", content)
    origin.behave(rate_bytes_s=MIB // 2, **fault)  # the whole would take half a minute
    counters, _began = Counters(), time.monotonic()
    (found,) = look(url, counters=counters, config=quick(hedge_share=0))
    assert (found.head, found.error) == (content[:HEAD_BYTES], None)
    assert snapshot(counters).wire_bytes == HEAD_BYTES
    origin.wait_until(lambda server: server.in_flight == 0, 3)  # aborted, and not read to its end
    assert len(origin.requests) <= 3


def test_a_server_without_ranges_is_known_after_its_first_answer(origin: Origin) -> None:
    urls = [origin.add(f"{i}.tar", data(MIB, i)) for i in range(20)]
    origin.behave(ignore_range=True)
    found = look(*urls, config=quick(connections=1))
    assert all(one.error is None and len(one.head) == HEAD_BYTES for one in found)
    assert len(origin.requests) == 21


def test_files_and_other_filesystems(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    content = data(10_000)
    (tmp_path / "x.tar").write_bytes(content)
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/probe/x.tar", content)
    try:
        urls = [str(tmp_path / "x.tar"), f"file://{tmp_path}/x.tar", "memory://probe/x.tar"]
        found = look(*urls, str(tmp_path / "none.tar"), str(tmp_path), "memory://probe/none.tar")
    finally:
        memory.rm("/probe", recursive=True)
    assert [one.head for one in found[:3]] == [content[:HEAD_BYTES]] * 3
    assert [one.size for one in found[:3]] == [10_000] * 3
    assert isinstance(found[3].error, ShardNotFound)
    assert "directory" in str(found[4].error)
    assert isinstance(found[5].error, ShardNotFound)


def test_what_can_be_read_only_once_is_not_read(tmp_path: Path, openers: None) -> None:
    from wds_async.storage.user_openers import gopen_schemes

    def opened(url: str, mode: str = "rb", bufsize: int = 0, **_: Any) -> Any:
        raise AssertionError("it was opened")

    gopen_schemes["mine"] = opened
    urls = [f"pipe:touch {tmp_path}/ran", "-", "mine://x"]
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "fifo")
        urls.append(str(tmp_path / "fifo"))
    found = look(*urls)
    assert all(not one.checked and one.why and one.error is None for one in found)
    assert not (tmp_path / "ran").exists()
    assert PipeError not in [type(one.error) for one in found]


def test_urls_are_rewritten_and_refused_as_everywhere(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin.add("b/x.tar", b"x" * 600)
    monkeypatch.setenv("WDS_REWRITE", f"gs://={origin.base}/")
    (found,) = look("gcs://b/x.tar")
    assert found.error is None
    assert found.url == "gcs://b/x.tar"
    assert found.location is not None
    assert found.location.target == origin.url("b/x.tar")
    monkeypatch.delenv("WDS_REWRITE")
    monkeypatch.setenv("WDS_SECURE", "1")
    assert isinstance(look(str(tmp_path / "x.tar"))[0].error, UnsafeContent)


def test_a_deadline_for_each(origin: Origin) -> None:
    slow, good = origin.add("slow.tar", b"slow"), origin.add("good.tar", b"good")
    origin.behave(path="/slow.tar", stall_after=BEFORE_HEAD)
    found = look(slow, good, timeout_s=0.3)
    assert isinstance(found[0].error, FetchTimeout)
    assert "no answer within 0.3 s" in str(found[0].error)
    assert found[1].head == b"good"


def test_a_deadline_between_attempts_says_what_was_wrong(origin: Origin) -> None:
    url = origin.add("x.tar", b"x")
    origin.behave(status=503, headers={"retry-after": "20"})
    (found,) = look(url, timeout_s=0.3, config=quick(retry=RetryPolicy()))
    assert isinstance(found.error, FetchTimeout)
    assert "no answer within 0.3 s. The last attempt failed: the server answered 503" in str(found.error)


def test_a_stall_ends_without_a_deadline_too(origin: Origin) -> None:
    url = origin.add("slow.tar", b"slow")
    origin.behave(stall_after=BEFORE_HEAD)
    (found,) = look(url, config=quick(stall_timeout_s=0.2, retry=RetryPolicy(max_attempts=1)))
    assert isinstance(found.error, FetchTimeout)
    assert "no byte arrived" in str(found.error)


def test_nothing_is_started_before_it_is_asked_and_nothing_is_left(origin: Origin) -> None:
    urls = [origin.add(f"{i}.tar", b"x" * 1000) for i in range(50)]
    threads, files = set(threading.enumerate()), open_fds()
    results = probe(urls, config=quick())
    assert set(threading.enumerate()) == threads
    assert not origin.requests
    assert next(results).error is None
    assert "wds-async-probe" in {thread.name for thread in threading.enumerate()}
    results.close()  # type: ignore[attr-defined]
    assert "wds-async-probe" not in {thread.name for thread in threading.enumerate()}
    origin.wait_until(lambda server: server.open_connections == 0, 3)
    assert open_fds() <= files


def test_left_while_a_server_does_not_answer(origin: Origin) -> None:
    first, second = origin.add("0.tar", b"x"), origin.add("1.tar", b"x")
    origin.behave(path="/1.tar", stall_after=BEFORE_HEAD)
    results = probe([first, second], config=quick(stall_timeout_s=300.0))
    next(results)
    origin.wait_until(lambda server: len(server.requests) == 2)
    results.close()  # type: ignore[attr-defined]
    origin.release()
    origin.wait_until(lambda server: server.open_connections == 0, 3)


def test_inside_a_running_loop(origin: Origin) -> None:
    url = origin.add("x.tar", b"x" * 1000)

    async def program() -> list[Probed]:
        return look(url)

    assert asyncio.run(program())[0].head == b"x" * HEAD_BYTES


def test_a_fault_of_the_look_itself_is_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(module, "why_unread", broken)
    with pytest.raises(StorageError, match="the probe of the shards failed: RuntimeError"):
        look(str(tmp_path / "x.tar"))


def test_no_urls() -> None:
    assert look() == []


@posix
def test_ctrl_c_ends_it(origin: Origin) -> None:
    url = origin.add("x.tar", b"x")
    origin.behave(stall_after=BEFORE_HEAD)
    code = f"from wds_async.transfer.probe import probe\nlist(probe([{url!r}]))"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    origin.wait_until(lambda server: len(server.requests) > 0, 20)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert err.strip().endswith(b"KeyboardInterrupt")
    assert process.returncode != 0


def test_descriptions(origin: Origin, tmp_path: Path) -> None:
    url = origin.add("x.tar", b"x").replace("http://", "http://me:secret@")
    http, local, wrong = describe([url, str(tmp_path / "none.tar"), "nonsense://x"], StorageOptions())
    assert http.found is not None
    assert http.found.store == "HTTP"
    assert http.found.endpoint == origin.base
    assert http.found.direct
    assert "secret" not in repr(http)
    assert local.found is not None
    assert local.error is None
    assert isinstance(wrong.error, UrlError)
    assert not origin.requests
