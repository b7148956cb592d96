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
from wds_async.transfer.ranges import OpenObject, OpenObjects, facts_of

URL = "http://h/x.tar"


def run(program: Callable[[OpenObjects], Any]) -> None:
    async def main() -> None:
        program(OpenObjects(lambda url: Location(url, url, "http")))

    asyncio.run(main())


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
        obj = versions.fresh(URL)
        sums = {"content-md5": "m", "ais-checksum-value": "v", "x-amz-checksum-crc32c": "c"}
        always = {"etag": '"1"', "last-modified": "then", "content-type": "t", "x-goog-hash": "crc32c=x"}
        obj.state.fields = {**sums, **always, "server": "s", "set-cookie": "secret", "content-length": "10"}
        assert dict(facts_of(obj).fields) == {**sums, **always}
        obj.state.fields["content-range"] = "bytes 0-0/10"
        assert dict(facts_of(obj).fields) == always
        with pytest.raises(TypeError):
            facts_of(obj).fields["etag"] = "x"  # type: ignore[index]

    run(program)
