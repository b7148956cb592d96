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
def service(origin: Origin, serve: Callable[..., Inside]) -> Inside:
    origin.add("/d/t.tar", make_tar(MEMBERS))
    return serve()


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
    archives, context = Archives(most=120), service.context

    async def table(name: str) -> int:
        with await context.cache.open(f"{origin.base}/d/{name}") as held:
            return len(await archives.table(held, context.call))

    async def look() -> list[int]:
        return [await table("t.tar"), await table("u.tar"), await table("u.tar")]

    assert service.call(look()) == [100, 60, 60]
    assert sum(map(len, archives._tables.values())) == 60


def test_two_archives_are_scanned_at_once(service: Inside, origin: Origin) -> None:
    """The rest of each archive stalls, so that a scan that has begun stays."""
    tar = make_tar(MEMBERS)
    for number in range(5):
        origin.add(f"/d/{number}.tar", tar)
    origin.behave(path="/d/?.tar", when=lambda r: not (r.range or "").startswith("bytes=0-"), stall_after=-1)
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        urls = [f"{service.base}/v1/objects/b/{number}.tar?archpath=099.bin" for number in range(5)]
        asked = [pool.submit(ask, url) for url in urls]
        origin.wait_until(lambda o: len({r.path for r in o.requests}) == 5)
        origin.wait_until(
            lambda o: len({r.path for r in o.requests if not (r.range or "").startswith("bytes=0-")}) == 2
        )
        archives = service.context.archives
        assert archives._scans.locked()
        origin.forget()
        origin.release()
        assert [one.result()[0] for one in asked] == [200] * 5
    assert not archives._scans.locked()
