"""DataLoader workers: batches of undecoded samples, and pictures decoded and cropped into batches."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.bench import Bench, Reading, scenario
from benchmarks.corpus import SHARD_BYTES, image_like, photos

__all__ = ["images", "images_file", "loader", "workers"]

_FEW = ("wds_async", "wds_async_threads", "webdataset", "turboloader", "spdl")
"""Beside noise and other numbers of workers than two; all peers have photos and two."""


@scenario("loader", shards=32)
def loader(bench: Bench) -> None:
    """Undecoded images through a DataLoader with 2 workers, batches of 64."""
    size = 2_000_000 if bench.quick else SHARD_BYTES
    corpus = bench.make(image_like, bench.shards, size, distinct=False)
    with bench.serve(corpus) as source:
        results = bench.compare("undecoded, 2 workers", source, "loader", bench.rows(part=1 / 2), workers=2)
    ours, theirs = results.get("wds_async"), results.get("webdataset")
    if ours and theirs:
        bench.ratio_bar("2 workers, undecoded: CPU, webdataset's over ours", 5, theirs.cpu_s_per_gb, ours.cpu_s_per_gb)
        bench.ratio_bar("2 workers, undecoded: throughput over webdataset's", 4, ours.mb_s, theirs.mb_s)


@scenario("workers", shards=64, repeat=3)
def workers(bench: Bench) -> None:
    """Undecoded images through a DataLoader with 1 to 16 workers, batches of 256.

    Four gigabytes are read, so that starting the workers, which takes up to a second, counts little.
    """
    size = 2_000_000 if bench.quick else SHARD_BYTES
    corpus = bench.make(image_like, max(bench.shards, 16), size, distinct=False)
    with bench.serve(corpus) as source:
        for number in (1, 2, 4, 8, 16):
            rows = bench.rows(["wds_async", "webdataset"], floors=("recv_into",), part=1 / 2)
            results = bench.compare(f"undecoded, {number} workers", source, "loader", rows, workers=number, batch=256)
            ours, theirs = results.get("wds_async"), results.get("webdataset")
            if ours and theirs and number == 8:
                measure = "8 workers, batches of 256 undecoded samples: throughput, ours over webdataset's"
                bench.ratio_bar(measure, 3, ours.mb_s, theirs.mb_s)


def _bars(bench: Bench, case: str, results: Mapping[str, Reading]) -> None:
    ours = results.get("wds_async")
    for name, least in (("webdataset", 2.0), ("turboloader", 1.2)):
        theirs = results.get(name)
        if ours and theirs:
            bench.ratio_bar(f"{case}: images/s over {name}'s", least, ours.samples_per_s, theirs.samples_per_s)
            measure = f"{case}: CPU ms an image, {name}'s over ours"
            bench.ratio_bar(measure, least, theirs.cpu_ms_per_sample, ours.cpu_ms_per_sample)


@scenario("images", shards=8, repeat=3)
def images(bench: Bench) -> None:
    """Pictures decoded and cropped to 224 in a DataLoader with 1, 2 and 4 workers: batches of 64, float32 CHW."""
    per_shard = 64 if bench.quick else 400
    corpora = {
        "photos of 40 KB": bench.make(photos, max(4, bench.shards), per_shard),
        "noise of 87 KB": bench.make(photos, max(4, bench.shards), per_shard, noisy=True),
    }
    for kind, counts in (("photos of 40 KB", (1, 2, 4)), ("noise of 87 KB", (2,))):
        with bench.serve(corpora[kind]) as source:
            for number in counts:
                case = f"{kind} to 224, http, {number} workers"
                rows = bench.rows(_FEW if number != 2 or kind.startswith("noise") else None)
                _bars(bench, case, bench.compare(case, source, "images", rows, workers=number))


@scenario("images-file", shards=8, repeat=3)
def images_file(bench: Bench) -> None:
    """The same from local files with 2 workers, beside loaders that read nothing else."""
    for noisy, kind in ((False, "photos of 40 KB"), (True, "noise of 87 KB")):
        corpus = bench.make(photos, max(4, bench.shards), 64 if bench.quick else 400, noisy=noisy)
        with bench.serve(corpus, "file") as source:
            case = f"{kind} to 224, local files, 2 workers"
            _bars(bench, case, bench.compare(case, source, "images", bench.rows(_FEW if noisy else None), workers=2))
