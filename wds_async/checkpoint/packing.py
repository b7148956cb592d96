"""Packing of items and generators into text for a state: positions of samples, pickled items, states of generators."""

from __future__ import annotations

import io
import pickle
import random
import zlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from wds_async import config, packages
from wds_async.checkpoint.states import pack_bytes, pack_random, unpack_bytes, unpack_random
from wds_async.decoding.unpickle import safe_loads
from wds_async.errors import StateError, UnsafeContent
from wds_async.tar.blocks import BLOCK
from wds_async.tar.group import RawSample, StoredSample

__all__ = [
    "Reference",
    "Shard",
    "global_random_mark",
    "load_global_random",
    "pack_items",
    "pack_places",
    "save_global_random",
    "seed_generators",
    "seed_global_random",
    "shard_of",
    "unpack_items",
    "unpack_places",
]

Shard = tuple[Any, ...]
"""A shard: its URL, and behind it, where the first stage mixes several sources, the number of the one that reads it; if
that mixes sources too, the number of the one in there, and so on."""

Reference = tuple[str, int, int | None]
"""A sample in its shard: URL, offset of its first byte, and of the byte behind its last (None: the shard's end)."""


def save_global_random() -> dict[str, Any]:
    """Return the states of the generators that functions of the program draw from: Python's, and those of numpy and
    torch (its CPU's) where they are imported."""
    saved: dict[str, Any] = {"python": pack_random(random.getstate())}
    if (numpy := packages.loaded("numpy.random")) is not None:
        name, keys, position, has_gauss, gauss = numpy.get_state()
        saved["numpy"] = [name, pack_bytes(keys.tobytes()), int(position), int(has_gauss), float(gauss)]
    if (torch := packages.loaded("torch")) is not None:
        saved["torch"] = pack_bytes(torch.get_rng_state().numpy().tobytes())
    return saved


def global_random_mark() -> list[Any]:
    """Return something that differs where one of these generators was drawn from. It takes less than saving them."""
    mark: list[Any] = [random.getstate()]
    if (numpy := packages.loaded("numpy.random")) is not None:
        _, keys, position, *rest = numpy.get_state()
        mark += [keys.tobytes(), position, rest]
    if (torch := packages.loaded("torch")) is not None:
        mark.append(torch.get_rng_state().numpy().tobytes())
    return mark


def load_global_random(saved: dict[str, Any]) -> None:
    """Restore the saved states of these generators."""
    random.setstate(unpack_random(saved["python"]))
    if "numpy" in saved:
        import numpy as np  # noqa: PLC0415 (only where it was used before)

        name, keys, *rest = saved["numpy"]
        np.random.set_state((name, np.frombuffer(unpack_bytes(keys), np.uint32), *rest))
    if "torch" in saved and (torch := packages.loaded("torch")) is not None:
        torch.set_rng_state(torch.frombuffer(bytearray(unpack_bytes(saved["torch"])), dtype=torch.uint8))


def seed_global_random(seed: int, worker: int) -> None:
    """Seed these generators as torch does in a DataLoader worker; ``seed`` is that of worker 0."""
    random.seed(seed + worker)
    torch = packages.loaded("torch")
    torch.manual_seed(seed + worker)
    if packages.loaded("numpy") is not None:
        import numpy as np  # noqa: PLC0415 (only where it was used before)

        np.random.seed(packages.loaded("torch.utils.data._utils.worker")._generate_state(seed, worker))


def seed_generators(seed: int) -> None:
    """Seed these generators with ``seed``, of 31 bits; numpy's in any case, which is imported with its first use."""
    import numpy.random  # noqa: PLC0415 (not needed where nothing is seeded)

    random.seed(seed)
    numpy.random.seed(seed)
    if (torch := packages.loaded("torch")) is not None:
        torch.manual_seed(seed)


