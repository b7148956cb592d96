"""Decoders of one's own: ``python examples/patterns/decoding.py``."""

import io
import warnings

import numpy as np
from shards import shards

import wds_async as wds

warnings.simplefilter("ignore", DeprecationWarning)  # Decoder(...)(dataset) is the way of 2021


def my_decoder(key, value):
    """Takes ``.npy`` fields; None passes the others on to the next decoder."""
    return np.load(io.BytesIO(value)).sum() if key == ".npy" else None


with shards() as url:
    dataset = wds.WebDataset(url, shardshuffle=False)
    for decoded in (
        wds.Decoder(my_decoder, wds.torch_video, wds.torch_audio)(dataset),
        wds.DataPipeline(dataset, wds.decode(my_decoder)),
        dataset.decode(my_decoder),
    ):
        sample = next(iter(decoded))
        assert isinstance(sample["npy"], float)
        assert sample["json"] == {"n": 0}
    sample = next(iter(wds.Decoder(wds.handle_extension(".jpg", len))(dataset)))
    assert isinstance(sample["jpg"], int)
    sample = next(iter(dataset.decode(wds.handle_extension("jpg jpeg", len), wds.imagehandler("rgb8"))))
    assert isinstance(sample["jpg"], int)
    print("all decoders decode")
