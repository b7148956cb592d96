"""Planning: inputs with their identity, and the tasks that read them."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from wds_async.arguments import check_size
from wds_async.distributed.tasks import Input, Task
from wds_async.errors import ConfigError
from wds_async.storage.listing.expand import Urls, matches
from wds_async.storage.options import StorageOptions

__all__ = ["Plan", "hash_of_ids", "ids_of", "planned"]


def planned(urls: Urls, options: Mapping[str, Any] | StorageOptions | None = None) -> list[Input]:
    """Return the shards that ``urls`` names (braces, wildcards, folders), in order, with sizes and versions where their
    stores tell them. Raise UrlError for what cannot be listed or matches nothing, and StorageError where a store
    refuses or fails."""
    entries = matches(urls, StorageOptions(options))
    return [Input(entry.url, entry.size, getattr(entry, "version", "")) for entry in entries]


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
    return (task.identity(work) for task in tasks)


def hash_of_ids(ids: Iterable[str]) -> str:
    """Return 32 hexadecimal digits that stand for all of ``ids`` in their order."""
    digest = hashlib.sha256()
    for one in ids:
        digest.update(one.encode("ascii"))
    return digest.hexdigest()[:32]
