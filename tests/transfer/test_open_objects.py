"""Versions of objects: shared by those who read at the same time, and then forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.transfer.reading import open_fds
from wds_async.storage.base import LocalFile, Location
from wds_async.storage.local import file_version
from wds_async.transfer import ranges as module
from wds_async.transfer.files import FileReader
from wds_async.transfer.ranges import Facts, OpenObject, OpenObjects, facts_of

URL = "http://h/x.tar"


def run(program: Callable[[OpenObjects], Any]) -> None:
    async def main() -> None:
        program(OpenObjects(lambda url: Location(url, url, "http")))

    asyncio.run(main())


def answered(obj: OpenObject, version: str = "etag 1", size: int = 10) -> OpenObject:
    obj.state.version, obj.size = version, size
    return obj


def test_readers_at_the_same_time_share_one() -> None:
    def program(versions: OpenObjects) -> None:
        first = answered(versions.take(URL))
        assert versions.take(URL) is first
        versions.leave(first)
        versions.leave(first)
        assert len(versions) == 1
        assert versions.take(URL) is not first  # nobody reads it any more: what it was says nothing of now
        assert len(versions) == 1

    run(program)


def test_facts_choose_the_version() -> None:
    def program(versions: OpenObjects) -> None:
        former, now = Facts(10, "etag 1", {"etag": '"1"'}), Facts(10, "etag 2")
        first = versions.take(URL, former)
        assert (first.state.version, first.size, first.state.etag) == ("etag 1", 10, '"1"')
        assert versions.take(URL, Facts(10, "etag 1")) is first
        second = versions.take(URL, now)
        assert second is not first
        assert versions.take(URL, now) is second
        versions.leave(first)
        versions.leave(first)  # it was replaced: nobody is given it again
        assert versions.take(URL, now) is second

    run(program)


def test_one_that_failed_is_given_to_nobody() -> None:
    def program(versions: OpenObjects) -> None:
        facts = Facts(10, "etag 1")
        first = versions.take(URL, facts)
        assert versions.take(URL, facts) is first
        versions.leave(first, failed=True)
        second = versions.take(URL, facts)
        assert second is not first
        versions.leave(first)
        versions.leave(second)
        assert len(versions) == 1

    run(program)


def test_what_nobody_reads_is_closed_after_some_seconds(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT", 5)
    path = tmp_path / "x"
    path.write_bytes(b"x")
    file = LocalFile(str(path), 1, file_version(path.stat()))

    def program(versions: OpenObjects) -> None:
        before = open_fds()

        def one(name: str) -> OpenObject:
            obj = versions.take(name)
            obj.state.files[file] = FileReader(file)
            obj.state.files[file].read(memoryview(bytearray(1)), 0)
            return obj

        for number in range(20):
            versions.leave(one(str(number)))
        assert (len(versions), open_fds()) == (5, before + 5)  # no more than that
        read_still = one("still")
        now = asyncio.get_running_loop().time()
        versions.expire(now + 9)
        assert len(versions) == 6
        versions.expire(now + 11)
        assert (len(versions), open_fds()) == (1, before + 1)
        versions.leave(read_still)
        versions.close()
        assert (len(versions), open_fds()) == (0, before)

    run(program)


def test_facts_tell_what_is_of_the_whole_object_only() -> None:
    def program(versions: OpenObjects) -> None:
        obj = answered(versions.fresh(URL))
        sums = {"content-md5": "m", "ais-checksum-value": "v", "x-amz-checksum-crc32c": "c"}
        always = {"etag": '"1"', "last-modified": "then", "content-type": "t", "x-goog-hash": "crc32c=x"}
        obj.state.fields = {**sums, **always, "server": "s", "set-cookie": "secret", "content-length": "10"}
        assert dict(facts_of(obj).fields) == {**sums, **always}
        obj.state.fields["content-range"] = "bytes 0-0/10"
        assert dict(facts_of(obj).fields) == always
        with pytest.raises(TypeError):
            facts_of(obj).fields["etag"] = "x"  # type: ignore[index]

    run(program)


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"content-length": "12"}, 12),
        ({}, None),
        ({"content-length": "12", "content-encoding": "gzip"}, None),
        ({"content-length": "12", "transfer-encoding": "chunked"}, None),
        ({"content-length": "-12"}, None),
    ],
)
def test_the_size_of_what_comes_in_order(fields: dict[str, str], size: int | None) -> None:
    def program(versions: OpenObjects) -> None:
        obj = versions.fresh(URL)
        obj.streamed, obj.state.fields = True, fields
        facts = facts_of(obj)
        assert (facts.size, facts.ranged) == (size, False)

    run(program)
