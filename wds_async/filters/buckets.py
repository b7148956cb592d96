"""Batches of samples that are alike in length, aspect ratio or another key."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wds_async import world
from wds_async.arguments import check_function, check_number, check_size, check_type
from wds_async.checkpoint.states import Held, StageState
from wds_async.errors import ConfigError
from wds_async.filters.batch import collate, default_collation_fn
from wds_async.filters.fields import not_found
from wds_async.handlers import Handler, passed, reraise_exception
from wds_async.stages import Traits, pipelinefilter
from wds_async.tracebacks import located

__all__ = ["bucketed"]


@dataclass(frozen=True)
class BucketOptions:
    """The arguments of `bucketed`, checked: TypeError and ConfigError for what cannot be meant."""

    key: Callable[[Any], Any] | str | int
    edges: Sequence[float] | None = None
    batch_size: int | Sequence[int] | None = None
    max_tokens: float | None = None
    collation_fn: Callable[[list[Any]], Any] | None = default_collation_fn
    partial: bool = True
    handler: Handler = reraise_exception
    same_shape: bool = False
    shares: Sequence[float] | None = None
    seed: int = 0
    max_held: int = 10_000

    def __post_init__(self) -> None:
        if not callable(self.key):
            check_type("bucketed", "key", self.key, (str, int), "a function, the name of a field or a number in tuples")
        check_function("bucketed", "collation_fn", self.collation_fn, optional=True)
        check_size("bucketed", "max_held", self.max_held, at_least=1)
        if self.edges is not None:
            _check_ascending(self.edges)
        if self.batch_size is None and self.max_tokens is None:
            raise ConfigError("bucketed: give batch_size (samples) or max_tokens (longest sample x samples), or both")
        if self.max_tokens is not None and not check_number("bucketed", "max_tokens", self.max_tokens) > 0:
            raise ConfigError(f"bucketed: max_tokens={self.max_tokens!r}: it must be above 0")
        self._check_sizes()
        if self.same_shape:
            self._check_order()
        elif self.shares is not None:
            raise ConfigError(
                "bucketed: shares are for same_shape=True; otherwise a bucket is given out once it is full"
            )

    def _check_sizes(self) -> None:
        if isinstance(self.batch_size, Sequence) and not isinstance(self.batch_size, str):
            if self.edges is None or len(self.batch_size) != len(self.edges) + 1:
                buckets = "as many as there are keys" if self.edges is None else len(self.edges) + 1
                raise ConfigError(
                    f"bucketed: {len(self.batch_size)} batch sizes for {buckets} buckets; n edges make n + 1 buckets"
                )
            for size in self.batch_size:
                check_size("bucketed", "batch_size", size, at_least=1)
        elif self.batch_size is not None:
            check_size("bucketed", "batch_size", self.batch_size, at_least=1)

    def _check_order(self) -> None:
        if self.edges is None or self.batch_size is None or self.max_tokens is not None:
            raise ConfigError(
                "bucketed: same_shape=True takes edges and batch_size (one number, or one for each bucket), and no "
                "max_tokens, by which the number of samples differs from batch to batch"
            )
        if self.shares is None:
            return
        shares = [check_number("bucketed", "shares", share) for share in self.shares]
        if len(shares) != len(self.edges) + 1 or not all(share > 0 for share in shares):
            raise ConfigError(
                f"bucketed: shares={self.shares!r}: give {len(self.edges) + 1} numbers above 0, one for each bucket"
            )

    def measured(self, sample: Any) -> Any:
        """Return the key of ``sample``. ValueError or TypeError for one that has no place in a bucket."""
        if callable(self.key):
            value = self.key(sample)
        elif isinstance(sample, dict) and self.key not in sample:
            raise ValueError(not_found(sample, [str(self.key)]))
        else:
            value = sample[self.key]
        if self.edges is None and self.max_tokens is None:
            hash(value)
            return value
        number = value if isinstance(value, int) else _as_number(value)
        if math.isnan(number):
            raise ValueError("bucketed: the key is NaN, which is in no bucket")
        if self.max_tokens is not None and not 0 < number <= self.max_tokens:
            raise ValueError(
                f"bucketed: a sample of {value!r} tokens does not fit max_tokens={self.max_tokens!r}"
                if number > 0
                else f"bucketed: max_tokens counts the keys of samples, and {value!r} is not above 0"
            )
        return number


def _check_ascending(edges: Any) -> None:
    if not isinstance(edges, Iterable):
        check_type("bucketed", "edges", edges, (), "a list of numbers")
    edges = [check_number("bucketed", "edges", edge) for edge in edges]
    if not all(low < high for low, high in itertools.pairwise(edges)) or any(map(math.isnan, edges)):
        raise ConfigError(f"bucketed: edges={edges!r} do not ascend; each must be above the one before it")


def _as_number(value: Any) -> float:
    try:
        return check_number("bucketed", "key", value)
    except TypeError:
        kind = type(value).__name__
        raise TypeError(
            f"bucketed: the key {value!r:.80} is of type {kind}, and edges and max_tokens need a number: give a "
            "function, as in key=lambda sample: len(sample['txt'])"
        ) from None


class BucketState(StageState):
    """State of `bucketed`: the samples that wait in their buckets, and the place in the drawn order.

    ``held``: the samples of each bucket. ``longest``: the largest key of each, where tokens are counted. ``full``:
    batches that are full and were not taken yet. ``taken``: the batches that were taken in the drawn order, and
    ``arrived`` the samples of each bucket that came, both for ``same_shape``. ``loaded``: samples that were held when
    the state was saved and are not in their buckets again yet.
    """

    options: BucketOptions

    def __init__(self) -> None:
        self.held: dict[Any, list[Any]] = {}
        self.longest: dict[Any, float] = {}
        self.full: list[list[Any]] = []
        self.taken = 0
        self.arrived: Counter[Any] = Counter()
        self.loaded: deque[Any] = deque()
        self._worker = 0

    def save(self) -> dict[str, Any]:
        batches = itertools.chain(self.full, self.held.values(), [self.loaded])
        saved: dict[str, Any] = {"samples": Held(itertools.chain.from_iterable(batches))}
        if self.arrived:  # the order is drawn; the samples that are held come again
            came = {bucket: count - len(self.held.get(bucket, ())) for bucket, count in self.arrived.items()}
            saved["drawn"] = {"taken": self.taken, "arrived": sorted(came.items())}
        return saved

    def load(self, saved: dict[str, Any]) -> None:
        self.loaded = deque(saved.get("samples", ()))
        if "drawn" in saved:
            self.taken = saved["drawn"]["taken"]
            self.arrived = Counter(dict(saved["drawn"]["arrived"]))

    @classmethod
    def shared(cls, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        # The order begins anew: that of all ranks stays the same.
        return {"drawn": {"taken": 0, "arrived": []}} if any("drawn" in state for state in states) else {}

    def begin(self, options: BucketOptions, worker: int) -> None:
        """Put samples into buckets by ``options``, in the order of the DataLoader worker ``worker``."""
        self.options = options
        self._worker = worker
        count = 1 if options.edges is None else len(options.edges) + 1
        sizes = options.batch_size if isinstance(options.batch_size, Sequence) else [options.batch_size] * count
        self._sizes = [None if size is None else check_size("bucketed", "batch_size", size) for size in sizes]
        shares = [1.0] * count if options.shares is None else [float(share) for share in options.shares]
        self._bounds = [bound / sum(shares) for bound in itertools.accumulate(shares)][:-1]

    def _size(self, bucket: Any) -> int | None:
        """Return the samples in a batch of ``bucket``; None where tokens alone bound it."""
        return self._sizes[0 if self.options.edges is None else bucket]

    def add(self, value: Any, sample: Any) -> None:
        """Put ``sample``, whose key is ``value``, into its bucket."""
        options = self.options
        bucket = value if options.edges is None else bisect_right(options.edges, value)
        if options.same_shape:
            self.held.setdefault(bucket, []).append(sample)
            self.arrived[bucket] += 1
            return
        if options.max_tokens is not None:
            longest = max(value, self.longest.get(bucket, value))
            waiting = self.held.get(bucket)
            if waiting and (len(waiting) + 1) * longest > options.max_tokens:
                self._close(bucket)
                longest = value
            self.longest[bucket] = longest
        batch = self.held.setdefault(bucket, [])
        batch.append(sample)
        if len(batch) == self._size(bucket) or (
            # Not even another one as short as can be would fit.
            options.max_tokens is not None and (len(batch) + 1) * self.longest[bucket] > options.max_tokens
        ):
            self._close(bucket)

    def _close(self, bucket: Any) -> None:
        self.full.append(self.held.pop(bucket))
        self.longest.pop(bucket, None)

    def take(self) -> list[Any] | None:
        """Return the samples of the next batch; None where more have to come first. ConfigError where ``same_shape``
        holds more than ``max_held`` samples and still lacks the next batch."""
        if not self.options.same_shape:
            return self.full.pop(0) if self.full else None
        due = self._due()
        size = self._size(due)
        if len(self.held.get(due, ())) >= (size or 0):
            self.taken += 1
            return self._cut(due)
        if (held := sum(map(len, self.held.values()))) > self.options.max_held:
            raise ConfigError(
                f"bucketed: {held} samples are held, above max_held={self.options.max_held}, and bucket {due}, whose "
                f"turn it is, has {len(self.held.get(due, ()))} of {size}. The order is drawn by shares; those of the "
                f"{self.arrived.total()} samples that came are shares={self._shares()}, to be given to all ranks alike"
            )
        return None

    def _due(self) -> int:
        """Return the bucket of the next batch: a hash of seed, worker and its number, so that there is no generator to
        save and every rank and machine has the same.
        """
        text = f"{self.options.seed} {self._worker} {self.taken}"
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") / (1 << 56)
        return bisect_right(self._bounds, number)

    def _shares(self) -> list[float]:
        """Return the share of each bucket in the batches that would come of the samples so far."""
        batches = [max(self.arrived[bucket], 1) / (self._size(bucket) or 1) for bucket in range(len(self._bounds) + 1)]
        return [round(number / sum(batches), 4) for number in batches]

    def _cut(self, bucket: Any) -> list[Any]:
        """Take up to a batch out of ``bucket``."""
        waiting = self.held.pop(bucket)
        size = self._size(bucket)
        if size is not None and len(waiting) > size:
            self.held[bucket] = waiting[size:]
            del waiting[size:]
        return waiting

    def rest(self) -> list[Any] | None:
        """Return the next batch of what is left when no more samples come; None where nothing is."""
        if not self.held:
            return None
        return self._cut(next(iter(self.held)) if self.options.edges is None else min(self.held))


def _bucketed(
    data: Iterable[Any],
    key: Callable[[Any], Any] | str | int,
    edges: Sequence[float] | None = None,
    batch_size: int | Sequence[int] | None = None,
    max_tokens: float | None = None,
    collation_fn: Callable[[list[Any]], Any] | None = default_collation_fn,
    partial: bool = True,
    handler: Handler = reraise_exception,
    same_shape: bool = False,
    shares: Sequence[float] | None = None,
    seed: int = 0,
    max_held: int = 10_000,
    *,
    state: BucketState | None = None,
) -> Iterator[Any]:
    """Batch samples of similar length, so that little padding is needed: ``bucketed("length", edges=[64, 256],
    batch_size=32)``.

    ``key``: a function of the sample, the name of a field, or the number of a value in a tuple. ``edges`` are
    ascending limits: ``[64, 256]`` makes one bucket for keys below 64, one from 64 to below 256, and one from 256
    on. Without edges, each key (of any type that a dict takes) has its own bucket; ``[]`` makes a single bucket.

    ``batch_size``, ``max_tokens``: a bucket becomes a batch as soon as it has ``batch_size`` samples (one number,
    or one for each bucket), or before its padded size, which is its longest key times the number of its samples,
    would exceed ``max_tokens`` (in the unit of the key: tokens, seconds, pixels). One of the two is needed.
    ``collation_fn`` makes the batch from the list of samples, as in `batched`; None gives the list. At the end,
    the rest comes as smaller batches; ``partial=False`` drops it. Each bucket holds less than a batch.

    ``same_shape``: all ranks (with the same number of DataLoader workers) take their batches from the same bucket
    at each step. The order of the buckets is drawn from ``seed`` and ``shares``, the relative frequencies of the
    buckets (equal by default), and samples are read until that bucket is full. If more than ``max_held`` samples
    have to be held for that, a ConfigError states the shares of the data. The common order ends with the samples:
    what is left is batched in any order, and ranks end at different steps unless `with_epoch` cuts their number.

    A key that raises, is not a number (with edges or tokens) or exceeds ``max_tokens`` goes to ``handler``.
    """
    options = BucketOptions(
        key, edges, batch_size, max_tokens, collation_fn, partial, handler, same_shape, shares, seed, max_held
    )
    state = state or BucketState()
    state.begin(options, world.place().worker)
    return _batches(state, data)


def _batches(buckets: BucketState, data: Iterable[Any]) -> Iterator[Any]:
    options = buckets.options
    made = functools.partial(collate, collation_fn=options.collation_fn, stage="bucketed")
    for sample in _arriving(buckets, data):
        try:
            value = options.measured(sample)
        except Exception as exn:
            if passed(options.handler, located(exn, "bucketed", sample), sample):
                continue
            break
        buckets.add(value, sample)
        while (batch := buckets.take()) is not None:
            yield made(batch)
    while options.partial and (batch := buckets.rest()) is not None:
        yield made(batch)


def _arriving(buckets: BucketState, data: Iterable[Any]) -> Iterator[Any]:
    """Yield the samples that were held when a state was saved, then those that come."""
    while buckets.loaded:
        yield buckets.loaded.popleft()
    yield from data


def _unknown(n: int, *args: Any, **kw: Any) -> None:
    """Return None: the number of samples in the batches depends on their keys, which are not known yet."""


bucketed = pipelinefilter(
    _bucketed, traits=Traits(handler="handler", batches=_unknown, state=BucketState), rule=BucketOptions
)
