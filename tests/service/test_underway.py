"""Requests under way."""

from __future__ import annotations

import contextlib

import pytest

from wds_async.service.cache.origin import Client
from wds_async.service.refusals import Refusal
from wds_async.service.running import Underway


def test_one_client_may_have_so_many_and_others_as_many() -> None:
    underway, one, other = Underway(2), Client("", "a"), Client("", "b")
    with underway.one(one), underway.one(other):
        with underway.one(one):
            assert len(underway) == 3
            with pytest.raises(Refusal) as caught, underway.one(one):
                raise AssertionError("let in")
            assert (caught.value.status, caught.value.reason) == (429, "client-requests")
            assert caught.value.fields["Retry-After"]
            with underway.one(other):
                assert len(underway) == 4
        with underway.one(one):
            assert len(underway) == 3
    assert len(underway) == 0


def test_all_clients_of_a_tenant_together_may_have_so_many() -> None:
    underway = Underway(2, tenant_limit=3)
    with contextlib.ExitStack() as stack:
        for name in ("a", "a", "b"):
            stack.enter_context(underway.one(Client("t", name)))
        for client in (Client("t", "b"), Client("t", "c")):
            with pytest.raises(Refusal, match="tenant_requests") as caught, underway.one(client):
                raise AssertionError("let in")
            assert (caught.value.status, caught.value.reason) == (429, "tenant-requests")
        stack.enter_context(underway.one(Client("u", "c")))
    with underway.one(Client("t", "c")):
        assert len(underway) == 1


def test_a_request_that_fails_is_over_too() -> None:
    underway = Underway(1)
    with pytest.raises(KeyError), underway.one(Client("", "a")):
        raise KeyError
    assert len(underway) == 0
