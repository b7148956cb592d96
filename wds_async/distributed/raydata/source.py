"""Ray Data's source of shards.

Ray decides where and when the shards are read; how is decided by the engine, whose retries go on from the byte where an
answer broke. Ray's own retries begin a task anew, and drop the blocks that they gave before: the blocks depend on the
bytes of the shards only, so nothing is lost or doubled.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from wds_async import packages
from wds_async.arguments import check_size
from wds_async.distributed.plan import planned
from wds_async.distributed.raydata.blocks import BlockOptions, read_blocks, schema_of
from wds_async.distributed.tasks import Input
from wds_async.environment import parse_bytes
from wds_async.errors import ConfigError
from wds_async.handlers import Handler, check_handler, reraise_exception
from wds_async.redact import redact
from wds_async.shardlists import spec
from wds_async.storage.options import StorageOptions

__all__ = ["ShardSource", "balanced", "read"]

_LEAST_GROUPS = 512
_GROUP_BYTES = 1 << 30
_OWN_SHARE, _RAY_SHARE = 0.6, 0.4
"""Shares of the largest block. Ray joins blocks until they are larger than its target, and cuts what is larger than 1.5
times that. So blocks of 1 to 1.5 targets stay as they are, and none comes out larger than both together."""


def read(
    urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | Mapping[str, Any],
    *,
    fields: Sequence[str] | None = None,
    block_bytes: int | str = "16M",
    groups: int | None = None,
    handler: Handler = reraise_exception,
    on_corrupt: str | None = None,
    verify: str | None = None,
    expect: Sequence[str] | None = None,
    max_field_bytes: int = 1 << 30,
    max_bad_fraction: float | None = None,
    transfer: dict[str, Any] | None = None,
    storage_options: dict[str, Any] | None = None,
    **ray_options: Any,
) -> Any:
    """Return a Ray dataset with a row for each sample of the shards ``urls`` (as for `WebDataset`: braces, patterns,
    lists, JSON lists, folders of jobs). Ray keeps their order if ``execution_options.preserve_order`` tells it to.

    Columns are ``__key__``, ``__url__``, ``__offset__`` (of the sample, in bytes, in the uncompressed tar) and one of
    type binary for each field: those of ``fields``, or those that there are. A sample without a field has null there;
    ``expect`` names fields that every sample must have. Fields that are not named are not copied, and with ``fields``
    the schema is known before anything is read.

    The shards are listed once, here. One that is replaced before it is read is `ObjectChanged`, where its store tells
    versions. They are divided into ``groups``, each the work of one task, so that the largest has as few bytes as
    possible without changing the order: by default one for each shard up to 512, and about 1 GiB each beyond that,
    whatever the size of the cluster. A block has at most ``block_bytes`` (16 MiB), or a single row. That is the size
    which Ray is given for the blocks of all operators of this dataset, unless its `DataContext` has a smaller one.
    A task holds the byte budget of its reader and a few blocks, however large the shards are. ``count()`` reads nothing
    where a list of shards states the samples of each, as that of a job does, and none may be dropped (by ``expect``, a
    ``handler`` or ``on_corrupt``).

    ``handler``, ``on_corrupt``, ``verify``, ``max_field_bytes``, ``max_bad_fraction``, ``transfer`` and
    ``storage_options`` are those of `WebDataset`; what is passed over is logged by the task. ``ray_options`` go to
    ``ray.data.read_datasource``: ``num_cpus``, ``concurrency``, ``memory``, and ``override_num_blocks``, which is the
    number of ``groups`` unless that is given; where there are fewer shards, Ray cuts their blocks. Raise ConfigError
    for a wrong argument, MissingExtra without Ray, and what listing raises.
    """
    check_handler(handler)
    data = packages.optional("ray.data", "raydata.read", "ray")
    size = _size("block_bytes", block_bytes)
    options = BlockOptions(
        max(1, int(size * _OWN_SHARE)),
        _names("fields", fields),
        handler,
        on_corrupt,
        verify,
        _names("expect", expect),
        max_field_bytes,
        max_bad_fraction,
        dict(transfer or {}),
        StorageOptions(storage_options),
    )
    options.check()
    check_size("raydata.read", "groups", groups or 1, at_least=1)
    blocks = _number_of_blocks(ray_options, data)
    dataset = _dataset(_listed(urls, options.storage), options, groups, blocks, ray_options)
    _limit_blocks(dataset.context, max(1, int(size * _RAY_SHARE)))
    return dataset


def _dataset(
    listed: _StatedShards, options: BlockOptions, groups: int | None, blocks: int, ray_options: Mapping[str, Any]
) -> Any:
    """Return the dataset of the listed shards in so many ``groups``, and at least ``blocks``."""
    data = packages.optional("ray.data", "raydata.read", "ray")
    options = dataclasses.replace(options, storage=listed.storage)
    parts = balanced(listed.inputs, groups or blocks or _group_count(listed.inputs))
    kind = type("ShardDatasource", (ShardSource, data.Datasource), {})
    source = kind(parts, options, listed.counts, listed.checksums)
    return data.read_datasource(source, override_num_blocks=max(blocks, len(parts)), **ray_options)


def _number_of_blocks(ray_options: dict[str, Any], data: Any) -> int:
    """Take the number of blocks out of ``ray_options``; 0 where there is none. ConfigError for unknown options."""
    parameters = inspect.signature(data.read_datasource).parameters.values()
    known = {one.name for one in parameters if one.kind == inspect.Parameter.KEYWORD_ONLY}
    if unknown := sorted(ray_options.keys() - known):
        raise ConfigError(f"raydata.read has no argument {unknown[0]!r}, nor has ray.data.read_datasource")
    number, older = ray_options.pop("override_num_blocks", None), ray_options.pop("parallelism", -1)
    number = older if number is None and older != -1 else number
    return 0 if number is None else check_size("raydata.read", "override_num_blocks", number, at_least=1)


@dataclasses.dataclass(frozen=True)
class _StatedShards:
    """Shards, and what their list states of them: samples and CRC-32C by URL."""

    inputs: list[Input]
    storage: StorageOptions
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    checksums: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _listed(urls: Any, storage: StorageOptions) -> _StatedShards:
    """Return the shards of ``urls``. ConfigError for a list that is no list of shards: a mix, or a function."""
    if spec.is_function(urls) or not spec.is_specification(urls):
        return _StatedShards(planned(urls, storage), storage)
    sources = spec.load(urls, storage).sources
    source = sources[0]
    if len(sources) > 1 or source.resample or source.choose:
        shown = "urls" if isinstance(urls, Mapping) else redact(os.fspath(urls))
        raise ConfigError(
            f"{shown}: raydata.read reads lists of shards, and this is a mix of {len(sources)} sources, or of a share"
            " of one. Read each with raydata.read, and join them by Dataset.union"
        )
    return _StatedShards(
        planned(list(source.urls), source.storage_options), source.storage_options, source.counts, source.checksums
    )


def _limit_blocks(context: Any, target: int) -> None:
    """Set Ray's target for the size of blocks, unless it is smaller."""
    context.target_max_block_size = min(target, context.target_max_block_size or target)


