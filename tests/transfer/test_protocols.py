"""What a reader tells a cache of a shard, and when: whole only after the last byte was good."""

from __future__ import annotations

from typing import Any

import pytest

from tests.servers import Origin
from tests.transfer.reading import KIB, data, quick
from wds_async.errors import WdsError
from wds_async.storage.base import CopiedFile, Location
from wds_async.transfer.options import CachedShard, Limit, ShardCache
from wds_async.transfer.reader import open_shards

SHARD = data(600 * KIB)


class Entry:
    """A `CachedShard` that writes down what it is told."""

    hit, local_path, check = False, None, False

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.content = bytearray()

    def begin(self) -> CopiedFile | None:
        return None

    def lose(self) -> None:
        self.told.append("lost")

    def want(self) -> None:
        self.told.append("wanted")

    def write(self, piece: memoryview) -> None:
        self.content += piece

    def over(self, *, whole: bool = False, modified: float | None = None) -> None:
        assert whole or modified is None
        self.told.append(whole)

    def reject(self) -> None:
        self.told.append("rejected")


class Cache:
    """A `ShardCache` of one shard."""

    def __init__(self) -> None:
        self.shard = Entry()

    def entry(self, location: Location, *, whole: bool = True) -> CachedShard:
        return self.shard


@pytest.mark.parametrize("verify", ["never", "auto", "always"])
@pytest.mark.parametrize("ends", ["well", "cut", "left", "rejected"])
def test_what_a_cache_is_told(ends: str, verify: str) -> None:
    cache: Any = Cache()
    as_protocol: ShardCache = cache
    with Origin() as server:
        url = server.add("x.tar", SHARD)
        if ends == "cut":
            server.behave(cut_after=0, when=lambda request: "bytes=0-" not in (request.range or ""))
        with open_shards([url], config=quick(verify=verify), cache=as_protocol) as reader:
            shard = next(reader)
            try:
                while shard.read() is not None and ends not in ("left", "rejected"):
                    pass
            except WdsError:
                assert ends == "cut"
            if ends == "rejected":
                shard.reject()
    told = cache.shard.told
    assert told[0] == "wanted"
    assert told[1:] == {"well": [True], "cut": [False], "left": [False], "rejected": ["rejected", False]}[ends]
    assert (bytes(cache.shard.content) == SHARD) is (ends == "well")


class Allowance:
    """A `Limit` of so many pieces."""

    def __init__(self, pieces: int) -> None:
        self.left, self.ended = pieces, 0

    def check(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise WdsError("enough")

    def over(self) -> None:
        self.ended += 1


def test_a_limit_ends_the_read(origin: Origin) -> None:
    urls = [origin.add(f"{i}.tar", SHARD) for i in range(3)]
    limit = Allowance(3)
    known: Limit = limit
    with open_shards(urls, config=quick()) as reader:
        reader.limit = known
        shard = next(reader)
        for _ in range(3):
            assert shard.read()
        with pytest.raises(WdsError, match="enough"):
            shard.read()
        with pytest.raises(WdsError, match="enough"):  # nor of another shard
            next(reader).read()
        assert limit.ended == 0
    assert limit.ended == 1
