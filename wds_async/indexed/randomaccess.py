"""`IndexedDataset`: samples of remote shards by number, each by a ranged read of its own bytes."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from wds_async import config, environment, world
from wds_async.arguments import check_function, check_size
from wds_async.errors import ConfigError, CorruptShard, ObjectChanged, ShardFormatError, ShardNotFound, WdsError
from wds_async.indexed import places
from wds_async.indexed.shardindex import ShardFacts, ShardIndex
from wds_async.observe.cost_limit import limit_of_job
from wds_async.redact import redact
from wds_async.shardlists.spans import SampleOffsets
from wds_async.storage.listing.expand import expand_listed
from wds_async.storage.local import file_version
from wds_async.storage.options import StorageOptions
from wds_async.storage.registry import locate
from wds_async.tar.blocks import padded
from wds_async.tar.group import RawSample, base_plus_ext, samples
from wds_async.tar.index import read_dali, read_energon
from wds_async.tar.parse import members_of
from wds_async.tar.source import ByteSource
from wds_async.tracebacks import Shortened
from wds_async.transfer.range_reader import RangeReader, WantedRange
from wds_async.transfer.ranges import Facts
from wds_async.transfer.stats import Counters
from wds_async.transfer.traffic import Traffic

__all__ = ["IndexedDataset", "sample_offsets"]

_GAP_BYTES = 256 << 10
_RANGE_BYTES = 16 << 20
_CONNECTIONS = 128
"""Requests at a time unless ``WDS_CONNECTIONS`` is set: a batch of 256 samples far from each other takes two rounds."""
_ADVICE = "`wds-async index SHARDS…` makes indexes of shards"


class IndexedDataset(world.TorchMapDataset):
    """The samples of shards by number, read individually from where they are: ``len(ds)``, ``ds[17]``, ``ds[-1]``,
    ``ds[[3, 1]]``.

    ``urls``: plain tars (a string with braces or wildcards, or a list), on disk or in any store that supports range
    requests. ``kind`` says which index gives the positions of their samples (``wds-async index`` writes all three):

    * ``"wds"`` (default): ``NAME.tar.index`` (see `shardindex`), in the cache folder or else beside the shard. It
      contains the shard's version: if the shard was replaced, ObjectChanged is raised.
    * ``"dali"``: ``NAME.idx`` beside the shard, as made by DALI's ``wds2idx``.
    * ``"energon"``: ``NAME.tar.idx`` beside the shard, as made by ``energon prepare``.

    ``index``: another folder (path or URL) with these files, or the indexes themselves, one `ShardIndex` per shard.

    A sample is a dict of bytes with ``__key__`` and ``__url__``, as in `WebDataset`. ``transformations``, one function
    or several, are applied to it in turn. ``__getitems__``, with which torch's DataLoader requests a batch, joins
    samples of a shard that are at most ``gap_bytes`` (default 256 KiB) apart into one range, and requests all ranges at
    the same time, over up to 128 connections (``WDS_CONNECTIONS``). ``storage_options`` and ``transfer`` are those of
    `WebDataset`.

    Indexing raises IndexError beyond the end, ShardFormatError if an index belongs to another shard, and the errors of
    reading. The constructor raises ConfigError if a file is not an index and ShardNotFound if there is none. Threads
    may share the object; it goes to DataLoader workers by fork or pickle. `close`, or the end of a ``with`` block,
    closes its connections; they are opened again when needed. It takes twelve bytes of memory per sample, plus the
    bytes of its key.
    """

    def __init__(
        self,
        urls: str | os.PathLike[str] | Iterable[Any],
        *,
        kind: str = "wds",
        index: str | os.PathLike[str] | Sequence[ShardIndex] | None = None,
        transformations: Callable[[Any], Any] | Iterable[Callable[[Any], Any]] = (),
        gap_bytes: int = _GAP_BYTES,
        storage_options: Mapping[str, Any] | None = None,
        transfer: Mapping[str, Any] | None = None,
    ) -> None:
        if kind not in places.KINDS:
            raise ConfigError(f"IndexedDataset: kind={kind!r}: one of {', '.join(places.KINDS)}")
        self.gap_bytes = check_size("IndexedDataset", "gap_bytes", gap_bytes, at_least=0)
        functions = [transformations] if callable(transformations) else list(transformations)
        self.transformations = [check_function("IndexedDataset", "transformations", f) for f in functions]
        self._options = StorageOptions(storage_options)
        self._transfer = dict(transfer or {})
        if environment.variable("WDS_CONNECTIONS") is None:
            self._transfer.setdefault("connections", _CONNECTIONS)
        config.transfer_config(**self._transfer)
        with Shortened():
            self.urls = expand_listed(urls, self._options)
            if isinstance(index, (str, os.PathLike)) or index is None:
                folder = None if index is None else os.fspath(index)
                self.indexes = _load(self.urls, kind, folder, self._options)
            else:
                self.indexes = list(index)
        self._check()
        self._ends = np.cumsum([len(one) for one in self.indexes], dtype=np.int64)
        self._begin()

    def _check(self) -> None:
        if not self.urls or len(self.urls) != len(self.indexes):
            raise ConfigError(f"IndexedDataset: {len(self.urls)} shards and {len(self.indexes)} indexes: one each")
        for url, one in zip(self.urls, self.indexes, strict=True):
            if not one.facts.plain:
                why = "it is compressed, so a sample cannot be read alone; ShardListDataset unpacks such shards"
                raise ShardFormatError(f"{redact(url)}: {why}")

    def _begin(self) -> None:
        """Set what each process has of its own."""
        self._pid = os.getpid()
        counters = Counters(traffic=Traffic())
        limit = limit_of_job()
        if limit is not None:
            limit.watch(counters)
        self._ranges = RangeReader(
            config.transfer_config(workers=world.place().num_workers, **self._transfer),
            self._options,
            traffic=counters.traffic,
            before_request=(lambda: None) if limit is None else limit.check,
        )
        self._facts: dict[int, Facts | None] = {}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _place(self, index: Any) -> tuple[int, int]:
        """Return the shard of sample ``index``, and its number in it."""
        total = len(self)
        number = operator.index(index)
        if not -total <= number < total:
            raise IndexError(f"sample {number} of a dataset of {total}")
        number %= total
        shard = int(np.searchsorted(self._ends, number, side="right"))
        return shard, number - int(self._ends[shard]) + len(self.indexes[shard])

    def __getitem__(self, index: Any) -> Any:
        """Sample ``index`` (any integer type; negative ones from the end); a list of samples for a list or slice."""
        if isinstance(index, slice):
            return self.__getitems__(range(*index.indices(len(self))))
        if isinstance(index, (list, tuple, range, np.ndarray)):
            return self.__getitems__(index)
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Iterable[Any]) -> list[Any]:
        """Return the samples ``indices``, in that order; all that they need is requested at the same time."""
        with Shortened():
            wanted = [self._place(index) for index in indices]
            raw = self._read(sorted(set(wanted)))
            # A sample that is asked for twice is made twice: a transformation may change it in place.
            again: set[tuple[int, int]] = set()
            found = []
            for place in wanted:
                sample: Any = raw[place].copy() if place in again else raw[place]
                again.add(place)
                found.append(sample)
            return [self._transformed(sample) for sample in found]

    def _transformed(self, sample: Any) -> Any:
        for transform in self.transformations:
            sample = transform(sample)
        return sample

    def _read(self, wanted: list[tuple[int, int]]) -> dict[tuple[int, int], RawSample]:
        """Return the samples at these places, which are sorted."""
        groups: list[list[tuple[int, int]]] = []
        start = stop = 0
        for shard, number in wanted:
            begin, end = int(self.indexes[shard].starts[number]), self.indexes[shard].stop(number)
            near = groups and groups[-1][0][0] == shard and begin <= stop + self.gap_bytes
            if near and end - start <= _RANGE_BYTES:
                groups[-1].append((shard, number))
            else:
                groups.append([(shard, number)])
                start = begin
            stop = end
        if self._pid != os.getpid():  # forked: costs are counted, and memory is shared out, for each process
            self._begin()
        ranges = [self._range(group) for group in groups]
        try:
            read = self._ranges.read(ranges)
        except ObjectChanged as exn:
            raise ObjectChanged(f"{exn} Its index is of the former one: make it again (`wds-async index`).") from exn
        found = {}
        for group, one, data in zip(groups, ranges, read, strict=True):
            view = memoryview(data).toreadonly()
            for shard, number in group:
                begin, end = int(self.indexes[shard].starts[number]), self.indexes[shard].stop(number)
                found[shard, number] = self._sample(shard, number, view[begin - one.start : end - one.start])
        return found

    def _range(self, group: list[tuple[int, int]]) -> WantedRange:
        shard, first = group[0]
        last = group[-1][1]
        index = self.indexes[shard]
        if shard not in self._facts:
            self._facts[shard] = _pinned(self.urls[shard], index.facts)
        return WantedRange(self.urls[shard], int(index.starts[first]), index.stop(last), self._facts[shard])

    def _sample(self, shard: int, number: int, view: memoryview) -> RawSample:
        """Return one sample from its bytes. ShardFormatError where they are not those of one sample."""
        url, index = self.urls[shard], self.indexes[shard]
        start = int(index.starts[number])
        pieces = iter((view,))
        source = ByteSource(lambda: next(pieces, None), url)
        source.base = start
        try:
            found = list(samples(members_of(source), url))
        finally:
            source.drop()
        known = None if index.keys is None else index.keys[number]
        keys = [sample["__key__"] for sample in found]
        if len(found) != 1 or known not in (None, keys[0]):
            expected = "one sample" if known is None else f"the sample {known!r}"
            text = f"{expected} should be at bytes {start} to {index.stop(number)}, and {keys!r:.200} is there"
            raise source.error(CorruptShard, f"{text}: its index is of another shard; {_ADVICE}", start)
        return found[0]

    def close(self) -> None:
        """Close the connections; they are made again when they are needed. Idempotent."""
        self._ranges.close()

    def __enter__(self) -> IndexedDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        state = {name: value for name, value in self.__dict__.items() if name not in ("_ranges", "_facts")}
        return object.__new__, (type(self),), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()


def _pinned(url: str, facts: ShardFacts) -> Facts | None:
    """Return what the bytes that are read have to be of; None where the index does not say. ObjectChanged for a file
    that is another one."""
    path = locate(url).path
    if not facts.version:
        return None
    if path is None:
        return Facts(facts.size, facts.version)
    try:
        status = os.stat(path)
    except OSError:
        return None  # the engine says why
    version = file_version(status)
    if not facts.fits(status.st_size, version):
        was = f"it was {facts.version} when its index was made and is now {version}"
        raise ObjectChanged(f"{redact(url)}: {was}. Make the index again (`wds-async index`).")
    return Facts(facts.size, version)


# ------------------------------------------------------------------ indexes


def _load(urls: list[str], kind: str, folder: str | None, options: StorageOptions) -> list[ShardIndex]:
    """Return the index of each shard. ShardNotFound where there is none."""
    found: dict[str, ShardIndex] = {}
    if kind == "wds" and folder is None:
        found = {url: cached for url in urls if (cached := places.cached_index(url)) is not None}
    missing = list(dict.fromkeys(url for url in urls if url not in found))
    files = places.places(missing, kind, folder)
    for url, file, data in zip(missing, files, places.read_files(files, options), strict=True):
        if isinstance(data, WdsError):
            if isinstance(data, ShardNotFound):
                why = f"{redact(url)} has no index: {data} {_ADVICE} (--kind {kind})."
                raise ShardNotFound(why) from data
            raise data
        found[url] = _parsed(url, kind, data, file)
    return [found[url] for url in urls]


def sample_offsets(
    urls: Iterable[str], index: str | os.PathLike[str] | Literal[True], options: StorageOptions
) -> dict[str, SampleOffsets]:
    """Return where the samples of each of ``urls`` are, by their indexes (``wds-async index --kind wds``): in the
    folder ``index``, or for True in the cache folder, else beside the shards. Raises ShardNotFound where there is none,
    ObjectChanged for a file that is another one since, and ShardFormatError for a compressed shard."""
    distinct, found = list(dict.fromkeys(urls)), {}
    for url, one in zip(
        distinct, _load(distinct, "wds", None if index is True else os.fspath(index), options), strict=True
    ):
        if not one.facts.plain:
            raise ShardFormatError(f"{redact(url)}: it is compressed, so that it cannot be cut, by its index neither")
        pinned = _pinned(url, one.facts)
        found[url] = SampleOffsets(one.starts, one.lengths, "" if pinned is None else pinned.version)
    return found


def _parsed(url: str, kind: str, data: bytes, name: str) -> ShardIndex:
    if kind == "wds":
        return ShardIndex.from_bytes(data, name)
    if kind == "energon":
        offsets = read_energon(data, name)
        return ShardIndex.of(url, 0, "", offsets[:-1], offsets[1:])
    try:
        fields = read_dali(data.decode("utf-8", "surrogateescape"), name)
    except UnicodeDecodeError as exn:
        raise ConfigError(f"{redact(name)}: no index of DALI: not UTF-8 text (byte {exn.start})") from exn
    # Where the first header of a sample begins is not said: behind the data of the sample before.
    stops = [max(offset + padded(size) for _, offset, size in sample) for sample in fields]
    keys = [key for sample in fields if (key := base_plus_ext(sample[0].name)[0]) is not None]
    known = keys if len(keys) == len(fields) else None
    return ShardIndex.of(url, 0, "", [0, *stops[:-1]] if stops else [], stops, keys=known)
