"""A consumer without a loader: what its own computing takes."""

from __future__ import annotations

from benchmarks.peer import Job, Peer, Run

__all__ = ["PEER"]


def compute(job: Job) -> Run:
    """Compute for as many samples as there are."""
    return lambda: job.count(range(job.samples))


PEER = Peer("computes as the consumer of `busy` does, and reads nothing", tasks={"compute": compute})
