"""What several open shards cost beside one after another, and how far apart in the
data set samples are that come one after another.

The throughput is that of image-like shards from nginx on loopback, beside receiving the same bytes. The distance is
that of the samples' numbers, behind the same shuffle buffer; 16 shards are what Megatron Energon opens by default, and
10 what the shuffle of Hugging Face's datasets does."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

import wds_async
from benchmarks.bench import Bench, Row, scenario
from benchmarks.corpus import Corpus, image_like, tiny

__all__ = ["main"]

PLAIN, INTERLEAVED = "wds_async", "wds_async interleave=16"
ROWS = (
    Row("wds_async"),
    Row("wds_async", INTERLEAVED, {"options": {"interleave": 16, "seed": 1}}),
    Row("wds_async", f"{INTERLEAVED}, ordered=False", {"options": {"interleave": 16, "ordered": False, "seed": 1}}),
    Row("recv_into"),
)
BUFFER = 1000
_LEAST_SHARDS = 16


def numbers(samples: Iterable[Any], root: Path, corpus: Corpus) -> list[int]:
    """Return the number in the data set of each of ``samples``, whose keys count those of their shard."""
    per_shard = corpus.samples // len(corpus.names)
    first = {str(root / name): number * per_shard for number, name in enumerate(corpus.names)}
    return [first[sample["__url__"]] + int(sample["__key__"]) for sample in samples]


def neighbours(order: list[int], per_shard: int) -> tuple[float, float]:
    """Return the median distance of samples that come one after another, in shards, and the share of those that are of
    one shard."""
    pairs = list(itertools.pairwise(order))
    same = sum(before // per_shard == after // per_shard for before, after in pairs) / len(pairs)
    return statistics.median(abs(after - before) for before, after in pairs) / per_shard, same


def mixing(bench: Bench) -> None:
    """The distance of neighbours in the orders that one worker reads."""
    shards, per_shard = (20, 100) if bench.quick else (64, 1000)
    buffer = BUFFER // 10 if bench.quick else BUFFER
    corpus = tiny(bench.root, shards, per_shard)
    urls = [str(bench.root / name) for name in corpus.names]

    def ours(interleave: int | None, buffer: int) -> Any:
        dataset = wds_async.WebDataset(urls, shardshuffle="epoch", seed=1, interleave=interleave)
        return dataset.shuffle(buffer, initial=buffer, seed=1) if buffer else dataset

    orders: dict[str, Any] = {
        "one shard after another": ours(None, 0),
        f"the same, shuffle({buffer})": ours(None, buffer),
        "interleave=16": ours(16, 0),
        f"interleave=16, shuffle({buffer})": ours(16, buffer),
        f"interleave=10, shuffle({buffer})": ours(10, buffer),
    }
    try:
        import webdataset  # noqa: PLC0415 (a peer)
    except ModuleNotFoundError:
        bench.notes.append("webdataset is not installed, and was left out")
    else:
        other = webdataset.WebDataset(urls, shardshuffle=shards, seed=1)
        orders[f"webdataset, shuffle({buffer})"] = other.shuffle(buffer, initial=buffer)
    table = Table(title=f"neighbours, {shards} shards of {per_shard} samples", title_justify="left")
    for title in ("order", "median distance, shards", "of one shard"):
        table.add_column(title, justify="left" if title == "order" else "right")
    measured = {}
    for name, samples in orders.items():
        distance, same = measured[name] = neighbours(numbers(samples, bench.root, corpus), per_shard)
        table.add_row(name, f"{distance:.2f}", f"{same:.1%}")
        bench.raw.append({"order": name, "distance_shards": distance, "same_shard": same})
    table.add_row("any order is as likely", f"{(1 - 0.5**0.5) * shards:.2f}", f"{1 / shards:.1%}")
    bench.console.print(table)
    before = measured[f"the same, shuffle({buffer})"]
    behind = measured[f"interleave=16, shuffle({buffer})"]
    bench.ratio_bar(
        f"neighbours of one shard behind shuffle({buffer}): one open shard over 16", 3, before[1], behind[1]
    )


@scenario("interleave", repeat=3)
def main(bench: Bench) -> None:
    """Throughput and mixing of several open shards."""
    mixing(bench)
    shards, size = max(bench.shards, _LEAST_SHARDS), bench.shard_bytes
    corpus = bench.make(image_like, shards, size // 10 if bench.quick else size)
    with bench.serve(corpus) as source:
        results = bench.compare("several open shards", source, rows=ROWS)
    ours, plain = results.get(INTERLEAVED), results.get(PLAIN)
    if ours and plain:
        bench.ratio_bar("throughput: interleave=16 over one shard after another", 0.95, ours.mb_s, plain.mb_s)
    bench.memory_bar("several open shards", ours)
