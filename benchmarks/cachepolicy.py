"""The service cache's policy against others, simulated with the real one: no bytes, no clock.

Each line is the share of bytes served from the cache, epochs 2 to 4. ``best`` is what nobody can beat who fetches only
what is read, whatever is known: of each epoch's data, what is in the cache when it begins. ``known`` knows the order,
as the service does where loaders announce their epochs. ``ahead`` also fetches by it, as services of a cluster do, from
a store that is as fast as the readers; ``(store)`` is the share of bytes that then come from there.
"""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from wds_async.service.cache.policy import Policy
from wds_async.service.orders import EpochOrder, OrderRule

__all__ = ["Simulation", "ahead", "announced", "epochs", "known", "lru", "ours", "random_eviction"]

CHUNK = 1000


class Simulation:
    """A cache without bytes: `read` an object, by chunks of 1000, and count what was there."""

    def __init__(self, limit: int, quotas: dict[str, float] | None = None) -> None:
        self.policy = Policy(limit, CHUNK, quotas=quotas)
        self.chunks: dict[int, dict[int, bool]] = {}
        self.most = 0
        self.hit = self.miss = 0

    def read(self, entry: int, size: int, tenant: str = "") -> float:
        """The share of it that was there."""
        hit = 0
        self._evict(self.policy.begin(entry, None, f"o{entry}", tenant, size).evicted)
        for number in range(-(-size // CHUNK)):
            count = min(CHUNK, size - number * CHUNK)
            if number in self.chunks.get(entry, {}):
                hit += count
            else:
                self._fetch(entry, number, count)
            self.policy.served(entry, count)
            self.policy.probation.spend((entry, number))
        self.policy.end(entry)
        self.hit, self.miss = self.hit + hit, self.miss + size - hit
        self.most = max(self.most, self.policy.resident_bytes + self.policy.probation.bytes)
        return hit / size

    def bring(self, entry: int, size: int) -> int | None:
        """Fetch what is missing of it before it is read, and return the bytes of that; None without room for it."""
        self._evict(self.policy.begin(entry, None, f"o{entry}", "", size).evicted)
        there = self.chunks.get(entry, {})
        missing = {n: min(CHUNK, size - n * CHUNK) for n in range(-(-size // CHUNK)) if n not in there}
        roomy = sum(missing.values()) <= self.policy.reserved(entry)
        for number, count in missing.items() if roomy else ():
            self._fetch(entry, number, count)
        self.policy.end(entry)
        return sum(missing.values()) if roomy else None

    def _fetch(self, entry: int, number: int, count: int) -> None:
        placed = self.policy.place(entry, number, count, wanted=True, grows=False, held=lambda chunk: False)
        if placed is None:
            return
        self._evict(placed.evicted)
        for other, gone in placed.gone:
            del self.chunks[other][gone]
        self.chunks.setdefault(entry, {})[number] = placed.stays

    def _evict(self, entries: Iterable[int]) -> None:
        for entry in entries:
            self.chunks.pop(entry, None)

    def epoch(self, order: Iterable[tuple[int, int]], tenant: str = "") -> float:
        """The share of the bytes of these reads that was there."""
        hit = total = 0.0
        for entry, size in order:
            hit += self.read(entry, size, tenant) * size
            total += size
        return hit / total


def epochs(objects: dict[int, int], count: int, seed: int, *, shuffled: bool = True) -> Iterator[list[tuple[int, int]]]:
    """So many epochs, each object once in each."""
    rng = random.Random(seed)
    order = list(objects.items())
    for _ in range(count):
        if shuffled:
            rng.shuffle(order)
        yield list(order)


def lru(limit: int, objects: dict[int, int], count: int, seed: int, *, shuffled: bool = True) -> list[float]:
    """The hit ratios of epochs under LRU."""
    there: OrderedDict[int, int] = OrderedDict()
    ratios = []
    for order in epochs(objects, count, seed, shuffled=shuffled):
        hit = 0
        for entry, size in order:
            hit += there.pop(entry, 0)
            there[entry] = size
            while sum(there.values()) > limit:
                there.popitem(last=False)
        ratios.append(hit / sum(objects.values()))
    return ratios


def random_eviction(
    limit: int, objects: dict[int, int], count: int, seed: int, *, shuffled: bool = True
) -> list[float]:
    """The hit ratios of epochs where a random entry goes for each newcomer."""
    rng = random.Random(seed + 1)
    there: dict[int, int] = {}
    ratios = []
    for order in epochs(objects, count, seed, shuffled=shuffled):
        hit = 0
        for entry, size in order:
            hit += there.get(entry, 0)
            there[entry] = size
            while sum(there.values()) > limit:
                del there[rng.choice(list(there))]
        ratios.append(hit / sum(objects.values()))
    return ratios


def ours(limit: int, objects: dict[int, int], count: int, seed: int, *, shuffled: bool = True) -> list[float]:
    """The hit ratios of epochs under the service's policy."""
    simulation = Simulation(limit)
    return [simulation.epoch(order) for order in epochs(objects, count, seed, shuffled=shuffled)]


def announced(simulation: Simulation, objects: dict[int, int], seed: int, *, shuffled: bool = True) -> EpochOrder:
    """The order of the objects' epochs, known to the policy. A read takes a minute."""
    now = itertools.count(step=60)
    names = [f"o{entry}" for entry in objects]
    rule = OrderRule("epoch" if shuffled else "listed", seed)
    order = EpochOrder(names, names, rule, 0, lambda: float(next(now)))
    simulation.policy.future = lambda key, running: order.need(key, running=running)
    return order


def known(limit: int, objects: dict[int, int], count: int, seed: int, *, shuffled: bool = True) -> list[float]:
    """The hit ratios of epochs under the service's policy where it knows the list and the seed."""
    simulation = Simulation(limit)
    order = announced(simulation, objects, seed, shuffled=shuffled)
    ratios, sizes = [], list(objects.items())
    for epoch in range(count):
        order.begin(epoch, order.prepared(epoch))
        hit = 0.0
        for item in order.order:
            entry, size = sizes[item]
            order.heard(f"o{entry}")
            hit += simulation.read(entry, size) * size
        ratios.append(hit / sum(objects.values()))
    return ratios


def ahead(
    limit: int, objects: dict[int, int], count: int, seed: int, *, shuffled: bool = True
) -> tuple[list[float], list[float]]:
    """The hit ratios of epochs where what is needed next is fetched before it is read, by a store that is as fast as
    the readers: an object for each that is read, while an eighth of the cache is ahead at most. And the share of the
    data that comes from the store."""
    simulation = Simulation(limit)
    order = announced(simulation, objects, seed, shuffled=shuffled)
    ratios, fetched, sizes, total = [], [], list(objects.items()), sum(objects.values())
    for epoch in range(count):
        order.begin(epoch, order.prepared(epoch))
        hit, came = 0.0, 0
        for item in order.order:
            for following in order.ahead():
                if sum(order.fetched.values()) >= limit // 8:
                    break
                missing = simulation.bring(*sizes[following])
                if missing is None:
                    break
                order.fetched[following], came = sizes[following][1], came + missing
                if missing:
                    break
            entry, size = sizes[item]
            order.heard(f"o{entry}")
            there = simulation.read(entry, size) * size
            hit, came = hit + there, came + round(size - there)
        ratios.append(hit / total)
        fetched.append(came / total)
    return ratios, fetched


def main() -> None:
    """Print the table."""
    policies: list[tuple[str, Callable[..., list[float]]]] = [
        ("ours", ours),
        ("known", known),
        ("ahead", lambda *given, **named: ahead(*given, **named)[0]),
        ("(store)", lambda *given, **named: ahead(*given, **named)[1]),
        ("lru", lru),
        ("random", random_eviction),
    ]
    print(f"{'objects':>8} {'cache':>6} {'order':>10} {'best':>6}", *(f"{name:>7}" for name, _ in policies))
    for number, share, shuffled in [
        (200, 0.5, True), (200, 0.5, False), (200, 0.25, True), (200, 0.1, True), (1000, 0.5, True), (40, 0.5, True),
    ]:  # fmt: skip
        objects = dict.fromkeys(range(number), 16_000)
        limit = int(sum(objects.values()) * share)
        ratios = [sum(run(limit, objects, 4, 1, shuffled=shuffled)[1:]) / 3 for _, run in policies]
        order = "shuffled" if shuffled else "in order"
        print(f"{number:8} {share:6.0%} {order:>10} {share:6.3f}", *(f"{ratio:7.3f}" for ratio in ratios))
    simulation = Simulation(1_600_000)
    first = dict.fromkeys(range(200), 16000)
    second = dict.fromkeys(range(1000, 1200), 16000)
    for order in epochs(first, 4, 1):
        simulation.epoch(order)
    ratios = [simulation.epoch(order) for order in epochs(second, 6, 2)]
    print("another data set after 4 epochs, its epochs 1 to 6:", *(f"{ratio:.3f}" for ratio in ratios))
