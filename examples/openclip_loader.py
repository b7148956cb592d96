"""A loader like OpenCLIP's: ``python examples/openclip_loader.py [URL]``.

OpenCLIP and its many forks build their pipeline from parts of webdataset's submodules, with an epoch number that the
workers share and a tar reader that never raises. Such code runs with its imports changed to wds_async (or
unchanged, under ``wds-async run``). "Today" in the docstrings is what the library offers for each part.
"""

import logging
import multiprocessing
import random
import sys
import tempfile

import torch
from sampledata import write_pictures

import wds_async as wds
from wds_async.filters import _shuffle
from wds_async.tariterators import base_plus_ext, tar_file_expander, url_opener, valid_sample

BATCH, SAMPLES, WORKERS = 16, 192, 2


class SharedEpoch:
    """An epoch that worker processes see change. Today: ``dataset.set_epoch(n)``."""

    def __init__(self) -> None:
        self.shared = multiprocessing.Value("i", 0)

    def set_value(self, epoch: int) -> None:
        """Make ``epoch`` the one that the next iteration has."""
        self.shared.value = epoch

    def get_value(self) -> int:
        """The epoch."""
        return self.shared.value


class ShardShuffle(wds.PipelineStage):
    """Shards in an order that follows from seed and epoch. Today: ``shardshuffle=1000``."""

    def __init__(self, epoch: SharedEpoch, seed: int = 0) -> None:
        self.epoch, self.seed = epoch, seed

    def run(self, src):
        """The shards, shuffled."""
        return _shuffle(src, 1000, 100, random.Random(self.seed + self.epoch.get_value()))


def log_and_continue(exn: Exception) -> bool:
    """A handler. Today: ``handler=wds.warn_and_continue``."""
    logging.warning("ignored: %r", exn)
    return True


def group_nothrow(data, keys=base_plus_ext):
    """Members to samples; a field that comes twice begins a new sample. Today: ``wds.tarfile_to_samples()``."""
    current = None
    for member in data:
        key, field = keys(member["fname"])
        if key is None:
            continue
        if current is None or key != current["__key__"] or field.lower() in current:
            if valid_sample(current):
                yield current
            current = {"__key__": key, "__url__": member["__url__"]}
        current[field.lower()] = member["data"]
    if valid_sample(current):
        yield current


def samples_nothrow(src, handler=log_and_continue):
    """Shards to samples."""
    return group_nothrow(tar_file_expander(url_opener(src, handler=handler), handler=handler))


def has_caption_and_image(sample) -> bool:
    """Whether a sample is complete."""
    return "json" in sample and any(kind in sample for kind in ("png", "jpg", "jpeg", "webp"))


def caption_length(document) -> torch.Tensor:
    """A stand-in for the tokenizer."""
    return torch.tensor([len(document["caption"])])


def get_loader(url: str, epoch: SharedEpoch) -> wds.WebLoader:
    """Batches of pictures and captions, the same number in each worker."""
    pipeline = wds.DataPipeline(
        wds.SimpleShardList(url),
        ShardShuffle(epoch),
        wds.split_by_node,
        wds.split_by_worker,
        samples_nothrow,
        wds.shuffle(bufsize=500, initial=100),
        wds.select(has_caption_and_image),
        wds.decode("torchrgb", handler=log_and_continue),
        wds.rename(image="jpg;png;jpeg;webp", text="json"),
        wds.map_dict(text=caption_length),
        wds.to_tuple("image", "text"),
        wds.batched(BATCH, partial=False),
    )
    batches = SAMPLES // (BATCH * WORKERS)
    loader = wds.WebLoader(pipeline.with_epoch(batches), batch_size=None, num_workers=WORKERS, persistent_workers=True)
    loader.num_batches, loader.num_samples = batches * WORKERS, SAMPLES
    return loader


def main(url: str) -> None:
    """Two epochs."""
    epoch = SharedEpoch()
    loader = get_loader(url, epoch)
    for number in range(2):
        epoch.set_value(number)
        shapes = [(tuple(pictures.shape), tuple(texts.shape)) for pictures, texts in loader]
        print(f"epoch {number}: {len(shapes)} of {loader.num_batches} batches of {shapes[0]}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else write_pictures(folder))
