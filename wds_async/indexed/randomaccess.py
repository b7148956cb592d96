"""`IndexedDataset`: samples of remote shards by number, each by a ranged read of its own bytes."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from wds_async import config, environment, world
from wds_async.arguments import check_function, check_size
from wds_async.errors import ConfigError, CorruptShard, ObjectChanged, ShardFormatError, ShardNotFound, WdsError
from wds_async.indexed import places
from wds_async.indexed.index import load_index, names_list
from wds_async.indexed.scan import scan_shards
from wds_async.indexed.shardindex import ShardFacts, ShardIndex
from wds_async.observe.cost_limit import limit_of_job
from wds_async.redact import redact
from wds_async.shardlists.spans import SampleOffsets
from wds_async.storage.listing.expand import expand_listed
from wds_async.storage.local import file_version
from wds_async.storage.options import StorageOptions
from wds_async.storage.registry import locate
from wds_async.tar.blocks import padded
from wds_async.tar.decompress import compressed_by
from wds_async.tar.group import RawSample, admission, base_plus_ext, samples
from wds_async.tar.index import read_dali, read_energon
from wds_async.tar.parse import members_of
from wds_async.tar.source import ByteSource
from wds_async.tracebacks import Shortened
from wds_async.transfer.probe import probe
from wds_async.transfer.range_reader import RangeReader, WantedRange
from wds_async.transfer.ranges import Facts
from wds_async.transfer.stats import Counters
from wds_async.transfer.traffic import Traffic

__all__ = ["IndexedDataset", "sample_offsets"]

logger = logging.getLogger("wds_async")

_GAP_BYTES = 256 << 10
_RANGE_BYTES = 16 << 20
_CONNECTIONS = 128
"""Requests at a time unless ``WDS_CONNECTIONS`` is set: a batch of 256 samples far from each other takes two rounds."""
_ADVICE = "`wds-async index SHARDS…` makes indexes of shards"
_SEARCHED = ("wds", "energon", "dali")
"""Kinds of indexes, in the order in which they are looked for."""


class IndexedDataset(world.TorchMapDataset):
    """The samples of shards by number, read individually from where they are: ``len(ds)``, ``ds[17]``, ``ds[-1]``,
    ``ds[[3, 1]]``.

    ``urls``: plain tars (a string with braces or wildcards, or a list), on disk or in any store that supports range
    requests. The positions of their samples are in an index of each shard, the first of these that is there, or the one
    that ``kind`` names (``wds-async index`` writes all three):

    * ``"wds"``: ``NAME.tar.index`` (see `shardindex`), in the cache folder or else beside the shard. It contains the
      shard's version: if the shard was replaced, ObjectChanged is raised.
    * ``"energon"``: ``NAME.tar.idx`` beside the shard, as made by ``energon prepare``.
    * ``"dali"``: ``NAME.idx`` beside the shard, as made by DALI's ``wds2idx`` (versions 1.1 and 1.2).

    The last two contain no version. The size of such a shard is looked up, by one small request, and has to fit; the
    version that it has then is the one that is read. ``urls`` may also be the path or URL of a ``.json`` list of shards
    (see `index`): shards of it without an index have their headers read, for an index that is kept in the cache folder.

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
        kind: str | None = None,
        index: str | os.PathLike[str] | Sequence[ShardIndex] | None = None,
        transformations: Callable[[Any], Any] | Iterable[Callable[[Any], Any]] = (),
        gap_bytes: int = _GAP_BYTES,
        storage_options: Mapping[str, Any] | None = None,
        transfer: Mapping[str, Any] | None = None,
    ) -> None:
        if kind not in (None, *places.KINDS):
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
            counts = _counts(urls, self._options)
            self.urls = expand_listed(urls, self._options) if counts is None else [url for url, _ in counts]
            if isinstance(index, (str, os.PathLike)) or index is None:
                folder = None if index is None else os.fspath(index)
                self.indexes = _load(self.urls, kind, folder, self._options, may_scan=counts is not None)
            else:
                self.indexes = list(index)
        self._check()
        for (url, listed), one in zip(counts or (), self.indexes, strict=False):
            if len(one) != listed:
                why = f"has {listed:,} samples of {redact(url)}, whose index has {len(one):,}"
                raise ShardFormatError(f"{redact(str(urls))}: it {why}; make both again: {_ADVICE}")
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


def _counts(urls: Any, options: StorageOptions) -> list[tuple[str, int]] | None:
    """Return the shards in the JSON list ``urls``, each with its number of samples; None for what is no list."""
    if not isinstance(urls, (str, os.PathLike)) or not names_list(os.fspath(urls)):
        return None
    return [(shard["url"], shard["nsamples"]) for shard in load_index(urls, storage=options)["shardlist"]]


