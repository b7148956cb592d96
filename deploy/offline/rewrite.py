"""Read the shards of a list and write them anew, smaller: ``python rewrite.py shards.txt s3://bucket/small/train``.

Run as many of them as you like, each with its ``RANK`` of ``WORLD_SIZE``: every shard is read by exactly one. What a
rank writes is named by its rank and does not depend on chance, so one that is started again writes the same again.
Change `smaller` to what you need; the rest stays.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import click

import wds_async as wds

SIDE = 256


def smaller(sample: dict[str, Any]) -> dict[str, Any]:
    """The picture with sides of `SIDE` pixels at most; everything else as it is."""
    picture = sample["jpg"].convert("RGB")
    picture.thumbnail((SIDE, SIDE))
    return {**sample, "jpg": picture}


def shards_of(path: str) -> list[str]:
    """The lines of the file at ``path`` that are no comments."""
    lines = (line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shards", help="file with URLs, one a line")
    parser.add_argument("out", help="prefix of what is written: s3://bucket/small/train")
    parser.add_argument("--maxcount", type=int, default=10_000, help="samples of one shard (default: %(default)s)")
    given = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    # More ranks than shards is no mistake here: those have nothing to do.
    shards = "::".join(shards_of(given.shards))
    dataset = wds.WebDataset(shards, shardshuffle=False, empty_check=False).decode("pil", only=["jpg"]).map(smaller)
    count = 0
    with wds.ShardWriter(f"{given.out}-{rank:05d}-%06d.tar", maxcount=given.maxcount, verbose=0, mtime=0) as sink:
        for count, sample in enumerate(dataset, start=1):  # noqa: B007 (counted, and used below)
            sink.write({key: value for key, value in sample.items() if key == "__key__" or not key.startswith("__")})
    click.echo(f"rank {rank}: {count} samples")


if __name__ == "__main__":
    main()
