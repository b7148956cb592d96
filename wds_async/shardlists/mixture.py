"""A specification's sources as one stream of samples, mixed by weight."""

from __future__ import annotations

import copy
import functools
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from wds_async import config, mix, world
from wds_async.redact import redact
from wds_async.shardlists.lists import Expanded, MultiShardSample, ResampledShards, SimpleShardList
from wds_async.shardlists.spec import Spec, SpecSource

__all__ = ["Labelled", "Mixture"]

logger = logging.getLogger("wds_async")


class Labelled(world.TorchDataset):
    """The samples of one source: with its name and metadata as ``__source__``, and only the fields it selects.

    Fields whose names begin with ``__`` always stay. A sample that has none of the selected fields is not dropped; the
    first of them is logged, for it may be a misspelt ``extensions:``.
    """

    def __init__(self, samples: Iterable[dict[str, Any]], source: SpecSource) -> None:
        self.samples = samples
        self.name = source.name
        label = {"name": source.name, **source.metadata}
        flat = all(isinstance(value, (str, int, float, type(None))) for value in label.values())
        self.label = label.copy if flat else functools.partial(copy.deepcopy, label)  # a sample may be changed
        self.fields = None if source.fields is None else frozenset(source.fields)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._labelled(iter(self.samples))

    def _labelled(self, samples: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        fields, warned = self.fields, False
        for sample in samples:
            if fields is not None:
                # In place: a raw sample knows its shard and offset, which a new dictionary would not.
                for name in [name for name in sample if name not in fields and not name.startswith("__")]:
                    del sample[name]
                if not warned and fields.isdisjoint(sample):
                    warned = True
                    logger.warning(
                        "source %s: its extensions %s are not in sample %r of %s",
                        self.name,
                        sorted(fields),
                        sample.get("__key__"),
                        redact(str(sample.get("__url__"))),
                    )
            sample["__source__"] = self.label()
            yield sample


class Mixture(mix.Mix):
    """The samples of all sources of ``spec``, each from a source drawn by weight; the first stage of a pipeline.

    ``make(shards)`` builds the pipeline of one source, from shards to samples; of one with ``storage_options`` it gets
    those too. ``shards`` is a shard list: a
    `SimpleShardList` (with its ``counts``), for a source with ``resample`` or ``choose`` a `ResampledShards` or
    `MultiShardSample`; with ``resampled`` it is a list of URLs, to be drawn from without end. The pipelines split their
    shards among ranks and workers, and must bear to have none.

    An epoch holds every sample of every source once, in the proportions of the weights until sources end. With
    ``resampled`` the pipelines that ``make`` builds do not end, and the proportions hold for ever; with
    ``resample: true`` one source does not, and the epoch ends when all others have. The draws follow from ``seed``, the
    epoch, rank and worker; epochs count on in memory that DataLoader workers share, from ``WDS_EPOCH`` on. Nothing is
    opened before it is iterated, a source not before it is drawn; all are closed with the iterator.
    """

    def __init__(
        self,
        spec: Spec,
        make: Callable[..., Iterable[dict[str, Any]]],
        *,
        resampled: bool = False,
        seed: int | world.DrawnSeed = 0,
    ) -> None:
        self.sources = tuple(source for source in spec.sources if source.weight)
        super().__init__([make(_shards(source, resampled, seed), **_own(source)) for source in self.sources])
        self.weights = [source.weight for source in self.sources]
        self.endless = frozenset(i for i, source in enumerate(self.sources) if resampled or source.resample is True)
        self.seed = seed
        self._epoch = world.SharedEpoch((config.settings().epoch or 0) - 1)

    @property
    def draws(self) -> bool:
        """True where the order of samples follows from the seed even where the shards keep theirs."""
        return len(self.sources) > 1 or any(source.resample or source.choose for source in self.sources)

    @property
    def urls(self) -> list[str]:
        """Every shard of every source."""
        return [url for source in self.sources for url in source.urls]

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of ``epoch``, here and in every source."""
        self._epoch.set(epoch - 1)
        super().set_epoch(epoch)

    def apart(self) -> Mixture:
        """Return a copy that counts its epochs for itself, from here on, as do its sources."""
        other = copy.copy(self)
        other._epoch = self._epoch.apart()
        other.datasets = [source.compose() for source in self.datasets]
        return other

    def as_given(self, number: int, items: Iterable[Any]) -> Labelled:
        return Labelled(items, self.sources[number])

    def _drawn(self, sources: list[Iterator[Any]], state: mix.MixState) -> Iterator[Any]:
        items = self.mixed(sources, state)
        return sources[0] if len(sources) == 1 else items

    def mixed(self, sources: list[Iterator[Any]], state: mix.MixState) -> Iterator[dict[str, Any]]:
        """Drawn by weight, until every source that ends has ended."""
        rng = random.Random(world.make_seed(world.seed_number(self.seed), self._epoch.next(), world.worker_seed()))
        return mix.random_samples(sources, self.weights, longest=True, rng=rng, endless=self.endless, state=state)


def _own(source: SpecSource) -> dict[str, Any]:
    return {"storage_options": source.storage_options} if source.storage_options else {}


def _shards(source: SpecSource, resampled: bool, seed: int | world.DrawnSeed) -> Any:
    if resampled:  # drawn by the pipeline itself
        return Expanded(source.urls, source.checksums)
    if not (source.resample or source.choose):
        return SimpleShardList(Expanded(source.urls, source.checksums), counts=source.counts, sizes=source.sizes)
    chosen: ResampledShards | MultiShardSample
    if source.resample is True:
        chosen = ResampledShards(Expanded(source.urls, source.checksums), seed=seed, deterministic=True)
    else:
        chosen = MultiShardSample(Spec((source,)), seed=seed)
    chosen.set_epoch(config.settings().epoch or 0)
    return chosen
