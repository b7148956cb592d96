"""What is remembered of folders; how one is listed and tried again is tested in ``test_listing``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from wds_async.storage.listing import folders
from wds_async.storage.listing.folders import KEPT_BYTES, forget, keep, kept


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    forget()
    yield
    forget()


def test_the_oldest_folders_are_forgotten() -> None:
    half = ["x" * (KEPT_BYTES * 2 // 5)]
    for key in "abc":
        keep(key, half)
    assert [kept(key) for key in "abc"] == [None, half, half]
    keep("huge", ["x" * (KEPT_BYTES + 1)])
    assert [kept(key) for key in ("b", "c", "huge")] == [None] * 3


@pytest.mark.parametrize("name", ["AWS_SESSION_TOKEN", "AZURE_STORAGE_CLIENT_ID", "NETRC", "AIS_AUTHN_TOKEN_FILE"])
def test_a_listing_is_not_for_another_identity(name: str) -> None:
    assert name in folders._IDENTITIES


@pytest.mark.parametrize(
    ("reason", "permission"),
    [
        ("S3 answered 403 AccessDenied to access key AKIA…MPLE (environment)", True),
        ("S3 answered 403 InvalidAccessKeyId to access key AKIA…MPLE (environment)", False),
        ("Google Cloud Storage answered 401 to access token", False),
        ("Azure answered 403 AuthorizationPermissionMismatch to key of a", True),
        ("no credentials were found, and anonymous listing is refused", True),
    ],
)
def test_braces_are_advised_where_permission_is_missing(reason: str, permission: bool) -> None:
    assert (folders._NO_GRANT.search(reason) is None) == permission
