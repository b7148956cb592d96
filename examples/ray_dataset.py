"""Ray Data: read shards, change samples in batches, write shards. ``python examples/ray_dataset.py [URLS OUTPUT]``.

Without arguments it makes its own data; with ``'s3://bucket/in-{0000..0099}.tar' 's3://bucket/out-{0000..}.tar'`` and
``RAY_ADDRESS`` it works on a cluster. A second run writes nothing again.
"""

import logging
import os
import sys
import tempfile
from typing import Any

import ray
from sampledata import write_pictures

import wds_async as wds
from wds_async.distributed import raydata


def relabel(batch: dict[str, Any]) -> dict[str, Any]:
    """Return other labels: columns come as arrays of bytes, and may be whatever the encoder of their field takes."""
    batch["cls"] = [int(label) + 1 for label in batch["cls"]]
    batch["json"] = [{"bytes": len(picture)} for picture in batch["jpg"]]
    return batch


def main(urls: str, output: str) -> None:
    """Read, change and write; then read what was written, without Ray."""
    dataset = raydata.read(urls, fields=["jpg", "cls"])
    print(dataset.schema())
    for _ in range(2):
        print(raydata.write(dataset.map_batches(relabel), output, job="relabelled", shard_bytes="100K"))
    job = os.path.dirname(output) + "/_wds/relabelled"
    samples = list(wds.WebDataset(job, shardshuffle=False).decode())
    print(len(samples), "samples, counted by Ray without reading:", raydata.read(job).count())
    print("the first:", samples[0]["__key__"], samples[0]["cls"], samples[0]["json"])


if __name__ == "__main__":
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel("ERROR")
    if len(sys.argv) == 3:
        main(*sys.argv[1:])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(write_pictures(f"{folder}/in"), f"{folder}/out/train-{{0000..}}.tar")
    ray.shutdown()
