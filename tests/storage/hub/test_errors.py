"""Places on the hub and their URLs, and what its answers mean."""

from __future__ import annotations

from typing import Any

import pytest

from wds_async.storage.base import Answer, Fault, Verdict
from wds_async.storage.http.auth import ANONYMOUS, Identity
from wds_async.storage.hub.backend import HubPlace, explain_hub_answer

ENDPOINT = "https://hub"
PLACE = HubPlace("datasets", "o/n", "main", "a/x.tar")
SOMEBODY = Identity("the token of HF_TOKEN", (("Authorization", "Bearer hf_SECRET"),))


def explained(status: int, identity: Identity = SOMEBODY, code: str = "", said: str = "", **more: Any) -> Fault:
    fields = {"x-error-code": code, "x-error-message": said, **more.pop("fields", {})}
    return explain_hub_answer(Answer(status, fields), PLACE, ENDPOINT, identity, **more)


def test_urls() -> None:
    place = HubPlace("datasets", "o/n", "refs/convert/parquet", "a b/ü%?#.tar")
    assert place.resolve_url(ENDPOINT) == (
        "https://hub/datasets/o/n/resolve/refs%2Fconvert%2Fparquet/a%20b/%C3%BC%25%3F%23.tar"
    )
    assert HubPlace("models", "o/n", "main", "x").resolve_url(ENDPOINT) == "https://hub/o/n/resolve/main/x"
    assert HubPlace("buckets", "o/n", "", "a/x").resolve_url(ENDPOINT) == "https://hub/buckets/o/n/resolve/a/x"
    listing = HubPlace("models", "o/n", "main", "a/b/").tree_url(ENDPOINT)
    assert listing == "https://hub/api/models/o/n/tree/main/a%2Fb?recursive=false&expand=false"
    listing = HubPlace("buckets", "o/n", "", "").tree_url(ENDPOINT)
    assert listing == "https://hub/api/buckets/o/n/tree?recursive=false&expand=false"


@pytest.mark.parametrize(
    ("status", "code", "verdict", "words"),
    [
        (404, "EntryNotFound", Verdict.MISSING, "the dataset o/n has no file 'a/x.tar' at revision 'main'"),
        (404, "RevisionNotFound", Verdict.MISSING, "the dataset o/n has no revision 'main'"),
        (404, "RepoNotFound", Verdict.MISSING, "the hub shows no dataset o/n"),
        (403, "GatedRepo", Verdict.DENIED, "the dataset o/n is gated"),
        (401, "GatedRepo", Verdict.DENIED, "the dataset o/n is gated"),
        (401, "RepoNotFound", Verdict.DENIED, "the hub refused the token (401)"),
        (401, "", Verdict.DENIED, "the hub refused the token"),
        (403, "", Verdict.DENIED, "asked with the token of HF_TOKEN"),
    ],
)
def test_answers(status: int, code: str, verdict: Verdict, words: str) -> None:
    fault = explained(status, code=code)
    assert fault.verdict is verdict
    assert words in fault.reason


def test_without_a_token() -> None:
    fault = explained(401, ANONYMOUS, "RepoNotFound", "Repository not found")
    assert fault.verdict is Verdict.DENIED
    assert fault.reason == "the hub shows no dataset o/n (401) (Repository not found); asked with no credentials"
    assert "set HF_TOKEN" in fault.advice
    assert "https://hub/datasets/o/n, then set HF_TOKEN" in explained(401, ANONYMOUS, "GatedRepo").advice


def test_a_token_that_is_looked_up_again() -> None:
    assert explained(401, renewed=True).verdict is Verdict.EXPIRED
    assert explained(401, ANONYMOUS, renewed=True).verdict is Verdict.EXPIRED


@pytest.mark.parametrize(
    ("fields", "wait_s"),
    [
        ({"retry-after": "7", "ratelimit": '"api";r=0;t=55'}, 7.0),
        ({"ratelimit": '"api";r=0;t=55', "ratelimit-policy": '"fixed window";"api";q=500;w=300'}, 55.0),
        ({"ratelimit": "nonsense"}, None),
        ({}, None),
    ],
)
def test_limits(fields: dict[str, str], wait_s: float | None) -> None:
    fault = explained(429, fields=fields)
    assert fault.retry_after_s == wait_s
    assert "HF_TOKEN" not in fault.advice
    assert "set HF_TOKEN for a higher limit" in explained(429, ANONYMOUS, fields=fields).advice
