"""Listings that would never end."""

from __future__ import annotations

import pytest

from wds_async.errors import TransferError
from wds_async.storage.base import Pages


def test_a_mark_that_comes_again() -> None:
    pages = Pages("the store at http://h", "gs://b/dir/")
    pages.turn("a")
    pages.turn("b")
    with pytest.raises(TransferError, match=r"gs://b/dir/ cannot be listed: the store at http://h repeats"):
        pages.turn("a")
