"""JPEGs decoded on the GPU by NVIDIA DALI: ``python examples/dali_pipeline.py [URL]``. Needs a GPU and
``pip install nvidia-dali-cuda130``.

``wds.dali_source`` gives DALI the bytes of each batch; DALI decodes, crops and normalises them. The pipeline ends its
epoch where the dataset does, and a reset begins the next one.
"""

import sys
import tempfile

from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIGenericIterator
from sampledata import write_pictures

import wds_async as wds

BATCH = 16


@pipeline_def(batch_size=BATCH, num_threads=2, device_id=0)
def training(source):
    """Decode, crop and normalise."""
    files, labels = fn.external_source(source, num_outputs=2, cycle="raise")
    images = fn.decoders.image(files, device="mixed", output_type=types.RGB)
    images = fn.random_resized_crop(images, size=64)
    images = fn.crop_mirror_normalize(
        images, mirror=fn.random.coin_flip(), mean=[123.7, 116.3, 103.5], std=[58.4, 57.1, 57.4], dtype=types.FLOAT
    )
    return images, labels.gpu()


def main(url):
    """Two epochs."""
    dataset = wds.WebDataset(url, shardshuffle=100, seed=0, nodesplitter=wds.split_by_node).shuffle(100)
    source = wds.dali_source(dataset.decode(only="cls"), "jpg cls", BATCH)
    pipeline = training(source)
    loader = DALIGenericIterator([pipeline], ["images", "labels"], auto_reset=True)
    for epoch in range(2):
        shapes = [tuple(batch["images"].shape) for (batch,) in loader]
        print(f"epoch {epoch}: {len(shapes)} batches, the first {shapes[0]}, the last {shapes[-1]}", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else write_pictures(folder))
