"""The cache against a model: in any course of events it serves right bytes, or fails with the reason."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.service.cache.doubles import CHUNK, Bytes, Clock, content, disk_bytes, full_disk, get, make
from wds_async.errors import ObjectChanged, ShardNotFound, TransferError
from wds_async.service.cache.cache import ChunkCache
from wds_async.service.cache.origin import Client

NAMES = st.sampled_from(["a", "b", "c", "d", "e", "f"])
LIMIT = 24 * CHUNK
FRESH_S = 60.0
PLACES = st.integers(0, 9 * CHUNK)
KINDS = st.sampled_from([{}, {}, {}, {"ranged": False}, {"sized": False}, {"identity": ""}])


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.root = Path(tempfile.mkdtemp())
        self.lives = 0
        self.clock = Clock()
        self.run(self.begin())
        self.acceptable: dict[str, set[bytes]] = {}
        """What may be read of a name: what is there, and what was within the freshness."""
        self.version = 0
        self.certain = True
        """Whether the index knows of all that is on disk: half a second of writing may be unknown after a crash."""

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 20))

    async def begin(self) -> None:
        self.origin = Bytes()
        await self.open(self.root / "0")

    async def open(self, folder: Path) -> None:
        how = {"clock": self.clock, "wall": self.clock, "freshness_s": FRESH_S, "stale_while_revalidate_s": 0}
        self.cache: ChunkCache = make(folder, self.origin, LIMIT, most_idle=3, **how)
        await self.cache.start()

    @rule(name=NAMES, chunks=st.integers(0, 40), extra=st.integers(0, 100), how=KINDS)
    def put(self, name: str, chunks: int, extra: int, how: dict[str, Any]) -> None:
        self.version += 1
        data = content(chunks * CHUNK // 2 + extra, self.version)
        self.origin.put(name, data, **{"identity": f"v{self.version}", **how})
        self.acceptable.setdefault(name, set()).add(data)

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        self.origin.things.pop(name, None)

    @rule(broken=st.booleans())
    def reach(self, broken: bool) -> None:
        self.origin.broken = broken

    @rule()
    def time_passes(self) -> None:
        """Beyond the freshness: what is there now is all that may be read, unless the origin cannot be asked."""
        self.clock.now += FRESH_S + 1
        if not self.origin.broken:
            for name in self.acceptable:
                thing = self.origin.things.get(name)
                self.acceptable[name] = set() if thing is None else {thing.data}

    @rule(names=st.lists(NAMES, min_size=1, max_size=4), start=PLACES, count=PLACES)
    def read(self, names: list[str], start: int, count: int) -> None:
        self.run(self.all_read(names, start, None if count > 8 * CHUNK else start + count))

    @rule(names=st.lists(NAMES, min_size=1, max_size=2), start=st.integers(0, 5 * CHUNK))
    def read_with_a_full_disk(self, names: list[str], start: int) -> None:
        with full_disk():
            self.run(self.all_read(names, start, None))
        self.clock.now += 11  # then the disk is tried again

    async def all_read(self, names: list[str], start: int, stop: int | None) -> None:
        await asyncio.gather(*(self.one_read(name, start, stop) for name in names))

    async def one_read(self, name: str, start: int, stop: int | None) -> None:
        try:
            got = await get(self.cache, name, start, stop, client=Client("", name))
        except ShardNotFound:
            assert name not in self.origin.things
        except TransferError:
            assert self.origin.broken
        except ObjectChanged:
            assert len(self.acceptable[name]) != 1 or self.acceptable[name] != {self.origin.things[name].data}
        else:
            assert got in {data[start:stop] for data in self.acceptable.get(name, ())}

    @rule(name=NAMES)
    def leave_early(self, name: str) -> None:
        async def main() -> None:
            with contextlib.suppress(ShardNotFound, TransferError, ObjectChanged), await self.cache.open(name) as found:
                async with contextlib.aclosing(found.pieces()) as pieces:
                    await anext(pieces, None)

        self.run(main())

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        async def main() -> None:
            self.cache.remove(name)

        self.run(main())

    @rule(flushed=st.booleans())
    def crash(self, flushed: bool) -> None:
        """What is on disk at this moment is what the next one finds."""

        async def main() -> None:
            if flushed:
                await self.cache.flush()
            self.certain = self.certain and flushed
            self.lives += 1
            folder = self.root / str(self.lives)
            old = self.cache
            shutil.copytree(self.root / str(self.lives - 1), folder)
            await self.open(folder)
            await old.close()
            shutil.rmtree(self.root / str(self.lives - 1))

        self.run(main())

    @precondition(lambda self: self.lives < 50)
    @rule()
    def restart(self) -> None:
        async def main() -> None:
            await self.cache.close()
            await self.open(self.root / str(self.lives))

        self.run(main())

    @invariant()
    def within_its_size(self) -> None:
        async def main() -> None:
            await self.cache.fetching.quiet()
            stats = self.cache.statistics()
            assert 0 <= stats.bytes <= LIMIT
            assert stats.readers == 0
            assert not self.certain or disk_bytes(self.root / str(self.lives)) <= LIMIT + 8192
            held = sum(entry.held for entry in self.cache.fetching.entries.values())
            assert held <= stats.bytes - stats.probation_bytes
            assert not any(entry.busy for entry in self.cache.fetching.entries.values())

        self.run(main())

    def teardown(self) -> None:
        self.run(self.cache.close())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        shutil.rmtree(self.root)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
