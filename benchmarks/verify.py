"""``python -m benchmarks.verify``: what comparing checksums costs, from nginx on loopback with Google's header."""

from __future__ import annotations

import base64
import hashlib

from benchmarks.corpus import image_like
from benchmarks.harness import Bench, Job, command
from benchmarks.http import shard_bytes

__all__ = ["main"]

_PIECE_BYTES = 1 << 20


@command("verify")
def main(bench: Bench) -> None:
    """CPU seconds per GB with verify="never", "auto" and "always"."""
    import crc32c  # noqa: PLC0415 (of the installed package)

    corpus = image_like(bench.root, bench.shards, shard_bytes(bench), distinct=False)
    crc, sha256 = 0, hashlib.sha256()
    with open(bench.root / corpus.names[0], "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            crc = crc32c.crc32c(piece, crc)
            sha256.update(piece)
    said = base64.b64encode(crc.to_bytes(4, "big")).decode()
    lines = [f"{sha256.hexdigest()}  {name}\n" for name in corpus.names]
    (bench.root / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
    with bench.nginx(extra=f'add_header x-goog-hash "crc32c={said}";') as store, bench.nginx() as plain:
        urls = {server: [server.url(name) for name in corpus.names] for server in (store, plain)}
        jobs = {
            f"{mode}, CRC-32C": Job("wds_async", urls[store], {"WDS_VERIFY": mode})
            for mode in ("never", "auto", "always")
        }
        jobs["always, SHA256SUMS"] = Job("wds_async", urls[plain], {"WDS_VERIFY": "always"})
        results = bench.read_jobs("checksums", jobs, corpus)
    never, auto, always = (results.get(f"{mode}, CRC-32C") for mode in ("never", "auto", "always"))
    if never and auto:
        more = auto.cpu_s_per_gb - never.cpu_s_per_gb
        bench.bar("auto: CPU s/GB above never", "≤ 0.15", more, more <= 0.15)
    if never and always:
        more = always.cpu_s_per_gb - never.cpu_s_per_gb
        bench.bar("always: CPU s/GB above never", "≤ 1.0", more, more <= 1.0)
    bench.memory_bar("auto", auto)


if __name__ == "__main__":
    main()
