"""Requests under way."""

from __future__ import annotations

import pytest

from wds_async.service.refusals import Refusal
from wds_async.service.underway import Underway


def test_one_client_may_have_so_many_and_others_as_many() -> None:
    underway = Underway(2)
    assert [underway.enter("a") for _ in range(3)] == [True, True, False]
    assert underway.enter("b")
    assert (len(underway), underway.clients) == (3, 2)
    with pytest.raises(Refusal) as caught, underway.one("a"):
        raise AssertionError("let in")
    assert caught.value.status == 429
    assert caught.value.fields["Retry-After"]
    underway.leave("a")
    with underway.one("a"):
        assert not underway.enter("a")
    underway.leave("a")
    underway.leave("b")
    assert (len(underway), underway.clients) == (0, 0)


def test_a_request_that_fails_is_over_too() -> None:
    underway = Underway(1)
    with pytest.raises(KeyError), underway.one("a"):
        raise KeyError
    assert len(underway) == 0
