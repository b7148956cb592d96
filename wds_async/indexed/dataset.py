"""`ShardListDataset`: samples of shards by number, for torch's samplers and for looking things up."""

from __future__ import annotations

import hashlib
import io
import logging
import operator
import os
import re
import warnings
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any

import numpy as np

from wds_async import autodecode, config, world
from wds_async.arguments import check_size
from wds_async.errors import ConfigError, MissingExtra, ShardFormatError, UrlError
from wds_async.indexed.files import MappedShard, OpenShards, ShardFiles, default_folder
from wds_async.indexed.index import load_index, names_list
from wds_async.logs import Once
from wds_async.redact import redact
from wds_async.storage.listing.expand import expand_listed
from wds_async.tracebacks import Shortened
from wds_async.urls import merge_url

__all__ = ["ShardListDataset"]

Sample = dict[str, Any]
Transform = Callable[[Sample], Any]

logger = logging.getLogger("wds_async")

_CACHE_SIZE = 1e12
_MANY_FILES = 200
_MISSES_AFTER, _MISS_RATE = 100, 0.3
_SHARDS = re.compile(r"\.t(ar|gz|bz2|xz|zst)\b|[*{]|/$|^pipe:", re.IGNORECASE)


class ShardListDataset(world.TorchMapDataset):
    """The samples of shards by number: ``len(ds)``, ``ds[17]``, ``ds[-1]``.

    ``shards`` is an index (a path, a URL or an open file; ``wds-async index`` makes one, see `index`), or a list
    of ``{"url": …, "nsamples": …}``. Beyond what ``wids`` took: URLs of shards themselves, as a string with braces
    or a list; each is then opened once to count its samples.

    A sample is a dict of fields with a leading dot (``".jpg"``), ``__key__``, ``__dataset__``, ``__index__``,
    ``__shard__`` (its URL) and ``__shardindex__``. ``transformations``, one or a list, are applied to it in turn:
    ``"PIL"`` decodes fields as wids did (images keep the mode of their file; fields that it does not know are open
    ``io.BytesIO`` streams), ``"numpy"`` makes arrays of the images, any other string is an image specification of
    ``WebDataset.decode`` (``"torchrgb"``) with all its decoders, a callable is ``f(sample)``. None or ``[]`` leaves
    every field a stream. Pickles are decoded by the rules of `autodecode`.

    Shards elsewhere, and compressed ones, are fetched whole when one of their samples is first asked for, once a
    host, into the disk cache in ``cache_dir`` (default `files.default_folder`; `WebDataset` may share it), or to
    the path that ``localname(url)`` gives. The cache keeps at most ``cache_size`` bytes (1e12 is ``WDS_CACHE_SIZE``
    where that is set; ``keep=True``: all that comes). Local plain shards are mapped where they are. At
    most ``lru_size`` shards are open at a time, each a file descriptor: give it no fewer than a sampler mixes.

    ``base`` is the place that URLs of an index are relative to (default: its own ``base``, else its folder),
    ``dataset_name`` a name for it, and ``options`` go over the keys of the index.

    Indexing raises IndexError beyond the end, ShardFormatError where a shard holds other than ``nsamples`` samples,
    and the errors of reading a shard. Threads may share one; it goes to DataLoader workers by fork or pickle, and
    opens shards anew there. torch takes it for a ``torch.utils.data.Dataset``, though torch is not imported here.
    """

    def __init__(
        self,
        shards: str | os.PathLike[str] | IO[Any] | Iterable[Any],
        *,
        cache_size: float = _CACHE_SIZE,
        cache_dir: str | os.PathLike[str] | None = None,
        lru_size: int = 10,
        dataset_name: str | None = None,
        localname: Callable[[str], str] | None = None,
        transformations: Any = "PIL",
        keep: bool = False,
        base: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        lru_size = check_size("ShardListDataset", "lru_size", lru_size, at_least=1)
        if lru_size > _MANY_FILES:
            warnings.warn(f"lru_size={lru_size}: every open shard takes a file descriptor", stacklevel=2)
        self.base = base
        self.spec: dict[str, Any] = dict(options or {})
        with Shortened():
            self.shards: list[dict[str, Any]] = self._listed(shards)
        if not self.shards:
            raise UrlError("an empty list of shards: name at least one")
        self.dataset_name = dataset_name or self.spec.get("name") or _hashed(str(shards))
        localname = localname if cache_dir is None else None  # a folder that was named beats a function, as in wids
        self.cache_dir = None if localname is not None else os.fspath(cache_dir or default_folder())
        if cache_size == _CACHE_SIZE and (environment := config.settings().cache_size) is not None:
            cache_size = environment
        files = ShardFiles(
            self.cache_dir or "",
            size_bytes=None if keep else cache_size,
            localname=localname,
            urls=(shard["url"] for shard in self.shards),
        )
        self.cache = OpenShards(lru_size, files)
        if transformations is None or not isinstance(transformations, (list, tuple)):
            transformations = [] if transformations is None else [transformations]
        self.transformations = [_transformation(transform) for transform in transformations]
        with Shortened():
            self._count_missing()
        self.lengths: list[int] = [shard["nsamples"] for shard in self.shards]
        self.cum_lengths = np.cumsum(self.lengths)
        self.total_length = int(self.cum_lengths[-1])
        self._warned = Once()

    def _listed(self, shards: Any) -> list[dict[str, Any]]:
        """Return ``shards`` as dicts with a ``url``."""
        if hasattr(shards, "read") or (isinstance(shards, (str, os.PathLike)) and _names_an_index(os.fspath(shards))):
            self.spec = load_index(shards, base=self.base, options=self.spec)
            self.base = self.spec["base"]
            return list(self.spec["shardlist"])
        entries: list[dict[str, Any]] = []
        for shard in [shards] if isinstance(shards, (str, os.PathLike)) else shards:
            if not isinstance(shard, Mapping):
                entries += [{"url": url} for url in expand_listed([shard])]
            elif "url" in shard:
                entries.append({**shard, "url": os.fspath(shard["url"])})
            else:
                raise ConfigError(f"a shard is a URL or a dict with a 'url', not {dict(shard)!r:.80}")
        if self.base is not None:
            entries = [{**shard, "url": merge_url(self.base, shard["url"])} for shard in entries]
        return entries

    def _count_missing(self) -> None:
        """Count the samples of the shards without ``nsamples``."""
        todo = [shard for shard in self.shards if "nsamples" not in shard]
        if todo:
            logger.warning(
                "counting the samples of %d shards; an index (`wds-async index`) would make this unnecessary", len(todo)
            )
        for number, shard in enumerate(todo, 1):
            shard["nsamples"] = len(self.cache.get_shard(shard["url"]))
            logger.info("%d of %d: %s holds %d samples", number, len(todo), redact(shard["url"]), shard["nsamples"])
        self.cache.reset_stats()

    def add_transform(self, transform: Transform) -> ShardListDataset:
        """Apply ``transform`` after the others; changes this dataset and returns it."""
        self.transformations.append(_transformation(transform))
        return self

    def __len__(self) -> int:
        return self.total_length

    def get_stats(self) -> tuple[int, int]:
        """Return how many samples were read in this process, and how many of them from a shard that was not open."""
        return self.cache.accesses, self.cache.misses

    def check_cache_misses(self) -> None:
        """Warn, once, where after a hundred samples more than 30 % came from a shard that was not open."""
        accesses, misses = self.get_stats()
        if accesses > _MISSES_AFTER and misses > _MISS_RATE * accesses and self._warned.first("misses"):
            logger.warning(
                "%.0f%% of samples wanted a shard that was not open: take a sampler that stays in few shards at a time"
                " (ShardedSampler, ChunkedSampler), or raise lru_size",
                100 * misses / accesses,
            )

    def get_shard(self, index: int) -> tuple[MappedShard, int, dict[str, Any]]:
        """Return the opened shard of sample ``index``, the sample's number in it, and the entry in ``shards``."""
        number = self._number(index)
        position = int(np.searchsorted(self.cum_lengths, number, side="right"))
        entry = self.shards[position]
        shard = self.cache.get_shard(entry["url"])
        if len(shard) != entry["nsamples"]:
            raise ShardFormatError(
                f"{redact(entry['url'])} holds {len(shard)} samples, but the index says {entry['nsamples']};"
                " make the index again with `wds-async index`, or remove the shard's old copy from the cache"
            )
        return shard, number - int(self.cum_lengths[position]) + entry["nsamples"], entry

    def _number(self, index: Any) -> int:
        number = operator.index(index)
        if not -self.total_length <= number < self.total_length:
            raise IndexError(f"sample {number} of a dataset of {self.total_length}")
        return number % self.total_length

    def __getitem__(self, index: int) -> Any:
        """Sample ``index`` (any integer type; negative ones from the end) after all transformations."""
        with Shortened():
            return self._sample(index)

    def _sample(self, index: int) -> Any:
        shard, inner, entry = self.get_shard(index)
        self.check_cache_misses()
        sample: Any = {name: io.BytesIO(data) for name, data in shard[inner].items()}
        sample |= {
            "__key__": shard.keys[inner],
            "__dataset__": entry.get("dataset"),
            "__index__": self._number(index),
            "__shard__": entry["url"],
            "__shardindex__": inner,
        }
        for transform in self.transformations:
            sample = transform(sample)
        return sample

    def close(self) -> None:
        """Close the open shards; they are opened again when they are needed."""
        self.cache.clear()

    def __enter__(self) -> ShardListDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ------------------------------------------------------------------ transformations


class _Decode:
    """Decoder of the streams of a sample; a field that ``decoder`` leaves as it is stays a stream."""

    def __init__(self, decoder: autodecode.Decoder) -> None:
        self.decoder = decoder

    def __call__(self, sample: Sample) -> Sample:
        raw = {name: value.getvalue() for name, value in sample.items() if isinstance(value, io.BytesIO)}
        named = {"__url__": sample.get("__shard__", "?"), "__key__": sample.get("__key__", "?")}  # for its errors
        decoded = self.decoder.decode({**named, **raw})
        return {
            name: value if name not in raw or decoded[name] is raw[name] else decoded[name]
            for name, value in sample.items()
        }


# The last extensions of the fields that wids decodes
_BASIC = frozenset(("cls", "cls2", "json", "mp", "npy", "pickle", "pkl", "pt", "pth", "text", "txt"))
_IMAGES = frozenset(("jpg", "pbm", "pgm", "png", "pnm", "ppm"))


def _gunzip(key: str, data: bytes) -> Any:
    inner = key.removesuffix(".gz").rpartition(".")[2]
    return autodecode.gzfilter(key, data) if inner in _BASIC or inner in _IMAGES else None


def _basic(key: str, data: bytes) -> Any:
    name = key.rpartition(".")[2]
    return autodecode.decoders["pth" if name == "pt" else name](data) if name in _BASIC else None


def _pil(key: str, data: bytes) -> Any:
    if key.rpartition(".")[2] not in _IMAGES:
        return None
    try:
        from PIL import Image  # noqa: PLC0415 (an extra)
    except ImportError as exn:
        raise MissingExtra('decoding images needs Pillow: pip install "wds-async[images]"') from exn
    return Image.open(io.BytesIO(data))


def _numpy(key: str, data: bytes) -> Any:
    image = _pil(key, data)
    return None if image is None else np.asarray(image)


def _transformation(transform: Any) -> Transform:
    if isinstance(transform, str):
        images = {"PIL": _pil, "numpy": _numpy}.get(transform)
        if images is not None:
            return _Decode(autodecode.Decoder([images], pre=[_gunzip], post=[_basic]))
        return _Decode(autodecode.Decoder([autodecode.imagehandler(transform)]))
    if not callable(transform):
        what = "a transformation is 'PIL', 'numpy', an image specification or a function"
        raise ConfigError(f"{what}, not {transform!r}")
    return transform  # type: ignore[no-any-return]


def _names_an_index(text: str) -> bool:
    """Return True for the place of an index, and for what looks like neither shards nor an index."""
    return names_list(text) or not (_SHARDS.search(text.partition("?")[0]) or os.path.isdir(text))


def _hashed(text: str) -> str:
    return urlsafe_b64encode(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest())[:16].decode()
