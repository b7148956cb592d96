"""Pipelines of every kind over the same shards, for the tests of states."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cbor2
import msgpack
import numpy as np

import wds_async as wds
from tests.servers import make_shards
from wds_async.handlers import ignore_and_continue, ignore_and_stop
from wds_async.indexed.scan import scan_shards
from wds_async.reading.parts import group_by_keys, tar_file_expander, url_opener

Make = Callable[[list[str]], Any]


def number(sample: Any) -> int:
    """Return the number in a sample."""
    return int(sample["cls"])


def one_more(sample: Any) -> int:
    return number(sample) + 1


def drawn(sample: Any) -> int:
    """Return the number in a sample that `augmented` made."""
    return int(sample["drawn"][2])


@wds.deterministic
def doubled(sample: Any) -> Any:
    return {**sample, "double": 2 * int(sample["cls"])}


def augmented(sample: Any) -> Any:
    """Draw from all generators that a user's function may draw from."""
    return {**sample, "drawn": (random.random(), float(np.random.rand()), int(sample["cls"]))}


def sometimes(sample: Any) -> Any:
    if number(sample) % 5 == 0:
        raise ValueError(sample["__key__"])
    return sample


@wds.deterministic
def pictured(sample: Any) -> Any:
    pixels = random.Random(number(sample)).randbytes(9 * 7 * 3)
    return {**sample, "ppm": b"P6 9 7 255\n" + pixels}


@wds.deterministic
def until_24(sample: Any) -> Any:
    if sample["__key__"] == "000024":
        raise ValueError(sample["__key__"])
    return sample


def below_24(sample: Any) -> int:
    return int(until_24(sample)["__key__"])


def shuffled_by_the_program(shards: Iterable[Any]) -> Iterator[Any]:
    listed = list(shards)
    random.shuffle(listed)
    yield from listed


def in_pairs(source: Iterable[Any]) -> Iterator[Any]:
    """A user's stage that holds an item and declares nothing."""
    source = iter(source)
    for first in source:
        yield (first["__key__"], next(source, {"__key__": "none"})["__key__"])


def dataset(urls: list[str], **kw: Any) -> wds.WebDataset:
    return wds.WebDataset(urls, **{"shardshuffle": False, **kw})


def piped(urls: list[str], *stages: Any) -> wds.DataPipeline:
    return wds.DataPipeline(wds.SimpleShardList(urls), wds.split_by_worker, wds.tarfile_to_samples(), *stages)


def as_records(urls: Sequence[str], dumps: Callable[[Any], bytes] = msgpack.packb) -> list[str]:
    """Return files beside the shards with the same samples as records, and a number among them."""
    paths = [Path(url).with_suffix(f".{dumps.__name__}") for url in urls]
    for url, path in zip(urls, paths, strict=True):
        if not path.exists():
            samples = [{**sample, "__url__": ""} for sample in wds.tarfile_to_samples()([url])]
            path.write_bytes(b"".join(map(dumps, [*samples[:3], 7, *samples[3:]])))
    return [str(path) for path in paths]


def packed(urls: Sequence[str], *stages: Any, **kw: Any) -> wds.DataPipeline:
    """Return a pipeline of MessagePack records."""
    return wds.DataPipeline(
        wds.SimpleShardList(as_records(urls), **kw),
        wds.split_by_node,
        wds.split_by_worker,
        wds.msgpacks_to_samples(),
        *stages,
    )


def lmdb_beside(urls: Sequence[str]) -> wds.LMDBCached:
    """Return a cache in a folder beside the shards."""
    return wds.LMDBCached(Path(urls[0]).parent / "lmdb", map_size=1e8, chunksize=4)


def canonical(urls: list[str], **kw: Any) -> wds.WebDataset:
    """Return global batches of three samples, by indexes beside the shards."""
    for scanned in scan_shards([url for url in urls if not Path(f"{url}.index").exists()]):
        assert scanned.index is not None
        Path(f"{scanned.url}.index").write_bytes(scanned.index.to_bytes())
    return dataset(urls, canonical=3, index=True, **kw)


def is_sample(record: Any) -> bool:
    return isinstance(record, dict)


def mixed(urls: list[str], cls: Any = wds.RandomMix, **kw: Any) -> wds.DataPipeline:
    first = dataset(urls[::2], empty_check=False).shuffle(5, seed=3)
    second = dataset(urls[1::2], shardshuffle=2, seed=1, empty_check=False)
    return wds.DataPipeline(cls([first, second], longest=True, **kw), wds.shuffle(7, seed=2))


