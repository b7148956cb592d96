"""Ranges by botocore's client (under faults: `tests/storage/test_checked.py`)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from wds_async.storage.checked import CheckedRanges
from wds_async.storage.http.messages import version_of
from wds_async.storage.s3.backend import ObjectGet
from wds_async.storage.s3.options import S3Name


class Unsatisfied(Exception):
    response = {"ResponseMetadata": {"HTTPStatusCode": 416, "HTTPHeaders": {"ETag": '"e"'}}}  # noqa: RUF012


class Client:
    """As `S3Client`, of a store that tells no size with its 416."""

    def __init__(self, exn: Exception) -> None:
        self._exn = exn

    async def get(self, name: S3Name, **more: str) -> Any:
        raise self._exn

    async def head(self, name: S3Name, **more: str) -> Any:
        return {"ContentLength": 0}


def asked(exn: Exception) -> CheckedRanges | None:
    get = ObjectGet(Client(exn), S3Name("s3", "b", "k"))  # type: ignore[arg-type]
    return asyncio.run(CheckedRanges.of(get, version_of, 30.0))


def test_an_empty_object_of_which_the_size_is_asked_for() -> None:
    found = asked(Unsatisfied())
    assert found is not None
    assert (found.size, found.version) == (0, 'etag "e"')


def test_a_refusal_is_botocores() -> None:
    with pytest.raises(KeyError):
        asked(KeyError("x"))
