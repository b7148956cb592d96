"""The fluent methods as programs call them: ``python examples/patterns/fluent.py``."""

import warnings

import numpy as np
from shards import SAMPLES, SHARDS, shards

import wds_async as wds

warnings.simplefilter("ignore", DeprecationWarning)  # .pipe and .then are the names of 2020
ALL = SHARDS * SAMPLES


def numbered(source):
    """A stage of one's own: an iterator function."""
    for number, sample in enumerate(source):
        yield {**sample, "number": number}


def every(source, n):
    """A stage with an argument."""
    for number, sample in enumerate(source):
        if number % n == 0:
            yield sample


with shards() as url:
    dataset = wds.WebDataset(url, shardshuffle=False)

    picture, meta = next(iter(dataset.shuffle(1000).decode("torchrgb").to_tuple("jpg;png", "json")))
    assert picture.shape == (3, 16, 16)
    assert 0 <= meta["n"] < ALL
    for spec, kind in {"rgb": np.float32, "rgb8": np.uint8}.items():
        assert next(iter(dataset.decode(spec)))["jpg"].dtype == kind
    assert next(iter(dataset.decode("pil")))["jpg"].size == (16, 16)
    try:
        dataset.decode("rgbtorch")
    except ValueError as error:
        assert "torchrgb" in str(error)

    key, _, meta = next(iter(dataset.decode("pil").to_tuple("__key__", "jpg;png", "json")))
    assert key == "sample000000"
    decoded = dataset.decode("rgb8")
    assert next(iter(decoded.map(lambda sample: sample["cls"]))) == 0
    assert next(iter(decoded.map_dict(jpg=lambda picture: picture.shape)))["jpg"] == (16, 16, 3)
    pairs = decoded.to_tuple("jpg", "cls")
    assert next(iter(pairs.map_tuple(lambda picture: picture / 255, None)))[1] == 0
    assert "image" in next(iter(decoded.rename(image="jpg;png")))
    assert all(sample["cls"] == 3 for sample in decoded.select(lambda sample: sample["cls"] == 3))
    assert next(iter(decoded.compose(numbered)))["number"] == 0
    assert next(iter(decoded.pipe(numbered)))["number"] == 0
    assert sum(1 for _ in decoded.then(every, 10)) == ALL // 10
    cached = dataset.compose(wds.DBCache, "./cache.db", ALL)
    assert [sum(1 for _ in cached) for _ in range(2)] == [ALL, ALL]

    pictures, labels = next(iter(pairs.batched(20)))
    assert pictures.shape == (20, 16, 16, 3)
    assert sum(1 for _ in pairs.batched(20).unbatched()) == ALL
    assert sum(1 for _ in wds.WebDataset(url, shardshuffle=False).with_epoch(25)) == 25
    assert len(wds.WebDataset(url, shardshuffle=False).with_length(ALL, silent=True)) == ALL
    print("all fluent methods do what they say")
