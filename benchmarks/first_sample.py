"""``python -m benchmarks.first_sample``: from the accepted connection to the first sample, 50 ms to the first byte.

The server's log says when each connection was accepted, so that "after connect" is measured, not guessed."""

from __future__ import annotations

import statistics
import time
from typing import Any

from rich.table import Table

from benchmarks.corpus import image_like
from benchmarks.harness import Bench, child, command
from benchmarks.http import shard_bytes
from tests.servers import Nginx

__all__ = ["main"]

ROUND_TRIP_S = 0.050


def connected(server: Nginx, since: float) -> float:
    """When the connection of the first request after ``since`` was accepted, or ``since`` where it was there
    before (seconds of the epoch, good to a millisecond)."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        entries = [entry for entry in server.log() if entry["end"] - entry["request_s"] >= since - 0.002]
        if entries:
            return max(since, min(float(entry["end"] - entry["connection_s"]) for entry in entries))
        time.sleep(0.01)
    raise RuntimeError("the server logged no request")


@command("first_sample")
def main(bench: Bench) -> None:
    """Time to the first sample, in round trips."""
    corpus = image_like(bench.root, 2, shard_bytes(bench), distinct=False)
    table = Table(title="first sample, 50 ms to the first byte", title_justify="left")
    for title in ("contender", "in a new process", "after connect", "again", "after connect"):
        table.add_column(title, justify="left" if title == "contender" else "right")
    for contender in ("wds_async", "webdataset"):
        if bench.only and contender not in bench.only:
            continue
        turns: list[list[float]] = []
        for _ in range(bench.repeat):
            with bench.nginx(store_like=True, access_log=True) as server:
                job: dict[str, Any] = {"urls": [server.url(n) for n in corpus.names], "measure": "first_sample"}
                times = child({**job, "contender": contender})["times"]
                row = [v for began, ended in times for v in (ended - began, ended - connected(server, began))]
            turns.append(row)
            bench.raw.append({"contender": contender, "s": row})
        middle = [statistics.median(column) for column in zip(*turns, strict=True)]
        table.add_row(contender, *(f"{value * 1000:.0f} ms" for value in middle))
        if contender == "wds_async":
            for title, value in (("", middle[1]), (", second dataset", middle[3])):
                trips = value / ROUND_TRIP_S
                measure = f"first sample after connect, in a new process{title}"
                bench.bar(measure, "≤ 2.5 round trips", trips, trips <= 2.5)
    bench.console.print(table)


if __name__ == "__main__":
    main()
