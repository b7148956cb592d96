"""From figures to words: always one sentence and one knob, and the right ones."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_async.observe.diagnosis import Bound, Diagnosis, Figures, diagnose, diagnose_service
from wds_async.transfer.stats import Stats

anything = st.one_of(
    st.just(0.0), st.floats(0, 1e15), st.floats(allow_nan=True, allow_infinity=True), st.integers(-5, 10**9)
)
NUMBERS = [one.name for one in fields(Figures) if one.type in ("float", "int")]


def is_sound(diagnosis: Diagnosis) -> bool:
    """One sentence that ends, one knob, shares of a whole; all of it goes into JSON."""
    json.loads(json.dumps(diagnosis.as_dict(), allow_nan=False))
    one_sentence = re.fullmatch(r"(Bound by|Nothing was read: )[^\n]*[^.]\.", diagnosis.sentence) is not None
    in_full = str(diagnosis) == f"{diagnosis.sentence} Next: {diagnosis.knob}."
    return (
        one_sentence
        and in_full
        and bool(diagnosis.knob)
        and "\n" not in diagnosis.knob
        and not diagnosis.knob.endswith(".")
    )


@given(st.fixed_dictionaries(dict.fromkeys(NUMBERS, anything)), st.booleans())
def test_there_is_always_an_answer(figures: dict[str, float], handover: bool) -> None:
    diagnosis = diagnose(Figures(**figures, handover=handover))  # type: ignore[arg-type]
    assert is_sound(diagnosis)
    assert all(0 <= share <= 1 for share in diagnosis.shares.values())


@given(
    st.dictionaries(st.sampled_from(("client_bytes", "hit_bytes", "miss_bytes", "origin_bytes")), anything),
    st.dictionaries(st.sampled_from(("window_bytes", "window_limit_bytes")), anything),
    st.dictionaries(st.sampled_from(("bytes", "requests", "retries", "throttled")), anything),
)
def test_there_is_always_an_answer_for_a_service(
    counters: dict[str, float], gauges: dict[str, float], row: dict[str, float]
) -> None:
    now = {"counters": counters, "gauges": gauges, "origins": {"s3://b": {**row, "region": "", "dollars": [0, 0]}}}
    assert is_sound(diagnose_service(now, {}))
    assert is_sound(diagnose_service(now, now))
    assert is_sound(diagnose_service({}, now))


def test_the_cells_of_stats_are_figures_by_the_same_names() -> None:
    cells = set(Stats().as_dict())
    named = {name for name in NUMBERS if name not in ("workers", "cores", "shards")}
    assert named <= cells
    assert {name for name in cells if name.endswith("_s")} - set(NUMBERS) == {"read_s"}


READ: dict[str, Any] = {"bytes": 1e9, "samples": 1e4, "thread_s": 10.0}
BUSY: dict[str, Any] = {**READ, "cpu_s": 9.0}
WAITS: dict[str, Any] = {**READ, "wait_s": 9.0, "requests": 1000.0, "processes": 1.0, "connections_most": 64.0}
WORKERS: dict[str, Any] = {**READ, "workers": 2, "processes": 2.0, "batches": 100.0}


@pytest.mark.parametrize(
    ("figures", "bound", "knob"),
    [
        ({}, Bound.NOTHING_READ, "let it run"),
        ({"retries": 9, "requests": 9}, Bound.FAULTS, "look what fails: WDS_LOG=info"),
        ({"retries": 9, "requests": 9, "throttled": 9}, Bound.THROTTLING, "WDS_PART_SIZE=8M"),
        ({**WAITS, "head_s": 1, "body_s": 9, "connections_limit": 16}, Bound.NETWORK, "a faster way to the store"),
        ({**WAITS, "head_s": 1, "body_s": 9, "connections_limit": 64}, Bound.NETWORK, "WDS_CONNECTIONS=128"),
        ({**WAITS, "connections_limit": 64}, Bound.NETWORK, "WDS_CONNECTIONS=128"),
        ({**WAITS, "head_s": 9, "slowdown": 3, "connections_limit": 64}, Bound.NETWORK, "a faster way to the store"),
        ({**READ, "wait_s": 9}, Bound.NETWORK, "a faster disk or command"),
        ({**WAITS, "head_s": 9, "body_s": 1, "connections_limit": 64}, Bound.LATENCY, "WDS_CONNECTIONS=128"),
        ({**WAITS, "head_s": 9, "body_s": 1, "connections_limit": 9}, Bound.LATENCY, "larger shards"),
        ({**WAITS, "head_s": 9, "connections_most": 0}, Bound.LATENCY, "twice the WDS_CONNECTIONS"),
        ({**WAITS, "head_s": 9, "full_s": 9, "budget_bytes": 128 << 20}, Bound.BUDGET, "WDS_BUDGET=256M"),
        ({**WAITS, "head_s": 9, "full_s": 9}, Bound.BUDGET, "twice the WDS_BUDGET"),
        ({**WAITS, "throttled": 20, "retries": 20, "processes": 8}, Bound.THROTTLING, "num_workers=4"),
        ({**WAITS, "retries": 60}, Bound.FAULTS, "look what fails"),
        ({**BUSY, "cores": 8}, Bound.CPU, "num_workers=2, or speed up the functions that `py-spy"),
        ({**BUSY, "cores": 8, "workers": 4}, Bound.CPU, "num_workers=8"),
        ({**BUSY, "cores": 8, "workers": 3, "shards": 4}, Bound.CPU, "num_workers=4"),
        ({**BUSY, "cores": 8, "workers": 8}, Bound.CPU, "speed up the functions that `py-spy"),
        ({**WORKERS, "cpu_s": 9, "starved_s": 9, "cores": 4}, Bound.CPU, "num_workers=4"),
        ({**WORKERS, "batches": 1e4, "cpu_s": 90, "starved_s": 9, "cores": 4}, Bound.CPU, "num_workers=4"),
        ({**READ, "cpu_s": 1}, Bound.CONSUMER, "nothing: it is the GPU"),
        ({**READ, "cpu_s": 4}, Bound.CONSUMER, "num_workers=1, which reads beside"),
        ({**WORKERS, "starved_s": 1, "consumer_s": 9}, Bound.CONSUMER, "nothing: it is the GPU"),
        (WORKERS, Bound.CONSUMER, "nothing: it is the GPU"),
        ({**WORKERS, "starved_s": 9, "consumer_s": 1}, Bound.HANDOVER, "less to hand over"),
        ({**WORKERS, "starved_s": 9, "consumer_s": 1, "handover": False}, Bound.HANDOVER, "WDS_HANDOVER=1"),
        ({**WORKERS, "batches": 1e4, "starved_s": 9, "cpu_s": 9}, Bound.HANDOVER, ".batched(64)"),
        ({**WORKERS, "workers": 4, "shards": 3}, Bound.SHARDS, "num_workers=3"),
    ],
)
def test_what_figures_mean(figures: dict[str, Any], bound: Bound, knob: str) -> None:
    diagnosis = diagnose(Figures(**figures))
    assert (diagnosis.bound, diagnosis.knob[: len(knob)]) == (bound, knob), diagnosis


def test_what_came_since() -> None:
    before = Figures(bytes=10, samples=5, thread_s=1, budget_bytes=7, workers=2)
    now = Figures(bytes=30, samples=6, thread_s=3, budget_bytes=8, workers=2)
    assert now.since(before) == Figures(bytes=20, samples=1, thread_s=2, budget_bytes=8, workers=2)
    assert before.since(now) == before  # a counter was reset meanwhile


def service(origin: dict[str, float] | None = None, **counters: float) -> dict[str, Any]:
    return {
        "kind": "service",
        "counters": counters,
        "gauges": {"window_bytes": counters.pop("window", 0), "window_limit_bytes": 100},
        "origins": {"s3://b": origin or {}},
    }


@pytest.mark.parametrize(
    ("now", "bound", "words"),
    [
        (service(), Bound.NOTHING_READ, "no client took a shard's byte"),
        (service(client_bytes=9, hit_bytes=8, miss_bytes=2), Bound.CONSUMER, "80% of the bytes came from the disk"),
        (service(client_bytes=9, hit_bytes=2, miss_bytes=8), Bound.NETWORK, "80% of the bytes had to be fetched"),
        (service(client_bytes=9, miss_bytes=8, window=90), Bound.BUDGET, "90% of the memory"),
        (
            service({"requests": 9, "retries": 5, "throttled": 5}, client_bytes=9),
            Bound.THROTTLING,
            "s3://b: it refused",
        ),
        (service({"requests": 9, "retries": 5}, client_bytes=9), Bound.FAULTS, "s3://b: 5 of 9 requests failed"),
    ],
)
def test_what_the_figures_of_a_service_mean(now: dict[str, Any], bound: Bound, words: str) -> None:
    diagnosis = diagnose_service(now, service())
    assert diagnosis.bound is bound
    assert words in diagnosis.sentence


def test_a_service_is_judged_by_what_came_since() -> None:
    before = service({"requests": 9, "retries": 5}, client_bytes=9, hit_bytes=9)
    now = service({"requests": 19, "retries": 5}, client_bytes=19, hit_bytes=9, miss_bytes=10)
    assert diagnose_service(now, before).bound is Bound.NETWORK
    assert diagnose_service(before, now).bound is Bound.FAULTS  # it began anew: all of it counts
