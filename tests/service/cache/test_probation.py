"""The share for what does not stay."""

from __future__ import annotations

from wds_async.service.cache.policy import Probation


def nothing(chunk: tuple[int, int]) -> bool:
    return False


def test_what_was_read_goes_first() -> None:
    probation = Probation(30)
    for number in range(3):
        assert probation.put((1, number), 10, True, nothing) == []
    probation.spend((1, 1))
    assert probation.put((2, 0), 10, True, nothing) == [(1, 1)]
    assert probation.put((2, 1), 10, False, nothing) is None  # what nobody has read goes for demand only
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
