"""Shard lists, their order, and the share of them that this rank and worker reads."""

from __future__ import annotations

import itertools
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from wds_async import config, world
from wds_async.arguments import check_size, size
from wds_async.checkpoint.states import Counted, RandomState
from wds_async.errors import ConfigError, UrlError
from wds_async.rewrite import note_matches
from wds_async.shardlists.directories import DirectoryShardList
from wds_async.shardlists.spec import Spec, SpecSource, is_specification, load
from wds_async.stages import Traits, pipelinefilter
from wds_async.storage.options import StorageOptions

if TYPE_CHECKING:
    from torch.utils.data import IterableDataset  # noqa: F401

__all__ = [
    "DirectoryShardList",
    "Expanded",
    "MultiShardSample",
    "ResampledShardList",
    "ResampledShards",
    "SimpleShardList",
    "expand_source",
    "expand_urls",
    "non_empty",
    "resampled",
    "shardspec",
    "single_node_only",
    "split_by_node",
    "split_by_worker",
]

logger = logging.getLogger("wds_async")

StorageOptionsLike = Mapping[str, Any] | StorageOptions | None


def __getattr__(name: str) -> Any:
    if name == "IterableDataset":  # programs import it from here, as webdataset's room happens to allow
        from torch.utils.data import IterableDataset  # noqa: PLC0415

        return IterableDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def split_by_node(src: Iterable[Any], group: Any = None) -> Iterator[Any]:
    """Return this rank's share: every ``world_size``-th item, from the ``rank``-th on.

    ``group`` is a torch.distributed group; without one, the rank is that of `world.place`.
    """
    here = world.place(group)
    return itertools.islice(src, here.rank, None, here.world_size)


def split_by_worker(src: Iterable[Any]) -> Iterator[Any]:
    """Return this DataLoader worker's share: every ``num_workers``-th item, from the ``worker``-th on."""
    here = world.place()
    return itertools.islice(src, here.worker, None, here.num_workers)


def single_node_only(src: Iterable[Any], group: Any = None) -> Iterator[Any]:
    """Return everything. Raise ConfigError (a ValueError) where there is more than one rank."""
    if (n := world.place(group).world_size) > 1:
        raise ConfigError(
            f"single_node_only: this run has {n} ranks; pass nodesplitter=split_by_node, so that each reads its share"
        )
    return iter(src)


class Expanded(list[str]):
    """URLs that are not expanded again: what a pattern matched may hold braces. ``checksums`` are the CRC-32C that are
    stated of shards, eight hexadecimal digits by URL."""

    def __init__(self, urls: Iterable[str] = (), checksums: Mapping[str, str] | None = None) -> None:
        super().__init__(urls)
        self.checksums: Mapping[str, str] = checksums or {}


def _checksums_of(urls: Any) -> Mapping[str, str]:
    return urls.checksums if isinstance(urls, Expanded) else {}


def _shard(url: str, checksums: Mapping[str, str]) -> dict[str, Any]:
    return {"url": url, "crc32c": checksums[url]} if url in checksums else {"url": url}


def expand_urls(urls: Any, *, storage_options: StorageOptionsLike = None) -> list[str]:
    """Return every shard that ``urls`` names, in order: braces, ``::``, ``${X}`` for ``WDS_X``, and patterns and
    folders in files and stores (see `storage.listing.expand`). ``storage_options`` are for the stores that are listed.
    """
    from wds_async.storage.listing.expand import expand_listed  # noqa: PLC0415 (asyncio)

    return expand_listed(urls, StorageOptions(storage_options))