def _size(name: str, value: int | str) -> int:
    """Return ``value`` in bytes. ConfigError for what is no size."""
    try:
        return parse_bytes(value) if isinstance(value, str) else int(value)
    except (TypeError, ValueError) as exn:
        raise ConfigError(f"{name}={value!r}: {exn}") from exn


def _names(argument: str, names: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return ``names`` of fields. ConfigError for a single text, or what is no list of texts."""
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f'{argument}={names!r}: it is a list of field names, as in {argument}=["jpg", "json"]')
    return tuple(names)


def _group_count(entries: Sequence[Input]) -> int:
    total = sum(entry.size or 0 for entry in entries)
    return min(len(entries), max(_LEAST_GROUPS, total // _GROUP_BYTES))


def balanced(entries: Sequence[Input], count: int) -> list[list[Input]]:
    """Return ``entries`` in their order as at most ``count`` groups, of which the largest has as few bytes as possible.
    A shard of unknown size counts as the mean of the others."""
    known = [entry.size for entry in entries if entry.size is not None]
    mean = max(1, sum(known) // len(known)) if known else 1
    sizes = [mean if entry.size is None else entry.size for entry in entries]
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:  # the smallest limit with which `count` groups are enough
        middle = (low + high) // 2
        if sum(1 for _ in _runs(sizes, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    starts = [*_runs(sizes, low), len(entries)]
    return [list(entries[start:stop]) for start, stop in itertools.pairwise(starts)]


def _runs(sizes: Sequence[int], limit: int) -> Iterator[int]:
    """Yield where runs of at most ``limit`` bytes begin."""
    total = limit + 1
    for index, size in enumerate(sizes):
        total += size
        if total > limit:
            yield index
            total = size


class ShardSource:
    """Methods of a Ray ``Datasource`` that reads groups of shards."""

    def __init__(
        self,
        groups: Sequence[Sequence[Input]],
        options: BlockOptions,
        counts: Mapping[str, int] | None = None,
        checksums: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.groups = groups
        self.options = options
        self.counts = counts or {}
        self.checksums = checksums or {}

    def get_name(self) -> str:
        """Return the name of the operator."""
        return "Shards"

    def estimate_inmemory_data_size(self) -> int | None:
        """Return the bytes of all shards, None if they are not known."""
        sizes = [entry.size for group in self.groups for entry in group]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[Any]:
        """Return a task for each group, whatever the ``parallelism``."""
        data = packages.optional("ray.data", "raydata.read", "ray")
        block = packages.optional("ray.data.block", "raydata.read", "ray")
        schema = None if self.options.fields is None else schema_of(self.options.fields)
        tasks = []
        for group in self.groups:
            sizes = [entry.size for entry in group]
            metadata = block.BlockMetadata(
                num_rows=self._count(group),
                size_bytes=None if None in sizes else sum(size or 0 for size in sizes),
                input_files=tuple(entry.url for entry in group),
                exec_stats=None,
            )
            call = functools.partial(_read, [self._shard(entry) for entry in group], self.options)
            tasks.append(data.ReadTask(call, metadata, schema, per_task_row_limit))
        return tasks

    def _count(self, group: Sequence[Input]) -> int | None:
        """Return the number of samples of ``group``, where it is stated and none may be dropped."""
        options = self.options
        if options.expect or options.handler is not reraise_exception or options.on_corrupt not in (None, "raise"):
            return None
        counts = [self.counts.get(entry.url) for entry in group]
        return None if None in counts else sum(count or 0 for count in counts)

    def _shard(self, entry: Input) -> dict[str, Any]:
        """Return the entry of a shard list, with the version that was listed and the checksum that was stated."""
        stated = {"url": entry.url, "version": entry.version, "crc32c": self.checksums.get(entry.url)}
        return {name: value for name, value in stated.items() if value}


def _read(shards: Sequence[dict[str, Any]], options: BlockOptions) -> Iterator[Any]:
    """Read ``shards`` in one of Ray's processes, of which a host may have one for each CPU."""
    yield from read_blocks(shards, dataclasses.replace(options, processes=os.cpu_count() or 1))