PIPELINES: dict[str, Make] = {
    "plain": dataset,
    "shards shuffled": lambda urls: dataset(urls, shardshuffle=3, seed=7),
    "shards shuffled, no seed": lambda urls: dataset(urls, shardshuffle=3),
    "shards permuted": lambda urls: dataset(urls, shardshuffle="epoch", seed=7).shuffle(5, seed=1),
    "epochshuffle of samples": lambda urls: piped(urls, wds.epochshuffle(seed=3)),
    "shuffle": lambda urls: dataset(urls, shardshuffle=3, seed=7).shuffle(10, initial=5, seed=1),
    "shuffle, large": lambda urls: dataset(urls).shuffle(1000, seed=1),
    "detshuffle": lambda urls: piped(urls, wds.detshuffle(10, 5, seed=3)),
    "detshuffle of shards": lambda urls: wds.DataPipeline(
        wds.SimpleShardList(urls), wds.detshuffle(3, seed=5), wds.split_by_node, wds.tarfile_to_samples()
    ),
    "two shuffles": lambda urls: dataset(urls).shuffle(8, seed=1).map(doubled).shuffle(5, seed=2),
    "shuffle behind a random map": lambda urls: dataset(urls).map(augmented).shuffle(8, seed=2),
    "shuffle behind decode": lambda urls: dataset(urls).decode().shuffle(8, seed=2),
    "shuffle behind to_tuple": lambda urls: dataset(urls).to_tuple("cls", "json").shuffle(8, seed=2),
    "random map": lambda urls: dataset(urls).shuffle(6, seed=1).map(augmented),
    "select": lambda urls: dataset(urls).select(lambda s: number(s) % 3).shuffle(4, seed=1),
    "rsample": lambda urls: dataset(urls).rsample(0.5, seed=3),
    "rsample, no seed": lambda urls: dataset(urls).rsample(0.5),
    "map_dict": lambda urls: dataset(urls).map_dict(cls=int).shuffle(5, seed=1),
    "rename": lambda urls: dataset(urls).rename(label="cls").shuffle(5, seed=1),
    "extract_keys": lambda urls: dataset(urls).extract_keys("cls", "json"),
    "a handler": lambda urls: dataset(urls).map(sometimes, handler=ignore_and_continue).shuffle(5, seed=1),
    "decode, threads": lambda urls: dataset(urls).decode(threads=2),
    "random crops": lambda urls: dataset(urls).map(pictured).decode("rgb8", size=2, crop="random", flip=True),
    "random crops, threads": lambda urls: (
        dataset(urls).map(pictured).decode("rgb8", size=2, crop="random", threads=3).shuffle(4, seed=1)
    ),
    "a handler that stops": lambda urls: dataset(urls).map(until_24, handler=ignore_and_stop).shuffle(9, seed=1),
    "a handler that stops, threads": lambda urls: (
        dataset(urls).map(until_24, handler=ignore_and_stop, threads=3).shuffle(9, seed=1)
    ),
    "a handler that stops, two shuffles": lambda urls: (
        dataset(urls)
        .shuffle(6, seed=2)
        .select(until_24, handler=ignore_and_stop)
        .bucketed(number, [2, 4], 3, collation_fn=None)
    ),
    "buckets whose handler stops": lambda urls: dataset(urls).bucketed(
        below_24, [9, 18], 4, collation_fn=None, handler=ignore_and_stop
    ),
    "a shard that stops": lambda urls: dataset([*urls[:3], "/none.tar"], handler=ignore_and_stop).shuffle(9, seed=1),
    "a shard that stops, interleaved": lambda urls: dataset(
        [*urls[:3], "/none.tar"], handler=ignore_and_stop, interleave=2, seed=1
    ).shuffle(9, seed=1),
    "shards shuffled by a function": lambda urls: wds.DataPipeline(
        wds.SimpleShardList(urls), shuffled_by_the_program, wds.tarfile_to_samples(), wds.map(augmented)
    ),
    "threads in front of lists": lambda urls: (
        dataset(urls).map(doubled, threads=2).batched(3, collation_fn=None).compose(wds.unlisted())
    ),
    "map, threads": lambda urls: dataset(urls).map(doubled, threads=3).shuffle(4, seed=1),
    "slice": lambda urls: dataset(urls).slice(3, 27, 2),
    "batched": lambda urls: dataset(urls).shuffle(7, seed=1).to_tuple("__key__", "cls").batched(4),
    "batched, no rest": lambda urls: dataset(urls).to_tuple("__key__", "cls").batched(4, partial=False),
    "bucketed": lambda urls: dataset(urls).bucketed(number, [2, 4], 3, collation_fn=None),
    "bucketed, no rest": lambda urls: dataset(urls).bucketed(number, batch_size=3, collation_fn=None, partial=False),
    "bucketed by tokens": lambda urls: dataset(urls).bucketed(one_more, [5], max_tokens=11, collation_fn=None),
    "bucketed behind a random map": lambda urls: dataset(urls).map(augmented).bucketed(drawn, [3], 4, None, list),
    "bucketed, one order": lambda urls: dataset(urls).bucketed(
        number, [2, 4], 2, collation_fn=None, same_shape=True, shares=[2, 2, 3]
    ),
    "unbatched": lambda urls: dataset(urls).to_tuple("__key__", "cls").batched(4).unbatched().shuffle(3, seed=1),
    "unlisted": lambda urls: dataset(urls).listed(5).compose(wds.unlisted()).shuffle(3, seed=1),
    "with_epoch": lambda urls: dataset(urls).shuffle(5, seed=1).with_epoch(45),
    "repeat": lambda urls: dataset(urls).repeat(2),
    "resampled": lambda urls: dataset(urls, resampled=True, seed=4).shuffle(5, seed=2).with_epoch(30),
    "resampled, no seed": lambda urls: dataset(urls, resampled=True).with_epoch(30),
    "random mix": lambda urls: mixed(urls, probs=[1, 3], seed=5),
    "random mix, no seed": mixed,
    "round robin": lambda urls: mixed(urls, wds.RoundRobin),
    "mix of mixes": lambda urls: wds.DataPipeline(
        wds.RandomMix([mixed(urls[:3], seed=3), dataset(urls[3:], empty_check=False)], longest=True, seed=4),
        wds.shuffle(9, seed=2),
    ),
    "mix of shards that both have": lambda urls: mixed([*urls[:2], *urls[:2], *urls], seed=5),
    "mix with a random map in one": lambda urls: wds.DataPipeline(
        wds.RoundRobin([dataset(urls[:2]).map(augmented), dataset(urls[2:])], longest=True), wds.shuffle(9, seed=2)
    ),
    "mix of passes": lambda urls: wds.DataPipeline(
        wds.RandomMix([dataset(urls[:2]).repeat(3), dataset(urls[2:], resampled=True, seed=2)], seed=4),
        wds.shuffle(9, seed=2),
        wds.decode(),
        wds.shuffle(4, seed=3),
    ),
    "mix with records": lambda urls: wds.DataPipeline(
        wds.RoundRobin([packed(urls[:2]), dataset(urls[2:]).decode()], longest=True), wds.shuffle(9, seed=2)
    ),
    "mix with a list": lambda urls: wds.DataPipeline(
        wds.RandomMix([wds.DataPipeline(range(10)), dataset(urls)], longest=True, seed=1), wds.shuffle(5, seed=1)
    ),
    "specification that selects": lambda urls: wds.WebDataset(
        {"dataset": [{"shards": urls[::2], "extensions": ["cls"]}, {"shards": urls[1::2], "name": "b"}]},
        shardshuffle=False,
        seed=3,
    ).shuffle(9, seed=1),
    "specification": lambda urls: wds.WebDataset(
        {"dataset": [{"shards": urls[::2], "weight": 1}, {"shards": urls[1::2], "weight": 2}]},
        shardshuffle=False,
        seed=3,
    ).shuffle(5, seed=1),
    "a list": lambda urls: wds.DataPipeline(range(40), wds.shuffle(5, seed=1)),
    "a function": lambda urls: wds.DataPipeline(functools.partial(range, 40), wds.shuffle(5, seed=1)),
    "a stage of the user's": lambda urls: piped(urls, wds.shuffle(5), wds.map(augmented), in_pairs),
    "step by step": lambda urls: wds.DataPipeline(
        wds.SimpleShardList(urls), url_opener, tar_file_expander, group_by_keys
    ),
    "a pipeline in a pipeline": lambda urls: wds.DataPipeline(dataset(urls).shuffle(5, seed=1), wds.shuffle(3, seed=2)),
    "steps": lambda urls: dataset(urls, steps=50).shuffle(5, seed=1),
    "steps, twice": lambda urls: dataset(urls, steps=21).shuffle(5, seed=1).repeat(2),
    "steps, padded": lambda urls: dataset(urls, steps=39, equal="pad").map(augmented).shuffle(5, seed=1),
    "equal steps of one rank": lambda urls: dataset(urls, equal="drop").shuffle(5, seed=1),
    "steps, shards shuffled": lambda urls: dataset(urls, shardshuffle=3, seed=4, steps=50),
    "interleaved": lambda urls: dataset(urls, interleave=3, shardshuffle=3, seed=7),
    "interleaved, no seed": lambda urls: dataset(urls, interleave=3).shuffle(5, seed=1),
    "interleaved, shuffle": lambda urls: dataset(urls, interleave=2, seed=7).shuffle(10, initial=5, seed=1),
    "interleaved, random map": lambda urls: dataset(urls, interleave=16, seed=7).map(augmented).shuffle(4, seed=1),
    "interleaved, one after another": lambda urls: dataset(urls, interleave=1, seed=7),
    "interleaved parts of shards": lambda urls: dataset(urls, interleave=3, seed=7, split="bytes").shuffle(5, seed=1),
    "interleaved, resampled": lambda urls: dataset(urls, interleave=3, resampled=True, seed=4).with_epoch(30),
    "interleaved, repeated": lambda urls: dataset(urls, interleave=3, seed=4).repeat(2),
    "interleaved, steps": lambda urls: dataset(urls, interleave=3, seed=4, steps=50).shuffle(5, seed=1),
    "interleaved, cached": lambda urls: dataset(urls, interleave=3, seed=4).mcached().shuffle(5, seed=1),
    "interleaved stage": lambda urls: wds.DataPipeline(
        wds.SimpleShardList(urls), wds.split_by_worker, wds.tarfile_to_samples(interleave=3), wds.shuffle(5, seed=1)
    ),
    "interleaved mix": lambda urls: wds.WebDataset(
        {"dataset": [{"shards": urls[::2], "weight": 1}, {"shards": urls[1::2], "weight": 2}]},
        shardshuffle=False,
        interleave=2,
        seed=3,
    ).shuffle(5, seed=1),
    "shards cut": lambda urls: dataset(urls, split="bytes").shuffle(5, seed=1),
    "cached": lambda urls: dataset(urls, shardshuffle=3, seed=7).mcached().shuffle(5, seed=1),
    "cached behind a random map": lambda urls: dataset(urls).map(augmented).mcached(),
    "cached behind a mix": lambda urls: wds.DataPipeline(
        wds.RandomMix([dataset(urls[::2]), dataset(urls[1::2])], longest=True, seed=1),
        wds.Cached(),
        wds.shuffle(5, seed=2),
    ),
    "LMDB": lambda urls: dataset(urls, shardshuffle=3, seed=7).compose(lmdb_beside(urls)).shuffle(5, seed=1),
    "LMDB behind a random map": lambda urls: dataset(urls).map(augmented).compose(lmdb_beside(urls)),
    "canonical": lambda urls: canonical(urls, shardshuffle="epoch", seed=3).to_tuple("__key__", "cls").batched(3),
    "canonical, shuffled": lambda urls: canonical(urls, equal="repeat").shuffle(5, seed=1),
    "records": packed,
    "records, shuffled": lambda urls: packed(urls, wds.shuffle(9, seed=1), seed=4),
    "records, samples only": lambda urls: packed(urls, wds.select(is_sample), wds.map(doubled), wds.shuffle(9, seed=1)),
    "records, CBOR": lambda urls: wds.DataPipeline(
        wds.SimpleShardList(as_records(urls, cbor2.dumps)), wds.cbors_to_samples(), wds.shuffle(9, seed=1)
    ),
    "check of emptiness": lambda urls: dataset(urls[:2]),
}
"""By name: a function that makes the pipeline anew, as another process would."""

UNSEEDED_LATER = {"resampled, no seed", "a stage of the user's"}
"""Pipelines whose later epochs are drawn from the operating system."""


def shown(items: Iterable[Any]) -> list[str]:
    """Return the items as text, for comparison."""
    return [repr(sorted(item.items()) if isinstance(item, dict) else item) for item in items]


def taken(iterator: Iterator[Any], count: int) -> Sequence[str]:
    return shown(itertools.islice(iterator, count))


def urls_in(folder: Path) -> list[str]:
    return [str(path) for path in make_shards(folder, shards=5, samples=7)]
