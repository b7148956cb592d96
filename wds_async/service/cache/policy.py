"""The cache policy: which chunks stay, by learned intervals of reuse, and a probation segment for the others."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from wds_async.service.cache.index import Totals

__all__ = ["ChunkId", "Future", "Intervals", "Placement", "Policy", "Probation", "Resident"]

_STEPS = 4  # to each doubling
_TAIL = 0.02  # of the weight may lie above what is called usual
_MARGIN = 1.25
_FEWEST = 16


class Intervals:
    """The intervals between two uses of one object, in bytes served meanwhile, weighted by the object's bytes; older
    observations fade by half with each ``half_life_bytes``."""

    def __init__(self, half_life_bytes: float, state: Mapping[str, Any] | None = None) -> None:
        state = state or {}
        self._half_life = max(1.0, half_life_bytes)
        self._weights = {int(step): float(weight) for step, weight in state.get("weights", {}).items()}
        self._count, self._at = int(state.get("count", 0)), int(state.get("at", 0))

    def observe(self, interval: int, weight: int, now: int) -> None:
        """Add an observation: an object of ``weight`` bytes was used again after ``interval``."""
        fading = 0.5 ** (max(0, now - self._at) / self._half_life)
        self._at = max(now, self._at)
        self._weights = {step: faded for step, w in self._weights.items() if (faded := w * fading) >= 1}
        step = math.floor(_STEPS * math.log2(max(1, interval)))
        self._weights[step] = self._weights.get(step, 0.0) + max(1, weight)
        self._count += 1

    def patience(self, least_weight: float) -> int | None:
        """Return the interval after which an object is surely not expected any more; None with fewer than 16 uses, or
        objects of fewer bytes than ``least_weight`` together."""
        total = sum(self._weights.values())
        if self._count < _FEWEST or total < least_weight:
            return None
        above = 0.0
        for step in sorted(self._weights, reverse=True):
            above += self._weights[step]
            if above > _TAIL * total:
                return int(_MARGIN * 2 ** ((step + 1) / _STEPS))
        raise AssertionError("weights add up to their sum")

    def state(self) -> dict[str, Any]:
        """Return the state for JSON, as `__init__` takes it."""
        return {"weights": {str(k): v for k, v in self._weights.items()}, "count": self._count, "at": self._at}


ChunkId = tuple[int, int]  # an entry's number, and which of its chunks
Which = Callable[[int], bool]
Future = Callable[[str, bool], float | None]
"""``future(key, running)``: when the object with this key is needed next, by any clock; None if that is unknown.
``running``: whether that it is being read counts as a need, or what comes after that is asked for."""


def _every(number: int) -> bool:
    return True


_MOST_EXAMINED = 512


class Probation:
    """Chunks on probation, at most ``limit_bytes`` of them. Chunks that a reader has passed go first, oldest first; an
    unread chunk goes only for one that a reader waits for.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self.spent_bytes = 0
        self._unread: OrderedDict[ChunkId, int] = OrderedDict()
        self._spent: OrderedDict[ChunkId, int] = OrderedDict()
        self._of: dict[int, set[int]] = {}

    def put(self, chunk: ChunkId, count: int, wanted: bool, held: Callable[[ChunkId], bool]) -> list[ChunkId] | None:
        """Add a chunk and return those that it evicts; None without room. ``wanted``: a reader waits for it; ``held``
        returns whether a chunk must not go."""
        gone: list[ChunkId] = []
        free = self.limit_bytes - self.bytes
        if count > self.limit_bytes:
            return None
        for pile in (self._spent, self._unread) if wanted else (self._spent,):
            for number, (other, size) in enumerate(pile.items()):
                if free >= count or number >= _MOST_EXAMINED:
                    break
                if not held(other):
                    gone.append(other)
                    free += size
        if free < count:
            return None
        for other in gone:
            self.drop(other)
        self._unread[chunk] = count
        self._of.setdefault(chunk[0], set()).add(chunk[1])
        self.bytes += count
        return gone

    def spend(self, chunk: ChunkId) -> None:
        count = self._unread.pop(chunk, None)
        if count is not None:
            self._spent[chunk] = count
            self.spent_bytes += count

    def drop(self, chunk: ChunkId) -> int:
        count = self._unread.pop(chunk, None)
        if count is None:
            count = self._spent.pop(chunk, 0)
            self.spent_bytes -= count
        numbers = self._of.get(chunk[0], set())
        numbers.discard(chunk[1])
        if not numbers:
            self._of.pop(chunk[0], None)
        self.bytes -= count
        return count

    def of(self, entry: int, which: Which = _every) -> int:
        """Return the bytes of an entry's chunks, of those with a number that ``which`` takes."""
        numbers = self._of.get(entry, ())
        return sum(self._unread.get((entry, n), 0) or self._spent.get((entry, n), 0) for n in numbers if which(n))

    def drop_all(self, entry: int, which: Which = _every) -> int:
        """Remove an entry's chunks, those with a number that ``which`` takes, and return their bytes."""
        return sum(self.drop((entry, number)) for number in list(self._of.get(entry, ())) if which(number))


