"""Requests on condition."""

from __future__ import annotations

import pytest

from wds_async.service.preconditions import Validators, must_send, range_holds
from wds_async.service.refusals import Refusal

OLD, NOW, NEW = (f"Tue, {day} Nov 2023 22:13:20 GMT" for day in ("07", "14", "21"))
HAS = Validators('"a"', NOW)
WEAK = Validators('W/"a"', NOW)


def test_the_origins_own_validators_pass_unchanged() -> None:
    fields = {"etag": 'W/"x-1"', "last-modified": NOW}
    assert Validators.of(fields, "etag x") == Validators('W/"x-1"', NOW)


def test_an_etag_is_made_of_the_identity() -> None:
    one, same, other = (Validators.of({}, identity).etag for identity in ("version 1", "version 1", "version 2"))
    assert one == same != other
    assert one.startswith('"wds-')
    assert "version" not in one  # an identity may hold what is nobody's business
    assert Validators.of({}, "").etag == ""


@pytest.mark.parametrize(
    ("asked", "has", "wanted"),
    [
        ({}, HAS, True),
        ({"if-none-match": '"a"'}, HAS, False),
        ({"if-none-match": 'W/"a"'}, HAS, False),
        ({"if-none-match": '"b", "a"'}, HAS, False),
        ({"if-none-match": "*"}, HAS, False),
        ({"if-none-match": '"b"'}, HAS, True),
        ({"if-none-match": '"b"', "if-modified-since": NEW}, HAS, True),  # the date is not looked at
        ({"if-modified-since": NOW}, HAS, False),
        ({"if-modified-since": OLD}, HAS, True),
        ({"if-modified-since": "yesterday"}, HAS, True),
        ({"if-modified-since": NOW}, Validators('"a"'), True),
        ({"if-match": '"a"'}, HAS, True),
        ({"if-match": '"b", "a"'}, HAS, True),
        ({"if-match": "*"}, WEAK, True),
        ({"if-match": "a"}, Validators("a"), True),  # some servers send them without quotes
        ({"if-unmodified-since": NOW}, HAS, True),
        ({"if-match": '"a"', "if-unmodified-since": OLD}, HAS, True),
    ],
)
def test_whether_it_is_sent(asked: dict[str, str], has: Validators, wanted: bool) -> None:
    assert must_send(asked, has) is wanted


@pytest.mark.parametrize(
    ("asked", "has"),
    [
        ({"if-match": '"b"'}, HAS),
        ({"if-match": 'W/"a"'}, WEAK),  # RFC 9110: only strong ones match here
        ({"if-match": '"a"'}, Validators()),
        ({"if-unmodified-since": OLD}, HAS),
    ],
)
def test_another_object_is_refused(asked: dict[str, str], has: Validators) -> None:
    with pytest.raises(Refusal) as caught:
        must_send(asked, has)
    assert caught.value.status == 412


@pytest.mark.parametrize(
    ("condition", "has", "holds"),
    [
        (None, HAS, True),
        ('"a"', HAS, True),
        ('"b"', HAS, False),
        ('W/"a"', WEAK, False),
        (NOW, HAS, True),
        (OLD, HAS, False),
        (NEW, HAS, False),
        (NOW, Validators('"a"'), False),
    ],
)
def test_if_range(condition: str | None, has: Validators, holds: bool) -> None:
    assert range_holds(condition, has) is holds
