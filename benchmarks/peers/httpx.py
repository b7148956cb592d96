"""httpx alone: the raw bytes as they come, shard after shard over one connection."""

# ruff: noqa: PLC0415  (a peer's process imports only what that peer needs)

from __future__ import annotations

from benchmarks.peer import Job, Peer, Run

__all__ = ["PEER"]


def samples(job: Job) -> Run:
    """The bytes of all shards."""
    import httpx

    def run() -> int:
        with httpx.Client(timeout=None) as client:
            for url in job.urls:
                with client.stream("GET", url) as response:
                    response.raise_for_status()
                    for _ in response.iter_raw():
                        pass
        return 0

    return run


PEER = Peer("httpx, raw bytes", tasks={"samples": samples}, requirements=("httpx",), floor=True)