PROBATION_SHARE = 0.04
_LEAST_PROBATION_CHUNKS = 2
_UNLEARNED = 4  # times the cache's size
_MOST_LOOKED_AT = 4096
_MOST_RANKED = 512
_MOST_REMEMBERED = 1 << 17


@dataclass(slots=True)
class Resident:
    """An entry of the policy. ``last``: when it was last used. ``bytes`` are reserved for it, ``held`` of them are
    present; ``size`` is that of all of it, as far as known, and ``served`` of it went to readers in this use."""

    key: str
    tenant: str
    last: int
    bytes: int = 0
    held: int = 0
    size: int = 0
    served: int = 0
    readers: int = 0
    local: int = -1  # when a client of this node used it last; -1: never, or this is not counted
    copied: bool = False  # whether chunks that belong to other nodes stay too


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of an object or chunk. ``stays``: among the residents, with ``evicted`` entries removed for it; else on
    probation, with the chunks ``gone`` removed from there. ``copied``: chunks of other nodes stay too."""

    stays: bool
    evicted: tuple[int, ...] = ()
    gone: tuple[ChunkId, ...] = ()
    copied: bool = False


class Policy:
    """Entries are numbers; sizes are bytes of disk. ``totals`` are of an earlier process: its entries come later, the
    longest unused first (`add_older`), or when they are used. ``quotas``: the share of the cache that a tenant may
    hold."""

    def __init__(
        self,
        limit_bytes: int,
        chunk_bytes: int,
        quotas: Mapping[str, float] | None = None,
        totals: Totals | None = None,
    ) -> None:
        totals = totals or Totals()
        least = min(limit_bytes // 4, _LEAST_PROBATION_CHUNKS * chunk_bytes)
        self.probation = Probation(max(int(limit_bytes * PROBATION_SHARE), least))
        self.limit_bytes = limit_bytes
        self.room_bytes = self._most_room_bytes = limit_bytes - self.probation.limit_bytes
        self.resident_bytes = sum(totals.by_tenant.values())
        self.now = int(totals.state.get("now", 0))
        self.unseen = totals.entries  # entries of the index that the policy does not know
        self.quotas: Mapping[str, float] = quotas or {}
        self.future: Future | None = None
        """Next needs of objects, where loaders have announced them."""
        self.evictions = self.evicted_bytes = 0
        self._chunk_bytes = chunk_bytes
        self._tenants: dict[str, int] = dict(totals.by_tenant)
        self._pinned: OrderedDict[int, Resident] = OrderedDict()
        self._cold: OrderedDict[int, Resident] = OrderedDict()
        self._warm: OrderedDict[int, Resident] = OrderedDict()
        self._without_room: dict[int, Resident] = {}
        self._copied: OrderedDict[int, None] = OrderedDict()  # entries of which chunks of other nodes stay
        self._ghosts: OrderedDict[int, tuple[int, int, int]] = OrderedDict()
        self._intervals = Intervals(limit_bytes / 2, totals.state.get("intervals"))
        self.pin(totals.pins)

    # -- uses

    def begin(
        self,
        entry: int,
        resident: Resident | None,
        key: str,
        tenant: str,
        size: int,
        *,
        partly: bool = True,
        owned: Which = _every,
        copy_size: int = 0,
    ) -> Placement:
        """Register a reader of an entry, of which ``size`` bytes are expected. ``resident``: the entry as the index has
        it. ``partly``: whether a part of it is worth keeping without room for all.

        ``owned``: which chunks are this node's to keep; ``size`` is of those. The others of an object that clients of
        this node read again are copied, where there is free room: ``copy_size`` are the bytes with them (0: the reader
        is another node, for which nothing is copied).
        """
        known = self._find(entry)
        if known is None and resident is not None:
            self._pile(resident)[entry] = known = resident
            self.unseen = max(0, self.unseen - 1)
        elif known is None:
            last, served, local = self._ghosts.pop(hash(key), (self.now, 0, -1))
            self._without_room[entry] = known = Resident(key, tenant, last, served=served, local=local)
        if copy_size and self._copies(entry, known, copy_size):
            size, owned = max(size, copy_size), _every
        known.size = max(size, known.size)
        self._used(entry, known)
        known.readers += 1
        missing = max(size, known.held + self.probation.of(entry, owned)) - known.bytes
        evicted = self._room_for(missing, known, but=entry) if missing > 0 else ()
        if evicted is None:
            if partly:
                self._reserve(entry, known, self._free_chunks(missing, known.tenant))
            return Placement(stays=False, copied=known.copied)
        if missing > 0:
            self._reserve(entry, known, missing)
        known.held += self.probation.drop_all(entry, owned)
        return Placement(True, evicted, copied=known.copied)

    def _copies(self, entry: int, known: Resident, size: int) -> bool:
        """Return whether all chunks of an entry are to stay: it does already, or a client of this node reads it again
        and there is free room for all ``size`` bytes of it."""
        again = known.local >= 0 and self.now - known.local > self.probation.limit_bytes
        known.local = self.now
        if not known.copied and again:
            room = min(self.room_bytes - self.resident_bytes, self._most_of(known.tenant) - self._held_by(known.tenant))
            known.copied = size - known.bytes <= room
        if known.copied:
            self._copied[entry] = None
            self._copied.move_to_end(entry)
        return known.copied

    def served(self, entry: int, count: int) -> None:
        """Count bytes that went to a reader. The policy's clock advances by each byte of an object once in a use,
        however many readers share it."""
        resident = self._find(entry)
        if resident is None:
            self.now += count
            return
        self._used(entry, resident)
        if resident.size:
            count = max(0, min(count, resident.size - resident.served))
        resident.served += count
        self.now += count
        resident.last = self.now

    def end(self, entry: int) -> None:
        resident = self._find(entry)
        if resident is None:
            return
        resident.readers -= 1
        if resident.readers == 0:
            self._reserve(entry, resident, resident.held - resident.bytes)
            self._keep_ghost(resident)
            self._spill()

    # -- chunks

    def place(
        self,
        entry: int,
        number: int,
        count: int,
        *,
        wanted: bool,
        grows: bool,
        held: Callable[[ChunkId], bool],
        owned: bool = True,
    ) -> Placement | None:
        """Return the place for a new chunk; None without one. ``grows``: the object's size is unknown, so room is made
        chunk by chunk. ``wanted``, ``held``: see `Probation.put`. ``owned``: False for a chunk of another node."""
        resident = self._find(entry)
        if resident is not None and (owned or resident.copied):
            missing = count - (resident.bytes - resident.held)
            evicted: tuple[int, ...] | None = ()
            if missing > 0:
                evicted = self._room_for(missing, resident, but=entry) if grows else None
                if evicted is not None:
                    self._reserve(entry, resident, missing)
            if evicted is not None:
                resident.held += count
                return Placement(True, evicted)
        gone = self.probation.put((entry, number), count, wanted, held)
        return None if gone is None else Placement(False, gone=tuple(gone))

    def reserved(self, entry: int) -> int:
        """Return the bytes of room that are kept free for an entry's chunks."""
        resident = self._find(entry)
        return 0 if resident is None else resident.bytes - resident.held

    def roomy(self, entry: int) -> bool:
        """Return whether there is room for chunks that are fetched ahead."""
        resident = self._find(entry)
        free = self.probation.limit_bytes - self.probation.bytes + self.probation.spent_bytes
        return (resident is not None and resident.bytes > resident.held) or free > self.probation.limit_bytes // 4

    def lose(self, entry: int, number: int, count: int) -> None:
        resident = self._find(entry)
        if not self.probation.drop((entry, number)) and resident is not None:
            resident.held -= count
            if not resident.readers:
                self._reserve(entry, resident, -count)

    def forget(self, entry: int) -> None:
        resident = self._find(entry)
        self.probation.drop_all(entry)
        if resident is not None:
            self._reserve(entry, resident, -resident.bytes)
            self._keep_ghost(resident)
            for pile in (self._without_room, self._warm, self._cold, self._pinned):
                pile.pop(entry, None)
        self._copied.pop(entry, None)

    # -- pins

    def pin(self, names: Iterable[str]) -> None:
        """Never evict objects whose key is one of ``names`` or begins with one that ends with "/"; all others may
        be."""
        self._pins = frozenset(names)
        self._pinned_prefixes = tuple(name for name in self._pins if name.endswith("/"))
        for pile in (self._cold, self._warm):
            for entry in [entry for entry, resident in pile.items() if self.is_pinned(resident.key)]:
                self._pinned[entry] = pile.pop(entry)
        for entry in [entry for entry, resident in self._pinned.items() if not self.is_pinned(resident.key)]:
            self._warm[entry] = self._pinned.pop(entry)
            self._warm.move_to_end(entry, last=False)

    def is_pinned(self, key: str) -> bool:
        """Return whether the object with this key is never evicted."""
        return key in self._pins or key.startswith(self._pinned_prefixes)

    # -- entries of an earlier process, and limits

    @property
    def needs_older_entries(self) -> bool:
        """True if older entries (`add_older`) have to be loaded to know the least recently used one."""
        return not self._cold and self.unseen > 0

    def add_older(self, rows: Iterable[tuple[int, Resident]]) -> None:
        """Add the least recently used entries of the index, in order; known ones are skipped."""
        for entry, resident in rows:
            if self._find(entry) is None:
                (self._pinned if self.is_pinned(resident.key) else self._cold)[entry] = resident
                self.unseen -= 1

    def no_older_entries(self) -> None:
        """Note that the index has no more entries."""
        self.unseen = 0

    def state(self) -> dict[str, Any]:
        """Return the learned state for JSON."""
        return {"now": self.now, "intervals": self._intervals.state()}

    def last_use(self, entry: int) -> int:
        """Return the time of its last use; now if that is unknown."""
        resident = self._find(entry)
        return self.now if resident is None else resident.last

    def excess(self, *, quotas: bool = True) -> tuple[int, ...]:
        """Evict and return entries above the limit or (with ``quotas``) above a tenant's quota, after either was
        lowered."""
        gone: list[int] = []
        over = self.resident_bytes - self.room_bytes
        too_much = {
            tenant: more
            for tenant in (self.quotas if quotas else ())
            if (more := self._tenants.get(tenant, 0) - self._most_of(tenant)) > 0
        }
        for pile in (self._cold, self._warm):
            for entry, resident in pile.items():
                if over <= 0 and not too_much:
                    break
                more = too_much.get(resident.tenant, 0)
                if (over > 0 or more > 0) and not resident.readers:
                    gone.append(entry)
                    over -= resident.bytes
                    if more > resident.bytes:
                        too_much[resident.tenant] = more - resident.bytes
                    else:
                        too_much.pop(resident.tenant, None)
        return self._evict(gone)

    def make_room(self, spare_bytes: int) -> None:
        """Limit residents so that, with the probation segment full, at most ``spare_bytes`` more than now are used.
        `excess` then evicts the surplus."""
        spare_bytes -= self.probation.limit_bytes - self.probation.bytes
        self.room_bytes = max(0, min(self._most_room_bytes, self.resident_bytes + spare_bytes))

    @property
    def by_tenant(self) -> dict[str, int]:
        return {tenant: held for tenant, held in self._tenants.items() if held > 0}

    @property
    def entries(self) -> int:
        return self.unseen + len(self._cold) + len(self._warm) + len(self._pinned)

    @property
    def patience_bytes(self) -> int:
        """Number of bytes read by all clients, after which an entry that was not used meanwhile is stale."""
        learned = self._intervals.patience(self.limit_bytes / 8)
        return _UNLEARNED * self.limit_bytes if learned is None else learned

    # -- inside

    def _find(self, entry: int) -> Resident | None:
        return (
            self._warm.get(entry) or self._without_room.get(entry) or self._cold.get(entry) or self._pinned.get(entry)
        )

    def _pile(self, resident: Resident) -> OrderedDict[int, Resident]:
        return self._pinned if self.is_pinned(resident.key) else self._warm

    def _most_of(self, tenant: str) -> int:
        return int(self.quotas.get(tenant, 1.0) * self._most_room_bytes)

    def _held_by(self, tenant: str) -> int:
        return self._tenants.get(tenant, 0)

    def _used(self, entry: int, resident: Resident) -> None:
        """Note a use. Uses in quick succession, as of several ranges or readers, count as one."""
        gap = self.now - resident.last
        if gap > self.probation.limit_bytes and not resident.readers:
            self._intervals.observe(gap, resident.size, self.now)
            resident.served = 0
        resident.last = self.now
        if entry in self._cold:
            self._warm[entry] = self._cold.pop(entry)
        elif entry in self._warm:
            self._warm.move_to_end(entry)

    def _room_for(self, missing: int, of: Resident, but: int) -> tuple[int, ...] | None:
        """Make room for ``missing`` bytes of an entry: evict stale entries (for a pinned one others too), and those
        that are needed later than this one, if that is known. Return them; None if that is not enough."""
        tenant = of.tenant
        over = self.resident_bytes + missing - self.room_bytes
        over_quota = 0
        if tenant in self.quotas:
            over_quota = self._tenants.get(tenant, 0) + missing - self._most_of(tenant)
        if missing > self.room_bytes or (tenant in self.quotas and missing > self._most_of(tenant)):
            return None
        gone: list[int] = []
        oldest_last: float = self.now - self.patience_bytes if over > 0 or over_quota > 0 else 0
        need, future = None, self.future
        if self.is_pinned(of.key):
            oldest_last, future = math.inf, None
        if future is not None and (need := future(of.key, False)) is None:
            future = None  # what is in no order takes its room as ever
        if over > 0 and not of.copied:
            over -= self._copies_to_evict(over, but, gone)
        for pile in (self._cold, self._warm):
            for looked, (entry, resident) in enumerate(pile.items()):
                if (over <= 0 and over_quota <= 0) or resident.last >= oldest_last or looked > _MOST_LOOKED_AT:
                    break
                if resident.readers or entry == but or (over <= 0 and resident.tenant != tenant) or entry in gone:
                    continue
                if future is not None and future(resident.key, True) is not None:
                    continue
                gone.append(entry)
                over -= resident.bytes
                over_quota -= resident.bytes if resident.tenant == tenant else 0
        if need is not None and max(over, over_quota) > 0:
            over, over_quota = self._later_than(need, tenant, but, over, over_quota, gone)
        return None if over > 0 or over_quota > 0 else self._evict(gone)

    def _later_than(
        self, need: float, tenant: str, but: int, over: int, over_quota: int, gone: list[int]
    ) -> tuple[int, int]:
        """Add entries that are needed after ``need`` to ``gone``, the last one first (Belady, 1966), until there is
        room, and return what is then missing. Of many entries those used last are compared: what was used in this
        epoch is needed in the next one only."""
        assert self.future is not None
        later: list[tuple[float, int, Resident]] = []
        for pile in (self._warm, self._cold):
            for entry, resident in itertools.islice(reversed(pile.items()), _MOST_RANKED):
                if resident.readers or entry == but or entry in gone:
                    continue
                if (after := self.future(resident.key, True)) is not None and after > need:
                    later.append((after, entry, resident))
        for _, entry, resident in sorted(later, key=lambda one: one[:2], reverse=True):
            if over <= 0 and over_quota <= 0:
                break
            if over > 0 or resident.tenant == tenant:
                gone.append(entry)
                over -= resident.bytes
                over_quota -= resident.bytes if resident.tenant == tenant else 0
        return over, over_quota

    def _copies_to_evict(self, over: int, but: int, gone: list[int]) -> int:
        """Add entries with copies of other nodes' chunks to ``gone``, the least recently used first, and return their
        bytes: what is this node's own goes before them, because no other node keeps that."""
        freed = 0
        for entry in self._copied:
            resident = self._find(entry)
            if freed >= over:
                break
            if resident is None or resident.readers or entry == but or self.is_pinned(resident.key):
                continue
            gone.append(entry)
            freed += resident.bytes
        return freed

    def _evict(self, entries: list[int]) -> tuple[int, ...]:
        for entry in entries:
            resident = self._find(entry)
            self.evictions += 1
            self.evicted_bytes += 0 if resident is None else resident.held
            self.forget(entry)
        return tuple(entries)

    def _free_chunks(self, missing: int, tenant: str) -> int:
        """Return how many of ``missing`` bytes there is room for, in whole chunks."""
        free = self.room_bytes - self.resident_bytes
        if tenant in self.quotas:
            free = min(free, self._most_of(tenant) - self._tenants.get(tenant, 0))
        return max(0, min(free, missing) // self._chunk_bytes * self._chunk_bytes)

    def _reserve(self, entry: int, resident: Resident, more: int) -> None:
        """Change the bytes reserved for an entry; with the first it becomes a resident, without any it ceases to be
        one."""
        resident.bytes += more
        self.resident_bytes += more
        self._tenants[resident.tenant] = self._tenants.get(resident.tenant, 0) + more
        if resident.bytes > 0 and entry in self._without_room:
            self._pile(resident)[entry] = self._without_room.pop(entry)
        elif resident.bytes <= 0:
            resident.copied = False
            self._copied.pop(entry, None)
            for pile in (self._warm, self._cold, self._pinned):
                pile.pop(entry, None)
            if resident.readers:
                self._without_room[entry] = resident
            else:
                self._without_room.pop(entry, None)

    def _spill(self) -> None:
        """Forget entries that the index has as well: memory does not grow with the cache."""
        while len(self._warm) > _MOST_REMEMBERED:
            entry, resident = next(iter(self._warm.items()))
            if resident.readers:
                break
            del self._warm[entry]
            self.unseen += 1

    def _keep_ghost(self, resident: Resident) -> None:
        self._ghosts[hash(resident.key)] = (resident.last, resident.served, resident.local)
        if len(self._ghosts) > _MOST_REMEMBERED:
            self._ghosts.popitem(last=False)
