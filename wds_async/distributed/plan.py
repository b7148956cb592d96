"""Planning: inputs with their identity, and the tasks that read them."""

from __future__ import annotations

import hashlib
import operator
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from wds_async.arguments import check_size
from wds_async.distributed.tasks import STREAM, Input, Task, identity
from wds_async.errors import ConfigError, UrlError
from wds_async.shardlists import spec
from wds_async.storage.listing.expand import Urls, listed_by_folder, matches
from wds_async.storage.options import StorageOptions
from wds_async.transfer.probe import probe

__all__ = ["Plan", "hash_of_ids", "ids_of", "planned"]


def planned(urls: Urls, options: Mapping[str, Any] | StorageOptions | None = None) -> list[Input]:
    """Return every shard that ``urls`` names (braces, patterns, folders: see `storage.listing.expand`), in order, with
    its size and its version in the form in which a reader compares it.

    A list of shards stands for its shards: a job's folder (``…/_wds/JOB``) or a specification (``.json``, ``.yaml``).
    Patterns are listed anyway. Shards that are named one by one are looked up by one listing of each folder, where
    the store's listings tell versions and the folder is not much larger than what is asked for; all others are asked
    for one by one, many at once. Size and version are unknown (None, "") for what can only be read in order: commands
    and the program's openers. Raise UrlError where nothing matches, and the error of the first shard that is missing
    or cannot be read.
    """
    options = StorageOptions(options)
    named = matches(_unlisted(urls, options), options)
    entries = {entry.url: entry for entry in named}
    entries |= listed_by_folder([entry.url for entry in named if not entry.version], options)
    inputs = {url: Input(url, entry.size, entry.version) for url, entry in entries.items()}
    for probed in probe([url for url, one in inputs.items() if not one.version], options):
        if probed.error is not None:
            raise probed.error
        if probed.checked:
            inputs[probed.url] = Input(probed.url, probed.size, probed.version)
    for url in [url for url, one in inputs.items() if one.size is None and not one.version and _is_stream(url)]:
        inputs[url] = Input(url, None, f"{STREAM}{os.urandom(8).hex()}")
    return [inputs[entry.url] for entry in named]


def _is_stream(url: str) -> bool:
    try:
        return url == "-" or stat.S_ISFIFO(os.stat(url).st_mode)
    except (OSError, ValueError):
        return False


def _unlisted(urls: Urls, options: StorageOptions) -> Urls:
    """Return ``urls`` with the shards of lists in place of the lists. UrlError for the name of a function."""
    names = [urls] if isinstance(urls, str | os.PathLike) else list(urls)
    if not any(map(spec.is_specification, names)):
        return names
    return [url for name in names for url in (_shards_of(name, options) if spec.is_specification(name) else [name])]


def _shards_of(name: str | os.PathLike[str], options: StorageOptions) -> Iterator[str]:
    if spec.is_function(name):
        raise UrlError(f"{os.fspath(name)} makes samples, and a job reads shards: give URLs, a list or a job's folder")
    return (url for source in spec.load(name, options).sources for url in source.urls)


class Plan(Sequence[Task]):
    """Tasks that read ``inputs_per_task`` consecutive inputs each, made when they are asked for.

    ``parameters`` are those of every task. ConfigError without inputs.
    """

    def __init__(
        self, inputs: Sequence[Input], inputs_per_task: int = 1, parameters: Mapping[str, Any] | None = None
    ) -> None:
        self.inputs = inputs
        self.inputs_per_task = check_size("a plan", "inputs_per_task", inputs_per_task, at_least=1)
        self.parameters = dict(parameters or {})
        if not inputs:
            raise ConfigError("a job needs inputs: the list of shards is empty")

    def __len__(self) -> int:
        return (len(self.inputs) + self.inputs_per_task - 1) // self.inputs_per_task

    @overload
    def __getitem__(self, number: int) -> Task: ...

    @overload
    def __getitem__(self, number: slice) -> list[Task]: ...

    def __getitem__(self, number: int | slice) -> Task | list[Task]:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        place = operator.index(number)
        place += len(self) if place < 0 else 0
        if not 0 <= place < len(self):
            raise IndexError(f"task {number} of {len(self)}")
        first = place * self.inputs_per_task
        return Task(place, tuple(self.inputs[first : first + self.inputs_per_task]), self.parameters)


def ids_of(tasks: Sequence[Task], work: Mapping[str, Any]) -> Iterator[str]:
    """Yield the ids of ``tasks`` of the described ``work``, in order."""
    described = identity(dict(work))
    return (task.identity(described) for task in tasks)


def hash_of_ids(ids: Iterable[str]) -> str:
    """Return 32 hexadecimal digits that stand for all of ``ids`` in their order."""
    digest = hashlib.sha256()
    for one in ids:
        digest.update(one.encode("ascii"))
    return digest.hexdigest()[:32]
