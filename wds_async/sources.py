"""What a dataset specification says, as values: its sources, and how they are mixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wds_async.storage.options import NOTHING_GIVEN, StorageOptions

__all__ = ["Source", "Spec"]


@dataclass(frozen=True, slots=True)
class Source:
    """One source of a mix.

    ``urls``: its shards, expanded.
    ``weight``: its share in the mix, in any scale; by default the number of shards it reads an epoch. 0 leaves it out.
    ``fields``: the fields that its samples keep beside ``__…__``; None keeps all.
    ``metadata``: its other keys.
    ``nsamples``: samples of all its shards, where that is stated; ``counts``: those of single shards, by URL.
    ``resample``: True draws its shards with replacement and without end; a number draws so many each epoch.
    ``choose``: so many of its shards each epoch, without replacement; 0 for all.
    ``storage_options``: those of its stores' clients, over what the dataset was given.
    """

    name: str
    urls: tuple[str, ...]
    weight: float
    fields: tuple[str, ...] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    nsamples: int | None = None
    resample: bool | int = False
    choose: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    storage_options: StorageOptions = NOTHING_GIVEN


@dataclass(frozen=True, slots=True)
class Spec:
    """The sources of a dataset, in the order of the specification."""

    sources: tuple[Source, ...]
    name: str = ""

    @property
    def nsamples(self) -> int | None:
        """Samples of an epoch, None where a source does not state its own."""
        counts = [source.nsamples for source in self.sources if source.weight]
        known = [n for n in counts if n is not None]
        whole = not any(source.resample or source.choose for source in self.sources if source.weight)
        return sum(known) if whole and len(known) == len(counts) else None
