"""The floor for local files: one reused buffer."""

from __future__ import annotations

from benchmarks.peer import Job, Peer, Run

__all__ = ["PEER"]


def samples(job: Job) -> Run:
    """The bytes of all shards."""

    def run() -> int:
        view = memoryview(bytearray(1 << 20))
        for path in job.urls:
            with open(path, "rb", buffering=0) as file:
                while file.readinto(view):
                    pass
        return 0

    return run


PEER = Peer("a bare readinto loop over local files", tasks={"samples": samples}, schemes=("file",), floor=True)
