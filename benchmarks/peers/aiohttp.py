"""aiohttp alone: the raw bytes as they come, shard after shard over one connection."""

# ruff: noqa: PLC0415  (a peer's process imports only what that peer needs)

from __future__ import annotations

import asyncio

from benchmarks.peer import Job, Peer, Run

__all__ = ["PEER"]


def samples(job: Job) -> Run:
    """The bytes of all shards."""
    import aiohttp

    async def read() -> int:
        async with aiohttp.ClientSession(read_bufsize=1 << 20) as session:
            for url in job.urls:
                async with session.get(url) as response:
                    response.raise_for_status()
                    async for _ in response.content.iter_any():
                        pass
        return 0

    return lambda: asyncio.run(read())


PEER = Peer("aiohttp, raw bytes", tasks={"samples": samples}, requirements=("aiohttp",), floor=True)
