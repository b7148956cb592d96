"""What comparing checksums costs, from nginx on loopback with Google's header."""

from __future__ import annotations

import base64
import hashlib

from benchmarks.bench import Bench, Row, scenario
from benchmarks.corpus import image_like

__all__ = ["verify"]

_PIECE_BYTES = 1 << 20


@scenario("verify", repeat=3)
def verify(bench: Bench) -> None:
    """CPU seconds per GB with verify="never", "auto" and "always"."""
    import crc32c  # noqa: PLC0415 (of the installed package)

    corpus = bench.make(image_like, bench.shards, bench.shard_bytes, distinct=False)
    crc, sha256 = 0, hashlib.sha256()
    with open(bench.root / corpus.names[0], "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            crc = crc32c.crc32c(piece, crc)
            sha256.update(piece)
    encoded = base64.b64encode(crc.to_bytes(4, "big")).decode()
    lines = [f"{sha256.hexdigest()}  {name}\n" for name in corpus.names]
    (bench.root / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
    rows = [Row("wds_async", f"{mode}, CRC-32C", {}, {"WDS_VERIFY": mode}) for mode in ("never", "auto", "always")]
    with bench.serve(corpus, extra=f'add_header x-goog-hash "crc32c={encoded}";') as source, bench.nginx() as plain:
        urls = [plain.url(name) for name in corpus.names]
        rows.append(Row("wds_async", "always, SHA256SUMS", {"urls": urls}, {"WDS_VERIFY": "always"}))
        results = bench.compare("checksums", source, rows=rows)
    never, auto, always = (results.get(f"{mode}, CRC-32C") for mode in ("never", "auto", "always"))
    if never and auto:
        more = auto.cpu_s_per_gb - never.cpu_s_per_gb
        bench.bar("auto: CPU s/GB above never", "≤ 0.15", more, more <= 0.15)
    if never and always:
        more = always.cpu_s_per_gb - never.cpu_s_per_gb
        bench.bar("always: CPU s/GB above never", "≤ 1.0", more, more <= 1.0)
    bench.memory_bar("auto", auto)
