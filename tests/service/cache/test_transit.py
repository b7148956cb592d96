"""The share for what does not stay."""

from __future__ import annotations

from wds_async.service.cache.policy import Transit


def nothing(chunk: tuple[int, int]) -> bool:
    return False


def test_what_was_read_goes_first() -> None:
    transit = Transit(30)
    for number in range(3):
        assert transit.put((1, number), 10, True, nothing) == []
    transit.spend((1, 1))
    assert transit.put((2, 0), 10, True, nothing) == [(1, 1)]
    assert transit.put((2, 1), 10, False, nothing) is None  # what nobody has read goes for demand only
    assert transit.put((2, 1), 10, True, nothing) == [(1, 0)]
    assert transit.bytes == 30


def test_what_is_held_does_not_go() -> None:
    transit = Transit(20)
    transit.put((1, 0), 10, True, nothing)
    transit.put((1, 1), 10, True, nothing)
    assert transit.put((2, 0), 10, True, lambda chunk: True) is None
    assert transit.put((2, 0), 10, True, lambda chunk: chunk == (1, 0)) == [(1, 1)]
    assert transit.put((2, 1), 21, True, nothing) is None


def test_dropping() -> None:
    transit = Transit(100)
    for number in range(4):
        transit.put((1, number), 10, True, nothing)
    transit.spend((1, 2))
    transit.spend((9, 9))
    assert transit.spent_bytes == 10
    assert transit.drop((1, 0)) == 10
    assert transit.drop((1, 0)) == 0
    assert transit.drop_all(1) == 30
    assert (transit.bytes, transit.spent_bytes) == (0, 0)
