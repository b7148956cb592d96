"""One client's plan: where it is, how fast it goes, and when its next shard is due."""

from __future__ import annotations

from wds_async.service.cache.origin import Client
from wds_async.service.prefetch import PrefetchPlan


def plan(count: int = 10, ahead: int = 3) -> PrefetchPlan:
    shards = [f"gs://b/{i}" for i in range(count)]
    return PrefetchPlan(Client("", "a"), "", shards, ahead, 1 << 30, position=0, heard_at=100.0, moved_at=100.0)


def test_its_pace_is_measured() -> None:
    one = plan()
    assert one.move(2, 120.0)
    assert one.pace_s > 1.0
    before = one.pace_s
    assert not one.move(2, 130.0)
    assert not one.move(1, 130.0)
    assert one.pace_s == before
    for index in range(3, 40):
        one.move(index, 120.0 + 10 * index)
    assert 9 < one.pace_s < 11


def test_who_is_faster_is_due_sooner() -> None:
    slow, fast = plan(), plan()
    slow.move(1, 110.0)
    fast.move(1, 100.5)
    slow.moved_at = fast.moved_at = 110.0
    slow.following = fast.following = 3
    assert fast.due() < slow.due()


def test_hunger_ends_with_what_is_ahead_and_with_the_list() -> None:
    one = plan(count=5, ahead=2)
    one.following = 2
    assert one.wants_more
    one.following = 3
    assert not one.wants_more
    one.move(4, 101.0)
    assert one.wants_more
    one.following = 5
    assert not one.wants_more
    one.following, one.full = 4, True
    assert not one.wants_more


def test_what_was_asked_for_lately() -> None:
    one = plan()
    assert one.ask("x")
    assert not one.ask("x")
    for i in range(64):
        one.ask(f"y{i}")
    assert one.ask("x")
