"""Refusals: statuses, and how they are said."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from wds_async import errors
from wds_async.service.refusals import Refusal, as_json, as_xml, refusal_of


@pytest.mark.parametrize(
    ("kind", "status"),
    [(errors.ShardNotFound, 404), (errors.AccessDenied, 403), (errors.UnsafeContent, 403), (errors.UrlError, 400),
     (errors.ObjectChanged, 409), (errors.CostLimitReached, 402), (errors.FetchTimeout, 504),
     (errors.TransferError, 502), (errors.ChecksumMismatch, 502), (errors.PipeError, 502), (errors.NotATar, 422),
     (errors.MissingExtra, 501), (errors.ReaderClosed, 503), (errors.ConfigError, 500)],
)  # fmt: skip
def test_each_error_of_the_tree_has_its_status(kind: type[errors.WdsError], status: int) -> None:
    found = refusal_of(kind("gs://b/x at byte 0: so it was. Do this."))
    assert (found.status, found.message) == (status, "gs://b/x at byte 0: so it was. Do this.")
    assert found.reason


def test_every_error_of_the_tree_has_one() -> None:
    kinds = [getattr(errors, name) for name in errors.__all__]
    assert {refusal_of(kind("x")).status for kind in kinds} <= {400, 402, 403, 404, 409, 422, 500, 501, 502, 503, 504}


def test_secrets_are_not_said() -> None:
    found = refusal_of(errors.TransferError("https://h/x?X-Amz-Signature=hush at byte 0: refused"))
    assert "hush" not in found.message
    assert "hush" not in as_json(found, "GET", "/url/https%3A%2F%2Fh%2Fx%3Fsig=hush")


def test_other_exceptions_keep_their_words_to_themselves() -> None:
    found = refusal_of(KeyError("/home/me/secret"))
    assert found.status == 500
    assert "secret" not in found.message


def test_json_is_aistores_and_fits_a_header() -> None:
    text = as_json(Refusal(404, "no ü\n"), "GET", "/v1/objects/b/x")
    assert json.loads(text) == {
        "message": "no ü\n",
        "method": "GET",
        "url_path": "/v1/objects/b/x",
        "remote_addr": "",
        "caller": "",
        "node": "wds-async",
        "status": 404,
    }
    assert text.isascii()
    assert text.isprintable()


def test_xml_is_s3s() -> None:
    root = ET.fromstring(as_xml(Refusal(404, "no <such> key & \x00"), "/s3/b/x<"))
    assert root.findtext("Code") == "NoSuchKey"
    assert root.findtext("Message") == "no <such> key & \N{REPLACEMENT CHARACTER}"
    assert root.findtext("Resource") == "/s3/b/x<"
    assert ET.fromstring(as_xml(Refusal(418, "x", code="Odd"), "/")).findtext("Code") == "Odd"


def test_when_to_come_again() -> None:
    assert Refusal(429, "x", retry_after_s=0.2).fields == {"Retry-After": "1"}
    assert Refusal(416, "x", headers={"A": "b"}).fields == {"A": "b"}


def test_a_password_with_a_space_is_not_said() -> None:
    path = "/url/http%3A%2F%2Fan%20other%3ASECRET%40host%2Fa"
    refusal = Refusal(400, "no")
    assert "SECRET" not in as_json(refusal, "GET", path) + as_xml(refusal, path)
    assert "host" in as_json(refusal, "GET", path)
