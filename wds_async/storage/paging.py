"""Listings page by page, which have to end."""

from __future__ import annotations

from wds_async.errors import TransferError
from wds_async.redact import redact

__all__ = ["Pages"]


class Pages:
    """What led to the next page of the listing of ``url`` at ``store`` (words): each mark once."""

    def __init__(self, store: str, url: str) -> None:
        self._store, self._url = store, url
        self._marks: set[int] = set()

    def turn(self, mark: str) -> None:
        """Go on by ``mark``, a continuation token or link. TransferError where it came before: the listing would never
        end."""
        if hash(mark) in self._marks:
            raise TransferError(
                f"{redact(self._url)} cannot be listed: {self._store} repeats its continuation token or link, so that "
                "its listing never ends. The store, or something between, is broken; name the shards with braces."
            )
        self._marks.add(hash(mark))
