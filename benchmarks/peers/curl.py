"""curl with sixteen connections, the bytes thrown away."""

from __future__ import annotations

import subprocess

from benchmarks.peer import Job, Peer, Run

__all__ = ["PEER"]


def samples(job: Job) -> Run:
    """The bytes of all shards."""
    config = "".join(f'url = "{url}"\noutput = "/dev/null"\n' for url in job.urls)
    command = ["curl", "-sSf", "-Z", "--parallel-immediate", "--parallel-max", "16", "-K", "-"]

    def run() -> int:
        done = subprocess.run(command, input=config.encode(), stderr=subprocess.PIPE, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.decode(errors="replace"))
        return 0

    return run


PEER = Peer("curl -Z, 16 connections, raw bytes", tasks={"samples": samples}, programs=("curl",), floor=True)