def expand_source(source: Any, max_urls: int = 10**9, *, storage_options: StorageOptionsLike = None) -> list[str]:
    """Return the URLs of a string, path, list or other iterable (of which at most ``max_urls`` items are taken); those
    of an `Expanded` as they are. An item may be ``{"url": …}``. ``storage_options`` are for the stores that are listed.

    Raises UrlError where it is none of these or gives no URL, and what `storage.listing.expand.expand_listed` raises.
    """
    if isinstance(source, Expanded):
        urls = list(itertools.islice(source, max_urls))
    elif isinstance(source, (str, os.PathLike)):
        urls = expand_urls(source, storage_options=storage_options)
    elif isinstance(source, Iterable) and not isinstance(source, (bytes, dict)):
        items = [item["url"] if isinstance(item, Mapping) else item for item in itertools.islice(source, max_urls)]
        urls = expand_urls(items, storage_options=storage_options)
    else:
        raise UrlError(f"cannot take shards from a {type(source).__name__}: give a URL, a path or a list of them")
    if not urls:
        raise UrlError(f"no shards: {source!r} is empty; give at least one URL")
    return urls


def _prepare(urls: list[str]) -> None:
    from wds_async.storage.registry import import_clients  # noqa: PLC0415 (asyncio)

    note_matches(urls)
    if world.may_fork_workers():
        import_clients(urls)


class SimpleShardList(world.TorchDataset):
    """The shards of ``urls``, each once, as ``{"url": …}``.

    ``urls`` is a string (braces, ``::``, ``${X}`` for ``WDS_X``, globs, a directory), a path, or a list of these.
    Globs and folders in stores are listed now, with ``storage_options`` for their clients. With ``seed`` the shards
    come in one shuffled order, the same in every iteration; ``True`` takes the time for it, ``None`` keeps the order
    given. ``counts`` are the samples of each shard by its URL, where an index tells them; the length of a dataset
    follows from them. ``sizes`` are the bytes, likewise. Raises UrlError for an empty list.
    """

    def __init__(
        self,
        urls: Any,
        seed: Any = None,
        *,
        counts: Mapping[str, int] | None = None,
        sizes: Mapping[str, int] | None = None,
        storage_options: StorageOptionsLike = None,
    ) -> None:
        self.urls, self.checksums = expand_source(urls, storage_options=storage_options), _checksums_of(urls)
        _prepare(self.urls)
        self.seed = time.time() if seed is True else seed
        self.counts: Mapping[str, int] = counts or {}
        self.sizes: Mapping[str, int] = sizes or {}

    def __len__(self) -> int:
        return len(self.urls)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        order = self.urls.copy()
        if self.seed is not None:
            random.Random(self.seed).shuffle(order)
        return (_shard(url, self.checksums) for url in order)


class ResampledShards(world.CountsEpochs, world.TorchDataset):
    """``nshards`` shards (without end by default) drawn from ``urls`` with replacement.

    Each worker of each rank draws for itself, so nothing needs to be split, an epoch must be cut by
    ``with_epoch``, and some shards are read twice before others are read once. ``deterministic``: the order
    follows from ``(worker_seed(), epoch, seed)``, where ``worker_seed`` is `world.worker_seed` by default and every
    iteration is the next epoch; otherwise also from the operating system's randomness.
    ``WDS_SHOW_SEED=1`` logs the seed. ``max_urls`` bounds what is taken from an iterable;
    ``storage_options`` are for the clients of stores that are listed.
    """

    traits = Traits(state=RandomState)

    def __init__(
        self,
        urls: Any,
        nshards: int = sys.maxsize,
        seed: Any = 0,
        worker_seed: Callable[[], Any] | None = None,
        deterministic: bool = False,
        max_urls: int | None = 10**6,
        empty_check: bool = True,
        *,
        storage_options: StorageOptionsLike = None,
    ) -> None:
        most = sys.maxsize if max_urls is None else check_size("ResampledShards", "max_urls", max_urls, at_least=1)
        self.nshards = check_size("ResampledShards", "nshards", nshards)
        self.urls, self.checksums = expand_source(urls, most, storage_options=storage_options), _checksums_of(urls)
        _prepare(self.urls)
        self.seed = seed
        self.worker_seed = world.worker_seed if worker_seed is None else worker_seed
        self.deterministic = deterministic
        self._epoch = world.SharedEpoch()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.run()

    def run(self, *, state: RandomState | None = None) -> Iterator[dict[str, Any]]:
        """Begin the next epoch: its draws."""
        parts = [self.worker_seed(), self._epoch.next(), world.seed_number(self.seed)]
        if not self.deterministic:
            parts.append(int.from_bytes(os.urandom(8), "little"))
        seed = world.make_seed(*parts)
        if config.settings().show_seed:
            logger.warning("ResampledShards seed %d", seed)
        rng, last = (state or RandomState()).begin(random.Random(seed)), len(self.urls) - 1
        return (_shard(self.urls[rng.randint(0, last)], self.checksums) for _ in range(self.nshards))


