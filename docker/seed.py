"""Make the demo's shards and put them into its stores: ``python seed.py s3://demo/train gs://demo/train …``.

What stands before the first slash is made, as a bucket or container, where it is not there yet; then our own writer
writes the same shards under each of the prefixes. Run it again and they are written again, byte for byte.
"""

import argparse

import click
import fsspec
import numpy as np
from sampledata import CLASSES

import wds_async as wds

SEED = 0


def make_bucket(url: str) -> None:
    """The bucket of ``url``, where it is not there; credentials are the environment's, as for the writer."""
    scheme, _, rest = url.partition("://")
    bucket = rest.partition("/")[0]
    # gcsfs asks for credentials that an emulator does not want.
    options = {"gs": {"token": "anon", "project": "demo"}}.get(scheme, {})
    store = fsspec.filesystem(scheme, **options)
    try:
        store.mkdir(bucket)
    except Exception as exn:  # each client has an error of its own for it; gcsfs's knows its status only
        if not isinstance(exn, FileExistsError) and getattr(exn, "code", None) != 409:
            raise


def write(prefix: str, shards: int, samples: int, side: int) -> None:
    """``shards`` tars of ``samples`` pictures of ``side`` x ``side`` pixels, whose colour is their class."""
    rng = np.random.default_rng(SEED)
    with wds.ShardWriter(f"{prefix}-%06d.tar", maxcount=samples, verbose=0, mtime=0) as sink:
        for i in range(shards * samples):
            picture = rng.integers(0, 96, (side, side, 3), dtype=np.uint8)
            picture[:, :, i % CLASSES] += 128
            sink.write({"__key__": f"{i:06d}", "jpg": picture, "cls": i % CLASSES})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prefixes", nargs="+", metavar="URL", help="s3://bucket/train writes …/train-000000.tar")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--samples", type=int, default=96, help="of one shard (default: %(default)s)")
    parser.add_argument("--side", type=int, default=96, help="pixels of a picture's side (default: %(default)s)")
    given = parser.parse_args()
    for prefix in given.prefixes:
        make_bucket(prefix)
        write(prefix, given.shards, given.samples, given.side)
        click.echo(f"{prefix}-{{000000..{given.shards - 1:06d}}}.tar: {given.shards * given.samples} samples")


if __name__ == "__main__":
    main()
