"""Taking turns."""

from __future__ import annotations

from wds_async.service.cache.origin import Client
from wds_async.service.limits import FairQueue


def test_one_of_each_in_turn() -> None:
    rotation: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        rotation.push(Client("", item[0]), item)
    assert [rotation.pop() for _ in range(len(rotation))] == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert rotation.pop() is None


def test_who_was_just_served_goes_to_the_end() -> None:
    rotation: FairQueue[str] = FairQueue()
    for item in ("a1", "a2"):
        rotation.push(Client("", "a"), item)
    assert rotation.pop() == "a1"
    rotation.push(Client("", "b"), "b1")
    rotation.push(Client("", "a"), "a3")
    assert [rotation.pop() for _ in range(3)] == ["a2", "b1", "a3"]


def test_who_may_not_go_yet_keeps_its_place() -> None:
    rotation: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "b1", "c1", "b2"):
        rotation.push(Client("", item[0]), item)
    assert rotation.pop(lambda item: item[0] != "a") == "b1"
    assert rotation.pop(lambda item: item == "a2") is None, "only the first of each is asked"
    assert [rotation.pop() for _ in range(len(rotation))] == ["a1", "c1", "b2", "a2"]
    assert rotation.pop(lambda item: True) is None


def test_taking_one_out() -> None:
    rotation: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "b1"):
        rotation.push(Client("", item[0]), item)
    assert rotation.remove(Client("", "a"), "a1")
    assert not rotation.remove(Client("", "a"), "a1")
    assert not rotation.remove(Client("", "c"), "a2")
    assert rotation.remove(Client("", "b"), "b1")
    assert len(rotation) == 1
    assert rotation.pop() == "a2"
    assert not rotation
