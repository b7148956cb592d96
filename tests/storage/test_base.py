"""What a fault becomes: the right class of the tree, with the whole story in one line."""

from __future__ import annotations

import pickle

import pytest

from wds_async import errors
from wds_async.storage.base import Fault, Pages, Request, Verdict, error_for


@pytest.mark.parametrize(
    ("verdict", "kind", "builtin"),
    [
        (Verdict.TRANSIENT, errors.TransferError, ConnectionError),
        (Verdict.EXPIRED, errors.AccessDenied, PermissionError),
        (Verdict.DENIED, errors.AccessDenied, PermissionError),
        (Verdict.MISSING, errors.ShardNotFound, FileNotFoundError),
        (Verdict.CHANGED, errors.ObjectChanged, OSError),
        (Verdict.STALLED, errors.FetchTimeout, TimeoutError),
        (Verdict.COMMAND, errors.PipeError, OSError),
        (Verdict.FATAL, errors.TransferError, ConnectionError),
    ],
)
def test_every_verdict_has_its_error(verdict: Verdict, kind: type[Exception], builtin: type[Exception]) -> None:
    error = error_for(Fault(verdict, "it broke", "Mend it."), "http://h/x.tar", 17, 3)
    assert type(error) is kind
    assert isinstance(error, builtin)
    assert str(error) == "http://h/x.tar at byte 17: it broke after 3 attempts. Mend it."
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (kind, str(error))


def test_one_attempt_is_not_counted() -> None:
    assert str(error_for(Fault(Verdict.FATAL, "no"), "x", 0, 1)) == "x at byte 0: no."


def test_headers_are_not_shown() -> None:
    assert "SECRET" not in repr(Request("http://h/x", (("Authorization", "SECRET"),)))


def test_a_listing_that_would_never_end() -> None:
    pages = Pages("the store at http://h", "gs://b/dir/")
    pages.turn("a")
    pages.turn("b")
    with pytest.raises(errors.TransferError, match=r"gs://b/dir/ cannot be listed: the store at http://h repeats"):
        pages.turn("a")
