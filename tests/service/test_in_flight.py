"""Requests under way."""

from __future__ import annotations

import contextlib

import pytest

from wds_async.service.cache.origin import Client
from wds_async.service.limits import InFlightRequests
from wds_async.service.refusals import Refusal


def test_one_client_may_have_so_many_and_others_as_many() -> None:
    in_flight, one, other = InFlightRequests(2), Client("", "a"), Client("", "b")
    with in_flight.one(one), in_flight.one(other):
        with in_flight.one(one):
            assert len(in_flight) == 3
            with pytest.raises(Refusal) as caught, in_flight.one(one):
                raise AssertionError("let in")
            assert (caught.value.status, caught.value.reason) == (429, "client-requests")
            assert caught.value.fields["Retry-After"]
            with in_flight.one(other):
                assert len(in_flight) == 4
        with in_flight.one(one):
            assert len(in_flight) == 3
    assert len(in_flight) == 0


def test_all_clients_of_a_tenant_together_may_have_so_many() -> None:
    in_flight = InFlightRequests(2, tenant_limit=3)
    with contextlib.ExitStack() as stack:
        for name in ("a", "a", "b"):
            stack.enter_context(in_flight.one(Client("t", name)))
        for client in (Client("t", "b"), Client("t", "c")):
            with pytest.raises(Refusal, match="tenant_requests") as caught, in_flight.one(client):
                raise AssertionError("let in")
            assert (caught.value.status, caught.value.reason) == (429, "tenant-requests")
        stack.enter_context(in_flight.one(Client("u", "c")))
    with in_flight.one(Client("t", "c")):
        assert len(in_flight) == 1


def test_a_request_that_fails_is_over_too() -> None:
    in_flight = InFlightRequests(1)
    with pytest.raises(KeyError), in_flight.one(Client("", "a")):
        raise KeyError
    assert len(in_flight) == 0
