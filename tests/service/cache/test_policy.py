"""The cache policy: in simulations of jobs, and against a model of its accounts."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cachepolicy import CHUNK, Simulation, epochs, lru, random_eviction
from wds_async.service.cache.index import Totals
from wds_async.service.cache.policy import Intervals, Policy, Probation, Resident

SIZE = 16 * CHUNK


def same(count: int, first: int = 0) -> dict[int, int]:
    return dict.fromkeys(range(first, first + count), SIZE)


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("count", [40, 100, 300])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_epochs_hit_in_proportion(count: int, seed: int, shuffled: bool) -> None:
    simulation = Simulation(count * SIZE // 2)
    ratios = [simulation.epoch(order) for order in epochs(same(count), 4, seed, shuffled=shuffled)]
    assert sum(ratios[1:]) / 3 >= 0.47
    assert simulation.most <= count * SIZE // 2
    others = [policy(count * SIZE // 2, same(count), 4, seed, shuffled=shuffled) for policy in (lru, random_eviction)]
    assert all(sum(ratios[1:]) > sum(other[1:]) * 1.2 for other in others)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.75])
def test_other_sizes(share: float) -> None:
    simulation = Simulation(int(200 * SIZE * share))
    ratios = [simulation.epoch(order) for order in epochs(same(200), 5, 7)]
    assert sum(ratios[2:]) / 3 >= share * 0.92


def test_shards_of_all_sizes() -> None:
    rng = random.Random(3)
    objects = {number: rng.randrange(CHUNK // 4, 40 * CHUNK) for number in range(200)}
    simulation = Simulation(sum(objects.values()) // 2)
    ratios = [simulation.epoch(order) for order in epochs(objects, 4, 3)]
    assert sum(ratios[1:]) / 3 >= 0.46


def test_many_tiny_objects() -> None:
    simulation = Simulation(5000 * 50 // 2)
    ratios = [simulation.epoch(order) for order in epochs(dict.fromkeys(range(5000), 50), 4, 3)]
    assert sum(ratios[1:]) / 3 >= 0.46


def test_another_data_set_takes_over() -> None:
    simulation = Simulation(100 * SIZE)
    for order in epochs(same(200), 4, 1):
        simulation.epoch(order)
    ratios = [simulation.epoch(order) for order in epochs(same(200, 1000), 5, 2)]
    assert ratios[0] == 0
    assert min(ratios[3:]) >= 0.47
    assert simulation.policy.evicted_bytes == simulation.policy.evictions * SIZE > 0


def test_a_small_data_set_takes_over_from_a_large_one() -> None:
    simulation = Simulation(100 * SIZE)
    for order in epochs(same(1000), 3, 1):
        simulation.epoch(order)
    ratios = [simulation.epoch(order) for order in epochs(same(50, 5000), 30, 2)]
    assert min(ratios[-5:]) == 1.0


def test_two_jobs_at_different_paces() -> None:
    """One goes through 60 shards five times while the other goes once through 300; the cache holds 120."""
    simulation = Simulation(120 * SIZE)
    fast = itertools.chain.from_iterable(epochs(same(60), 40, 1))
    slow = itertools.chain.from_iterable(epochs(same(300, 1000), 8, 2))
    hits: dict[str, list[float]] = {"fast": [], "slow": []}
    for _ in range(300 * 8):
        hits["fast"].append(simulation.read(*next(fast)))
        hits["slow"].append(simulation.read(*next(slow)))
    late = {name: sum(found[1200:]) / len(found[1200:]) for name, found in hits.items()}
    assert late["fast"] >= 0.9
    assert late["slow"] >= 0.8 * (120 * 0.96 - 60) / 300


def test_one_hot_object_does_not_teach_haste() -> None:
    """An index that everybody reads again and again says nothing about shards."""
    simulation = Simulation(100 * SIZE)
    ratios = []
    for order in epochs(same(200), 4, 1):
        before = simulation.hit
        for number, (entry, size) in enumerate(order):
            simulation.read(entry, size)
            if number % 10 == 0:
                before += simulation.read(9999, 100) * 100
        ratios.append((simulation.hit - before) / (200 * SIZE))
    assert sum(ratios[1:]) / 3 >= 0.46


def test_readers_who_share_do_not_hurry_time() -> None:
    simulation = Simulation(100 * SIZE)
    ratios = []
    for order in epochs(same(400), 4, 1):
        first = 0.0
        for entry, size in order:
            first += simulation.read(entry, size)
            for _ in range(15):
                simulation.read(entry, size)
        ratios.append(first / len(order))
    assert sum(ratios[1:]) / 3 >= 0.21


def test_an_object_larger_than_the_cache_displaces_nothing() -> None:
    simulation = Simulation(100 * SIZE)
    for _ in range(3):
        simulation.epoch(same(80).items())
        assert simulation.read(5000, 300 * SIZE) <= 16 / 300  # what was free keeps a part of it
    assert simulation.epoch(same(80).items()) == 1.0
    assert simulation.most <= 100 * SIZE


def test_a_quota_is_kept_and_only_its_own_go_for_it() -> None:
    simulation = Simulation(100 * SIZE, {"small": 0.2})
    simulation.epoch(same(60).items(), "other")
    for order in epochs(same(80, 1000), 20, 4):
        simulation.epoch(order, "small")
    small = sum(1 for entry, chunks in simulation.chunks.items() if entry >= 1000 and chunks and all(chunks.values()))
    assert 15 <= small <= 20
    assert sum(1 for entry in simulation.chunks if entry < 1000) == 60


def test_what_was_there_before_a_restart() -> None:
    policy = Policy(1000 * CHUNK, CHUNK, totals=Totals(900, {"": 900 * CHUNK}))
    assert policy.needs_older_entries
    policy.add_older((number, Resident(f"o{number}", "", number, CHUNK, CHUNK, CHUNK)) for number in range(500))
    assert (policy.entries, policy.unseen, policy.needs_older_entries) == (900, 400, False)
    assert policy.begin(600, Resident("o600", "", 600, CHUNK, CHUNK, CHUNK), "o600", "", CHUNK).stays
    assert policy.entries == 900
    policy.now = 100_000 * CHUNK
    admitted = policy.begin(5000, None, "new", "", 80 * CHUNK)
    assert admitted.stays
    assert admitted.evicted == tuple(range(20))  # the longest unused, as many as it takes
    assert policy.resident_bytes == 960 * CHUNK
    state = Policy(10, 1, totals=Totals(state=policy.state()))
    assert state.now == policy.now


def test_a_smaller_cache() -> None:
    policy = Policy(100 * CHUNK, CHUNK, totals=Totals(200, {"": 200 * CHUNK}))
    policy.add_older((number, Resident(f"o{number}", "", number, CHUNK, CHUNK, CHUNK)) for number in range(200))
    assert policy.excess() == tuple(range(104))
    assert policy.resident_bytes == policy.room_bytes
    assert policy.excess() == ()


def test_what_is_pinned_outlives_what_is_not() -> None:
    simulation = Simulation(100 * SIZE)
    policy = simulation.policy
    simulation.epoch(same(90).items())
    policy.pin(["o3", "o7", "o500"])
    for order in epochs(same(200, 1000), 8, 1):  # another data set takes over, and makes all of the first stale
        simulation.epoch(order)
    assert {entry for entry in simulation.chunks if entry < 1000} == {3, 7}
    assert simulation.read(500, SIZE) == 0
    assert simulation.read(500, SIZE) == 1  # it was kept at once, though nothing was stale
    policy.pin([])
    for order in epochs(same(200, 2000), 8, 1):
        simulation.epoch(order)
    assert {entry for entry in simulation.chunks if entry < 1000} == set()


def test_what_is_pinned_never_goes_for_want_of_room() -> None:
    policy = Policy(100 * CHUNK, CHUNK, totals=Totals(90, {"": 90 * CHUNK}, pins=("a/",)))
    policy.add_older(
        (number, Resident(f"{'a' if number < 30 else 'b'}/{number}", "", number, CHUNK, CHUNK, CHUNK))
        for number in range(90)
    )
    assert policy.entries == 90
    policy.make_room(-1000 * CHUNK)
    gone = []
    while more := policy.excess():
        gone += more
    assert sorted(gone) == list(range(30, 90))
    assert policy.resident_bytes == 30 * CHUNK
    assert not policy.begin(100, None, "b/100", "", CHUNK).stays
    assert policy.entries == 30


def test_a_share_that_was_made_smaller() -> None:
    simulation = Simulation(100 * SIZE, {"small": 0.5})
    simulation.epoch(same(40).items(), "other")
    simulation.epoch(same(40, 1000).items(), "small")
    assert simulation.policy.excess() == ()
    simulation.policy.quotas = {"small": 0.1}
    gone = simulation.policy.excess()
    assert all(entry >= 1000 for entry in gone)
    assert simulation.policy.by_tenant["small"] <= 0.1 * 100 * SIZE
    assert simulation.policy.by_tenant["small"] >= 8 * SIZE


STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "place", "grow", "served", "end", "lose", "forget", "spend", "pin"]),
              st.integers(0, 5), st.integers(0, 9)),
    max_size=120,
)  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(STEPS)
def test_accounts(steps: list[tuple[str, int, int]]) -> None:
    """Whatever happens: what is there is within the limit, and nothing that is read goes."""
    policy = Policy(20 * CHUNK, CHUNK, quotas={"t": 0.5})
    there: dict[tuple[int, int], bool] = {}
    open_: dict[int, int] = {}
    for what, entry, number in steps:
        gone: tuple[int, ...] = ()
        if what == "begin":
            admission = policy.begin(entry, None, str(entry), "t" if entry == 1 else "", number * CHUNK)
            gone = admission.evicted
            open_[entry] = open_.get(entry, 0) + 1
            if admission.stays:
                there.update({chunk: True for chunk in there if chunk[0] == entry})
        elif what in ("place", "grow") and (entry, number) not in there and open_.get(entry):
            placed = policy.place(entry, number, CHUNK, wanted=True, grows=what == "grow", held=lambda chunk: False)
            if placed is not None:
                gone = placed.evicted
                for chunk in placed.gone:
                    assert there.pop(chunk) is False
                there[entry, number] = placed.stays
        elif what == "served":
            policy.served(entry, number)
        elif what == "end" and open_.get(entry):
            open_[entry] -= 1
            policy.end(entry)
        elif what == "lose" and there.pop((entry, number), None) is not None:
            policy.lose(entry, number, CHUNK)
        elif what == "forget":
            policy.forget(entry)
            open_.pop(entry, None)
            there = {chunk: stays for chunk, stays in there.items() if chunk[0] != entry}
        elif what == "spend":
            policy.probation.spend((entry, number))
        elif what == "pin":
            policy.pin(str(other) for other in range(number % 3))
        assert not any(open_.get(other) or policy.is_pinned(str(other)) for other in gone)
        there = {chunk: stays for chunk, stays in there.items() if chunk[0] not in gone}
        held = sum(CHUNK for stays in there.values() if stays)
        assert held <= policy.resident_bytes <= policy.room_bytes
        assert (
            policy.probation.bytes
            == sum(CHUNK for stays in there.values() if not stays)
            <= policy.probation.limit_bytes
        )
        if not any(open_.values()):
            assert policy.resident_bytes == held


def test_little_is_nothing() -> None:
    intervals = Intervals(1e9)
    for _ in range(15):
        intervals.observe(100, 10, 0)
    assert intervals.patience(0) is None
    intervals.observe(100, 10, 0)
    assert intervals.patience(0) is not None
    assert intervals.patience(1000) is None


def test_the_longest_usual_interval_counts() -> None:
    rng, intervals = random.Random(1), Intervals(1e12)
    for now in range(1000):
        intervals.observe(int(rng.triangular(0, 2e6)), 10, now)
    patience = intervals.patience(0)
    assert patience is not None
    assert 2e6 < patience < 3e6
    intervals.observe(1 << 50, 10, 1000)  # one that is not usual
    assert intervals.patience(0) == patience


def test_it_forgets_and_remembers() -> None:
    intervals = Intervals(1000)
    for now in range(20):
        intervals.observe(1_000_000, 100, now)
    again = Intervals(1000, json.loads(json.dumps(intervals.state())))
    assert again.patience(0) == intervals.patience(0)
    for now in range(10_000, 10_020):
        again.observe(50, 100, now)
    patience = again.patience(0)
    assert patience is not None
    assert patience < 100


def nothing(chunk: tuple[int, int]) -> bool:
    return False


def test_what_was_read_goes_first() -> None:
    probation = Probation(30)
    for number in range(3):
        assert probation.put((1, number), 10, True, nothing) == []
    probation.spend((1, 1))
    assert probation.put((2, 0), 10, True, nothing) == [(1, 1)]
    assert probation.put((2, 1), 10, False, nothing) is None  # unread chunks go for demand only
    assert probation.put((2, 1), 10, True, nothing) == [(1, 0)]
    assert probation.bytes == 30


def test_what_is_held_does_not_go() -> None:
    probation = Probation(20)
    probation.put((1, 0), 10, True, nothing)
    probation.put((1, 1), 10, True, nothing)
    assert probation.put((2, 0), 10, True, lambda chunk: True) is None
    assert probation.put((2, 0), 10, True, lambda chunk: chunk == (1, 0)) == [(1, 1)]
    assert probation.put((2, 1), 21, True, nothing) is None


def test_dropping() -> None:
    probation = Probation(100)
    for number in range(4):
        probation.put((1, number), 10, True, nothing)
    probation.spend((1, 2))
    probation.spend((9, 9))
    assert probation.spent_bytes == 10
    assert probation.drop((1, 0)) == 10
    assert probation.drop((1, 0)) == 0
    assert probation.drop_all(1) == 30
    assert (probation.bytes, probation.spent_bytes) == (0, 0)
