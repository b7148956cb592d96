"""Tables of archives' members: made once, kept within bounds."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator

import pytest

from tests.servers import Origin
from tests.servers.shards import make_tar
from tests.service.serving import Inside, ask
from tests.transfer.reading import data
from wds_async.service.archives import Archives
from wds_async.tar.index import scan

MEMBERS = [(f"{n:03}.bin", data(30_000, n)) for n in range(100)]


@pytest.fixture
def service(origin: Origin) -> Iterator[Inside]:
    origin.add("/d/t.tar", make_tar(MEMBERS))
    with Inside(allow=(origin.base,), buckets={"b": f"{origin.base}/d/"}, private=True) as running:
        yield running


def test_it_is_walked_once_however_many_ask(service: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[str] = []

    def counted(read: Callable[[], memoryview | None], name: str) -> Iterator[tuple[str, int, int]]:
        walked.append(name)
        return scan(read, name)

    monkeypatch.setattr("wds_async.service.archives.scan", counted)
    url = f"{service.base}/v1/objects/b/t.tar?archpath="
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda member: ask(url + member[0])[2] == member[1], MEMBERS[:16]))
    assert all(got)
    assert len(walked) == 1


def test_what_is_no_tar_is_said(service: Inside, origin: Origin) -> None:
    origin.add("/d/x.tar", b"<html>" * 1000)
    origin.add("/d/y.tar", make_tar(MEMBERS)[:100_000])
    origin.add("/d/z.tar.gz", b"")
    assert ask(f"{service.base}/v1/objects/b/x.tar?archpath=a")[0] == 422
    assert ask(f"{service.base}/v1/objects/b/y.tar?archpath=a")[0] == 422
    status, _, body = ask(f"{service.base}/v1/objects/b/z.tar.gz?archpath=a")
    assert (status, b"compressed" in body) == (501, True)


def test_an_origin_that_fails_ends_the_walk(service: Inside, origin: Origin) -> None:
    origin.behave(status=403, when=lambda r: (r.range or "").startswith(f"bytes={2 << 20}-"))
    assert ask(f"{service.base}/v1/objects/b/t.tar?archpath=099.bin")[0] == 403
    origin.forget()
    assert ask(f"{service.base}/v1/objects/b/t.tar?archpath=099.bin")[::2] == (200, MEMBERS[99][1])


def test_memory_is_bounded(service: Inside, origin: Origin) -> None:
    origin.add("/d/u.tar", make_tar(MEMBERS[:60]))
    archives, running = Archives(most=120), service.service

    async def table(name: str) -> int:
        with await running.cache.open(f"{origin.base}/d/{name}") as held:
            return len(await archives.table(running, held))

    async def look() -> list[int]:
        return [await table("t.tar"), await table("u.tar"), await table("u.tar")]

    assert service.call(look()) == [100, 60, 60]
    assert archives._held == 60
