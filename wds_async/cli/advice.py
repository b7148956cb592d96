"""From measurements to a recommendation: how many workers, how much memory, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from wds_async import config
from wds_async.cli.measure import Job, Outcome
from wds_async.cli.shards import human

__all__ = ["Advice", "named", "recommend"]

_NEAR = 0.95  # within the noise of such measurements
_WORTH = 1.10
_FULL = 0.9
_MIB = 1 << 20


@dataclass(frozen=True)
class Advice:
    """``workers`` and ``budget_bytes`` a process to use, and the sentence that says why."""

    workers: int
    budget_bytes: int
    text: str


def named(workers: int) -> str:
    """``1 worker``, ``2 workers``."""
    return "1 worker" if workers == 1 else f"{workers} workers"


def recommend(outcomes: list[Outcome], measure: Callable[[Job], Outcome]) -> Advice:
    """The fewest workers that come within 5 % of the fastest, and the budget for them.

    Where their window was full, twice the budget is tried too (``measure``), and advised if it gives 10 % more;
    where they held less than half of it, the next power of two above what they held is enough.
    """
    ours = [outcome for outcome in outcomes if outcome.job.library == "wds_async"]
    fastest = max(ours, key=lambda outcome: outcome.rate)
    good = [outcome for outcome in ours if outcome.rate >= _NEAR * fastest.rate]
    chosen = min(good, key=lambda outcome: outcome.job.workers)
    why = f"{named(chosen.job.workers)} read {human(chosen.rate)}/s"
    if chosen is not fastest:
        why += f", within 5 % of the {human(fastest.rate)}/s of {named(fastest.job.workers)}, for less memory"
    elif chosen.job.workers == max(outcome.job.workers for outcome in ours):
        why += ", the most that was tried: more may be faster still"
    else:
        why += ", the fastest of those tried"
    budget, reason = _budget(chosen, measure)
    text = f"{named(chosen.job.workers)}, WDS_BUDGET={budget // _MIB}M. {why}. {reason}"
    return Advice(chosen.job.workers, budget, text)


def _budget(chosen: Outcome, measure: Callable[[Job], Outcome]) -> tuple[int, str]:
    processes = max(1, chosen.job.workers)
    budget = int(chosen.stats.get("budget_bytes", 0)) or config.DEFAULT_BUDGET_BYTES * processes
    budget //= processes
    peak = int(chosen.stats.get("window_peak_bytes", 0)) // processes
    held = f"the window held at most {human(peak)} of {human(budget)} a process"
    if peak < budget // 2:
        enough = max(config.MIN_BUDGET_BYTES, 1 << max(peak - 1, 1).bit_length())
        return min(enough, budget), f"The budget is ample: {held}."
    if peak < _FULL * budget:
        return budget, f"The budget fits: {held}."
    more = measure(replace(chosen.job, budget_bytes=2 * budget))
    change = f"{human(more.rate)}/s with twice the budget against {human(chosen.rate)}/s"
    if more.rate >= _WORTH * chosen.rate:
        return 2 * budget, f"The window was full, and more memory helps: {change}."
    return budget, f"The window was full, but more memory does not help: {change}."