def pack_places(places: Sequence[tuple[Shard, int, int | None]], numbers: dict[Shard, int]) -> dict[str, Any]:
    """Return ``places`` of samples in shards packed, 16 characters for each of a tar; their shards get ``numbers``."""
    shards = [numbers.setdefault(shard, len(numbers)) for shard, _, _ in places]
    first, last = [offset for _, offset, _ in places], [stop or 0 for _, _, stop in places]
    unit = BLOCK if not any(offset % BLOCK for offset in (*first, *last)) else 1  # of tars all are
    columns = [shards, [offset // unit for offset in first], [offset // unit for offset in last]]
    code = "I" if max((*columns[1], *columns[2]), default=0) < 1 << 32 else "Q"
    packed = [pack_bytes(array(code, column).tobytes()) for column in columns]
    return {"references": packed, "count": len(places), "unit": unit, "code": code}


def unpack_places(packed: Mapping[str, Any], shards: Sequence[Shard]) -> list[tuple[Shard, int, int | None]]:
    """Return the places in ``packed``; ``shards`` by their numbers."""
    columns, unit = [array(packed["code"], unpack_bytes(text)) for text in packed["references"]], packed["unit"]
    return [(shards[shard], first * unit, (last * unit) or None) for shard, first, last in zip(*columns, strict=True)]


def shard_of(url: str, facts: Mapping[str, Any]) -> Shard:
    """Return the shard of an entry of the saved ``shards``."""
    return (url, *facts.get("source", ()))


class _ItemPickler(pickle.Pickler):
    """Pickler that writes samples as they come from shards as tuples, of which `_restored` makes samples again."""

    def reducer_override(self, obj: Any) -> Any:
        return (dict, (), None, None, iter(obj.items())) if isinstance(obj, RawSample) else NotImplemented


class _LimitedBytes(io.BytesIO):
    """A stream that refuses to take more than ``limit`` bytes."""

    def __init__(self, limit: int, stage: str) -> None:
        super().__init__()
        self.limit, self.stage = limit, stage

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > self.limit:
            raise StateError(
                f"the stage {self.stage} keeps more than {self.limit >> 20} MB of items that cannot be made again of "
                "their places in the shards, so there is no state: put it before the stages that make them"
            )
        return super().write(data)


def pack_items(items: Sequence[Any], stage: str, limit_bytes: int | None = None) -> dict[str, Any]:
    """Return the pickled ``items``, restricted by the rules for pickled fields. StateError for what these refuse."""
    places = [(item.shard, item.offset, item.stop) if isinstance(item, RawSample) else None for item in items]
    stream = io.BytesIO() if limit_bytes is None else _LimitedBytes(limit_bytes, stage)
    try:
        _ItemPickler(stream, pickle.HIGHEST_PROTOCOL).dump((list(items), places))
        data = stream.getvalue()
        _loads(data)
    except (UnsafeContent, pickle.PicklingError, TypeError, AttributeError) as exn:
        raise StateError(
            f"the stage {stage} holds items that cannot be saved ({exn}). Put it before the stages that make them, "
            "mark the functions of those as wds.deterministic, or set WDS_ALLOW_PICKLE=1 if you trust the states"
        ) from exn
    return {"items": pack_bytes(zlib.compress(data, 1)), "count": len(items), "bytes": len(data)}


def unpack_items(packed: dict[str, Any]) -> list[Any]:
    """Return the items in ``packed``."""
    items, places = _loads(zlib.decompress(unpack_bytes(packed["items"])))
    return [item if place is None else _restored(item, place) for item, place in zip(items, places, strict=True)]


def _loads(data: bytes) -> Any:
    """Return the object in a pickle, restricted by the rules for pickled fields."""
    rules = config.settings()
    if rules.secure:
        raise UnsafeContent("WDS_SECURE=1 allows no pickles, and so no states that hold items themselves")
    return pickle.loads(data) if rules.allow_pickle else safe_loads(data)


def _restored(item: dict[str, Any], place: Reference) -> StoredSample:
    sample = StoredSample(item)
    sample.shard, sample.offset, sample.stop = place
    return sample
