"""One process's share of a link, by how long its parts wait; whole links are in `test_control`."""

from __future__ import annotations

from wds_async.transfer.concurrency import Share

MIB = 1 << 20


def rounds(share: Share, took_s: float, now: float, count: int = 8, bound: int = 64, flying: float = 1.0) -> float:
    """So many rounds of parts that were all asked for after the last change. Returns the time."""
    for _ in range(count):
        now += took_s + 1
        for _ in range(max(8, share.limit) + 8):
            share.observe(MIB, took_s, now, bound, int(flying * share.limit))
    return now


def begun(processes: int = 8) -> Share:
    share = Share(2, 64, processes)
    assert share.limit == 64
    share.observe(MIB, 0.1, 0.0, 64, 1)
    return share


def test_it_begins_with_its_part_of_half_the_connections_and_doubles() -> None:
    share = begun()
    assert share.limit == 4
    rounds(share, 0.1, 0.0)
    assert share.limit == 64


def test_where_parts_wait_about_as_many_wait_as_it_began_with() -> None:
    share = begun()
    now = rounds(share, 0.1, 0.0)
    rounds(share, 0.2, now, 40)
    assert share.limit in (7, 8)  # half of them wait
    rounds(share, 10.0, now + 1000, 40)
    assert share.limit >= 4


def test_it_grows_again_when_the_others_have_gone() -> None:
    share = begun()
    now = rounds(share, 0.3, rounds(share, 0.1, 0.0), 40)
    assert share.limit < 8
    rounds(share, 0.1, now, 40)
    assert share.limit == 64


def test_what_flies_below_the_limit_tells_nothing() -> None:
    share = begun()
    rounds(share, 0.1, 0.0, flying=0.5)
    assert share.limit == 4


def test_the_bound_holds() -> None:
    share = begun()
    now = rounds(share, 0.1, 0.0, bound=22)
    assert share.limit == 22
    share.observe(MIB, 0.1, now + 1, 3, 3)
    assert share.limit == 3
