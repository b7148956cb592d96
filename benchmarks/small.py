"""``python -m benchmarks.small``: samples of two fields that are together under 200 bytes."""

from __future__ import annotations

from benchmarks.corpus import tiny
from benchmarks.harness import Bench, command

__all__ = ["main"]


@command("small", shards=20)
def main(bench: Bench) -> None:
    """Samples per second of CPU where samples are tiny (--shards: of 25,000 samples each)."""
    corpus = tiny(bench.root, bench.shards, 2_500 if bench.quick else 25_000)
    with bench.nginx() as server:
        contenders = ["wds_async", "wds_async pipeline", "webdataset", "webdataset pipeline"]
        results = bench.read("small samples", server, corpus, contenders)
    ours, theirs = results.get("wds_async"), results.get("webdataset")
    if ours and theirs:
        measure = "samples per CPU second: ours over webdataset's"
        bench.ratio_bar(measure, 10, ours.samples_per_cpu_s, theirs.samples_per_cpu_s)
    bench.memory_bar("small samples", ours)


if __name__ == "__main__":
    main()
