"""Brief requests are repeated where that can help, and no more often than the policy allows."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from wds_async.config import RetryPolicy
from wds_async.errors import UrlError
from wds_async.storage import retry
from wds_async.storage.base import Fault, Verdict

POLICY = RetryPolicy(max_attempts=3, base_s=0.001, cap_s=0.01)
FAULTS = {
    verdict.name[0]: Fault(verdict, verdict.value) for verdict in Verdict if verdict is not Verdict.COMMAND
}  # by initial: T, E, D, M, C (changed), S, F


@pytest.mark.parametrize(
    ("faults", "renewals", "attempts", "passes"),
    [
        pytest.param("", 2, 1, True, id="first attempt"),
        pytest.param("TT", 2, 3, True, id="two passing faults"),
        pytest.param("TST", 2, 3, False, id="as many faults as attempts"),
        pytest.param("EETT", 2, 5, True, id="renewals are not counted as failures"),
        pytest.param("EEE", 2, 3, False, id="renewals are limited"),
        pytest.param("E", 0, 1, False, id="no renewal allowed"),
        pytest.param("M", 2, 1, False, id="missing"),
        pytest.param("D", 2, 1, False, id="denied"),
        pytest.param("TC", 2, 2, False, id="changed"),
        pytest.param("F", 2, 1, False, id="fatal"),
    ],
)
def test_which_faults_are_followed_by_another_attempt(faults: str, renewals: int, attempts: int, passes: bool) -> None:
    left, made = iter(faults), itertools.count()

    async def call() -> str:
        next(made)
        if (letter := next(left, None)) is not None:
            raise KeyError(letter)
        return "result"

    def asked() -> str:
        retries = retry.Retries(POLICY, renewals=renewals)
        return asyncio.run(retry.ask(call, lambda exn: FAULTS[exn.args[0]], POLICY, retries=retries))

    if passes:
        assert asked() == "result"
    else:
        with pytest.raises(KeyError, match=faults[-1]):
            asked()
    assert next(made) == attempts


def test_waits_grow_and_respect_what_the_store_asks_for() -> None:
    retries = retry.Retries(RetryPolicy(base_s=1.0, cap_s=8.0), exhausted=lambda failures: failures > 9)
    waits = [retries.wait_s(FAULTS["T"]) for _ in range(9)]
    assert all(wait is not None and wait <= min(8.0, 2.0**n) for n, wait in enumerate(waits))
    assert retries.wait_s(FAULTS["T"]) is None
    assert retries.retryable
    asked_for = retry.Retries(RetryPolicy(cap_s=8.0)).wait_s(Fault(Verdict.TRANSIENT, "busy", retry_after_s=5.0))
    assert 5.0 <= (asked_for or 0.0) <= 8.0
    assert retry.Retries(POLICY).wait_s(FAULTS["E"]) == 0.0


def test_errors_of_this_library_are_final() -> None:
    async def call() -> None:
        raise UrlError("no such scheme")

    def classify(exn: BaseException) -> Fault:
        raise AssertionError("not to be classified")

    with pytest.raises(UrlError):
        asyncio.run(retry.ask(call, classify, POLICY))
