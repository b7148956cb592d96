"""What pays is found by trying, part by part; whole links are in `test_control`."""

from __future__ import annotations

from collections.abc import Callable

from wds_async.transfer.concurrency import Growth

MIB = 1 << 20


class Course:
    """Parts that come one after another, each in the time that ``took`` gives for the limit it was asked under."""

    def __init__(self, took: Callable[[int], float], least: int = 8, most: int = 64) -> None:
        self.took, self.growth, self.now, self.most = took, Growth(least, most), 0.0, most
        self.reasons: list[str] = []

    def run(self, seconds: float, *, flying: float = 1.0, bound: int | None = None) -> int:
        end = self.now + seconds
        while self.now < end:
            limit = self.growth.limit
            took_s = self.took(limit)
            self.now += took_s / limit
            reason = self.growth.observe(MIB, took_s, self.now, bound or self.most, int(flying * limit))
            self.reasons += [reason] if reason else []
        return self.growth.limit


def test_it_doubles_as_long_as_parts_take_no_longer() -> None:
    course = Course(lambda limit: 0.1)
    assert course.growth.limit == 64  # until the first part has come
    assert course.run(0.02) == 16
    assert course.run(2) == 64
    assert course.reasons[-1] == "throughput grew 2.0 times"


def test_it_goes_back_where_parts_only_wait() -> None:
    course = Course(lambda limit: 0.1 * max(1, limit / 20))
    course.run(2.5)
    assert 20 <= course.growth.limit <= 32
    course.run(60)
    assert 18 <= course.growth.limit <= 30
    assert any("a look whether" in reason for reason in course.reasons)


def test_a_link_that_widens_is_noticed() -> None:
    course = Course(lambda limit: 0.1 * max(1, limit / 10))
    assert course.run(20) <= 24
    course.took = lambda limit: 0.1
    assert course.run(40) == 64


def test_what_flies_below_the_limit_tells_nothing() -> None:
    course = Course(lambda limit: 0.1)
    assert course.run(20, flying=0.5) == 16


def test_it_follows_its_bound_down_at_once() -> None:
    course = Course(lambda limit: 0.1)
    course.run(5)
    assert course.run(0.01, bound=10) == 10
    assert "would only wait" in course.reasons[-1]


def test_a_rest_ends_a_look() -> None:
    course = Course(lambda limit: 0.1 * max(1, limit / 20))
    while not (course.reasons and "a look" in course.reasons[-1]):
        course.run(0.01)
    tried = course.growth.limit
    course.growth.rest(course.now)
    assert course.growth.limit != tried
