"""The recommendation: fewest workers that are fast enough, and a budget that was measured to matter."""

from __future__ import annotations

import pytest

from wds_async.cli.advice import recommend
from wds_async.cli.measure import Job, Outcome

MIB = 1 << 20


def outcome(workers: int, mb_s: float, *, peak: int = 100, budget: int = 128) -> Outcome:
    processes = max(1, workers)
    return Outcome(
        Job(["x.tar"], workers=workers),
        wall_s=1.0,
        first_s=0.0,
        bytes=int(mb_s * 1e6),
        samples=1,
        cpu_s=1.0,
        base_bytes=0,
        peak_bytes=0,
        stats={
            "budget_bytes": budget * MIB * processes,
            "window_peak_bytes": peak * MIB * processes,
        },
    )


def never(job: Job) -> Outcome:
    raise AssertionError("nothing more needs measuring")


def test_the_fewest_workers_within_five_per_cent() -> None:
    advice = recommend([outcome(1, 500), outcome(2, 960), outcome(4, 1000)], never)
    assert advice.workers == 2
    assert "within 5 %" in advice.text


def test_the_most_that_was_tried_may_not_be_enough() -> None:
    advice = recommend([outcome(1, 500), outcome(4, 1000)], never)
    assert advice.workers == 4
    assert "more may be faster" in advice.text


@pytest.mark.parametrize(("peak", "expected"), [(100, 128), (40, 64), (3, 32)])
def test_a_window_that_was_not_full_needs_no_more(peak: int, expected: int) -> None:
    assert recommend([outcome(0, 500, peak=peak)], never).budget_bytes == expected * MIB


@pytest.mark.parametrize(("faster", "expected"), [(560, 256), (510, 128)])
def test_a_full_window_is_tried_with_twice_the_budget(faster: float, expected: int) -> None:
    asked: list[Job] = []

    def more(job: Job) -> Outcome:
        asked.append(job)
        return outcome(2, faster, peak=256, budget=256)

    advice = recommend([outcome(2, 500, peak=128)], more)
    assert [job.budget_bytes for job in asked] == [256 * MIB]
    assert advice.budget_bytes == expected * MIB


def test_webdataset_is_never_recommended() -> None:
    other = outcome(4, 9999)
    theirs = Outcome(**{**other.__dict__, "job": Job(["x.tar"], library="webdataset", workers=4)})
    assert recommend([outcome(1, 500), theirs], never).workers == 1
