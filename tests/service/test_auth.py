"""The audit log: one line a refusal, no secrets, and no flood."""

from __future__ import annotations

import logging

import pytest

from wds_async.service.auth import LINES_AT_ONCE, Audit
from wds_async.service.refusals import Refusal, shown_path

REFUSAL = Refusal(403, "not allowed: gs://bucket/x", "forbidden")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "wds_async.audit")
    return caplog


def test_a_line_says_who_what_and_why(lines: pytest.LogCaptureFixture) -> None:
    Audit(lambda: 0.0).refused(REFUSAL, peer="10.0.0.1", client="job-1", method="GET", path="/gs/bucket/x?a=b")
    assert lines.messages == [
        "refused peer=10.0.0.1 client=job-1 method=GET path=/gs/bucket/x?a=b status=403 reason=forbidden: "
        "not allowed: gs://bucket/x"
    ]
    assert lines.records[0].audit["status"] == 403  # type: ignore[attr-defined]


def test_a_flood_is_counted_and_not_written(lines: pytest.LogCaptureFixture) -> None:
    now = 0.0
    audit = Audit(lambda: now)
    for _ in range(LINES_AT_ONCE + 1000):
        audit.refused(REFUSAL, peer="10.0.0.1")
    assert len(lines.messages) == LINES_AT_ONCE
    assert audit.left_out == 1000
    now = 0.1
    audit.refused(REFUSAL, peer="10.0.0.1")
    assert lines.messages[-1].endswith("(1000 refusals before it were left out)")
    assert audit.left_out == 0
    audit.refused(REFUSAL, peer="10.0.0.1")
    audit.close()
    audit.close()
    assert lines.messages[-1] == "refused: 1 more that were left out"
    assert len(lines.messages) == LINES_AT_ONCE + 2


def test_nobody_writes_lines_of_their_own(lines: pytest.LogCaptureFixture) -> None:
    Audit(lambda: 0.0).refused(
        Refusal(400, "no\nrefused peer=1.1.1.1", "name"),
        peer="10.0.0.1",
        client="a status=200\nrefused",
        method="GET\r\nX",
        path="/gs/b/%0Arefused%20peer=9.9.9.9",
    )
    assert len(lines.messages) == 1
    assert "\n" not in lines.messages[0]
    assert "\r" not in lines.messages[0]
    assert " status=200" not in lines.messages[0]
    assert " peer=9.9.9.9" not in lines.messages[0]


@pytest.mark.parametrize(
    "path",
    [
        "/url/https://host/x?X-Amz-Signature=SECRET&y=1",
        "/url/https%3A%2F%2Fhost%2Fx%3FX-Amz-Signature%3DSECRET",
        "/url/https%253A%252F%252Fhost%252Fx%253Fsig%253DSECRET",
        "/url/https%3A%2F%2Fuser%3ASECRET%40host%2Fx",
        "/url/https%3A%2F%2Fan%20other%3ASECRET%40host%2Fx",
        "/s3/b/o?X-Amz-Credential=SECRET",
    ],
)
def test_paths_are_shown_without_their_secrets(path: str) -> None:
    assert "SECRET" not in shown_path(path)
    assert "host" in shown_path(path) or "/s3/b/o" in shown_path(path)


def test_paths_are_shown_as_they_came_and_not_whole() -> None:
    assert shown_path("/gs/b/a%20b%252F") == "/gs/b/a%20b%252F"
    assert len(shown_path("/gs/b/" + "a" * 100_000)) <= 401
    assert shown_path("/gs/b/" + "%0a" * 100_000).isprintable()