def _load(
    urls: list[str], kind: str | None, folder: str | None, options: StorageOptions, *, may_scan: bool = False
) -> list[ShardIndex]:
    """Return the index of each shard: that of ``kind``, or for None the first one in the order of `_SEARCHED`.
    ShardNotFound where there is none, unless ``may_scan``: then the headers of the shard are read."""
    found: dict[str, ShardIndex] = {}
    if kind in (None, "wds") and folder is None:
        found = {url: cached for url in urls if (cached := places.cached_index(url)) is not None}
    absent: dict[str, ShardNotFound] = {}
    for one in _SEARCHED if kind is None else (kind,):
        missing = list(dict.fromkeys(url for url in urls if url not in found))
        try:
            files = places.places(missing, one, folder)
        except ConfigError:
            if kind is None and absent:  # names that indexes of this kind would share: there are none
                continue
            raise
        read: dict[str, tuple[str, bytes]] = {}
        for url, file, data in zip(missing, files, places.read_files(files, options) if files else (), strict=True):
            if isinstance(data, ShardNotFound):
                absent.setdefault(url, data)
            elif isinstance(data, WdsError):
                raise data
            else:
                read[url] = file, data
        if one == "wds":
            found |= {url: ShardIndex.from_bytes(data, file) for url, (file, data) in read.items()}
        elif read:
            found |= _foreign(read, one, options)
    missing = list(dict.fromkeys(url for url in urls if url not in found))
    if missing and not may_scan:
        why = f"{redact(missing[0])} has no index: {absent[missing[0]]} {_ADVICE} (--kind {kind or 'wds'})."
        raise ShardNotFound(why) from absent[missing[0]]
    if missing:
        found |= _scanned(missing, options)
    return [found[url] for url in urls]


def _foreign(read: Mapping[str, tuple[str, bytes]], kind: str, options: StorageOptions) -> dict[str, ShardIndex]:
    """Return the indexes of shards, by URL, from files of other programs: ``read`` has their names and bytes. They have
    no size and version of the shard, and get those that it has now. ShardFormatError where they do not fit."""
    found: dict[str, ShardIndex] = {}
    for shard in probe(list(read), options, config=config.transfer_config()):
        if shard.error is not None:
            raise shard.error
        file, data = read[shard.url]
        index = _parsed(shard.url, kind, data, file, shard.size)
        facts = replace(index.facts, size=shard.size or 0, version=shard.version, plain=not compressed_by(shard.head))
        found[shard.url] = replace(index, facts=facts)
    return found


def _parsed(url: str, kind: str, data: bytes, name: str, size: int | None) -> ShardIndex:
    if kind == "energon":
        offsets = read_energon(data, name, size)
        return ShardIndex.of(url, 0, "", offsets[:-1], offsets[1:])
    try:
        fields = read_dali(data.decode("utf-8", "surrogateescape"), name, size)
    except UnicodeDecodeError as exn:
        raise ConfigError(f"{redact(name)}: no index of DALI: not UTF-8 text (byte {exn.start})") from exn
    # Where the first header of a sample begins is not said: behind the data of the sample before.
    stops = [max(offset + padded(size) for _, offset, size in sample) for sample in fields]
    starts = [0, *stops[:-1]] if stops else []
    names = [sample[0].name for sample in fields]
    if not all(names):  # version 1.1
        return ShardIndex.of(url, 0, "", starts, stops)
    # Members without a key, and those that describe the shard, are samples for DALI and for no other reader.
    admit, keys, begins, ends = admission(), [], [], []
    for member, start, stop in zip(names, starts, stops, strict=True):
        key = base_plus_ext(member)[0] if admit(member) is not None else None
        if key is not None:
            keys.append(key)
            begins.append(start)
            ends.append(stop)
    return ShardIndex.of(url, 0, "", begins, ends, keys=keys)


def _scanned(urls: list[str], options: StorageOptions) -> dict[str, ShardIndex]:
    """Read the headers of ``urls`` and return the index of each, which is kept in the cache folder."""
    advice = "indexes (`wds-async index --kind wds`) would make this unnecessary"
    logger.warning("reading the headers of %d shards; %s", len(urls), advice)
    found: dict[str, ShardIndex] = {}
    for scanned in scan_shards(urls, options=options):
        if scanned.index is None:
            assert scanned.error is not None
            raise scanned.error
        found[scanned.url] = scanned.index
        if scanned.index.facts.version:
            with contextlib.suppress(OSError, WdsError):
                places.keep(scanned.index, scanned.url)
    return found


def sample_offsets(
    urls: Iterable[str], index: str | os.PathLike[str] | Literal[True], options: StorageOptions
) -> dict[str, SampleOffsets]:
    """Return where the samples of each of ``urls`` are, by their indexes (see `IndexedDataset`): in the folder
    ``index``, or for True in the cache folder, else beside the shards. Raises ShardNotFound where there is none,
    ObjectChanged for a file that is another one since, and ShardFormatError for a compressed shard."""
    distinct, found = list(dict.fromkeys(urls)), {}
    for url, one in zip(
        distinct, _load(distinct, None, None if index is True else os.fspath(index), options), strict=True
    ):
        if not one.facts.plain:
            raise ShardFormatError(f"{redact(url)}: it is compressed, so that it cannot be cut, by its index neither")
        pinned = _pinned(url, one.facts)
        found[url] = SampleOffsets(one.starts, one.lengths, "" if pinned is None else pinned.version)
    return found
