"""``python -m benchmarks.loader``: DataLoader workers over HTTP, decoding pictures or passing on batches of bytes."""

from __future__ import annotations

from benchmarks.corpus import SHARD_BYTES, image_like, pictures
from benchmarks.decode import DISTINCT, photo_jpeg
from benchmarks.harness import Bench, command

__all__ = ["main"]


@command("loader", shards=160)
def main(bench: Bench) -> None:
    """Samples per second through torch's DataLoader: 2 workers that decode, 8 that make batches of 256 raw samples.

    Ten gigabytes are read for the second, so that starting eight workers, which takes a second or two, counts little.
    """
    photos = pictures(bench.root, 8, 40 if bench.quick else 400, [photo_jpeg(seed) for seed in range(DISTINCT)])
    raw = image_like(bench.root, bench.shards, 2_000_000 if bench.quick else SHARD_BYTES, distinct=False)
    with bench.nginx() as server:
        decoded = bench.read("2 workers, torchrgb, batches of 32", server, photos, _both("decoded"))
        passed_on = bench.read("8 workers, batches of 256 raw samples", server, raw, _both("raw"))
    for measure, floor, found, kind in (
        ("2 workers, decoded: throughput, ours over webdataset's", 1.3, decoded, "decoded"),
        ("8 workers, batches of 256 raw samples: throughput, ours over webdataset's", 3, passed_on, "raw"),
    ):
        ours, theirs = found.get(f"wds_async {kind}"), found.get(f"webdataset {kind}")
        if ours and theirs:
            bench.ratio_bar(measure, floor, ours.mb_s, theirs.mb_s)


def _both(kind: str) -> list[str]:
    return [f"wds_async {kind}", f"webdataset {kind}"]


if __name__ == "__main__":
    main()