ResampledShardList = ResampledShards


class MultiShardSample(world.CountsEpochs, world.TorchDataset):
    """The shards of several sources together, chosen anew each epoch and shuffled, as ``{"url": …}``.

    ``fname`` is a specification (see `spec`): of each source come all shards, or ``choose`` of them without
    replacement, or ``resample`` of them with (``resample: true`` draws as many as there are). Choice and order follow
    from ``seed + epoch``, so all ranks have the same ones and can split them; every iteration is the next epoch.
    Weights, fields and metadata are for mixing samples and mean nothing here. Raises what `spec.load` raises.
    """

    def __init__(
        self, fname: str | os.PathLike[str] | Mapping[str, Any] | Spec, seed: int | world.DrawnSeed = 0
    ) -> None:
        self.sources: tuple[SpecSource, ...] = load(fname).sources
        self.checksums = {url: crc32c for source in self.sources for url, crc32c in source.checksums.items()}
        self.seed = seed
        self._epoch = world.SharedEpoch()

    @property
    def urls(self) -> list[str]:
        """Every shard of every source."""
        return [url for source in self.sources for url in source.urls]

    def set_epoch(self, seed: int) -> None:  # WebDataset's name of the argument
        """Make the next iteration that of epoch ``seed``."""
        super().set_epoch(seed)

    def get_shards_for_epoch(self) -> list[str]:
        """Begin the next epoch: its shards, in its order."""
        rng = random.Random(world.seed_number(self.seed) + self._epoch.next())
        chosen: list[str] = []
        for source in self.sources:
            shards = list(source.urls)
            if source.resample:
                shards = rng.choices(shards, k=len(shards) if source.resample is True else source.resample)
            elif source.choose:
                rng.shuffle(shards)
                del shards[source.choose :]
            chosen += shards
        rng.shuffle(chosen)
        return chosen

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (_shard(url, self.checksums) for url in self.get_shards_for_epoch())


def shardspec(spec: Any) -> MultiShardSample | SimpleShardList:
    """Return `MultiShardSample` for a specification (a dict, or a path or URL of YAML or JSON), else a
    `SimpleShardList`.
    """
    return MultiShardSample(spec) if is_specification(spec) else SimpleShardList(spec)


def _resampled(
    src: Iterable[Any], n: int = sys.maxsize, seed: Any = None, *, state: RandomState | None = None
) -> Iterator[Any]:
    """Read all of ``src``, then yield ``n`` items drawn from it with replacement."""
    items = list(src)
    if not items:
        raise UrlError("resampled: the source gave nothing to draw from")
    rng = (state or RandomState()).begin(random.Random(seed))
    for _ in range(check_size("resampled", "n", n)):
        yield rng.choice(items)


resampled = pipelinefilter(_resampled, {"n": size()})


def non_empty(src: Iterable[Any], why: Callable[[], str] | None = None, state: Counted | None = None) -> Iterator[Any]:
    """Return everything. Raise ConfigError (a ValueError), with the text ``why()``, where that is nothing."""
    state = state or Counted()
    if state.count:
        return iter(src)
    # In C behind the first: a generator of our own around it would cost each sample of a tar half a percent.
    return itertools.chain.from_iterable(_first_and_rest(iter(src), why, state))


def _first_and_rest(source: Iterator[Any], why: Callable[[], str] | None, state: Counted) -> Iterator[Iterable[Any]]:
    for first in source:
        state.add()
        yield (first,)
        del first  # or it would be held until the end
        break
    else:
        usual = "non_empty: the stage before it gave nothing at all (fewer shards than workers?)"
        raise ConfigError(usual if why is None else why())
    yield source
