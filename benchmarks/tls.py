"""``python -m benchmarks.tls``: the same shards as `benchmarks.http`, over verified TLS."""

from __future__ import annotations

from benchmarks.corpus import image_like
from benchmarks.harness import Bench, command
from benchmarks.http import CONTENDERS, shard_bytes

__all__ = ["main"]


@command("tls")
def main(bench: Bench) -> None:
    """CPU seconds per GB over TLS."""
    corpus = image_like(bench.root, bench.shards, shard_bytes(bench))
    with bench.nginx(tls=True) as server:
        results = bench.read("TLS", server, corpus, CONTENDERS)
    ours, raw = results.get("wds_async"), results.get("aiohttp")
    if ours:
        bench.bar("TLS: CPU s/GB", "≤ 1.5", ours.cpu_s_per_gb, ours.cpu_s_per_gb <= 1.5)
    if ours and raw:
        bar = f"< aiohttp's raw bytes = {raw.cpu_s_per_gb:.2f}"
        bench.bar("TLS: CPU s/GB", bar, ours.cpu_s_per_gb, ours.cpu_s_per_gb < raw.cpu_s_per_gb)
    bench.memory_bar("TLS", ours)


if __name__ == "__main__":
    main()
