"""The reading side of S3, in its own XML."""

from __future__ import annotations

import urllib.parse
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.serving import Inside, ask

NAMES = ["a b&<ü>.tar", *(f"d/{n:02}.tar" for n in range(7)), "d/deep/x.tar"]
NS = {"s": "http://s3.amazonaws.com/doc/2006-03-01/"}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Inside]:
    for name in NAMES:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"12345")
    folder = f"{tmp_path}/data/"
    with Inside(allow=(folder, "s3://other/part/"), buckets={"b": folder}) as running:
        yield running


def listed(service: Inside, **query: str) -> ET.Element:
    text = urllib.parse.urlencode({name.replace("_", "-"): value for name, value in query.items()})
    status, fields, body = ask(f"{service.base}/s3/b?{text}")
    assert (status, fields["content-type"].startswith("application/xml")) == (200, True), body
    return ET.fromstring(body)


def keys(page: ET.Element) -> list[str | None]:
    return [key.text for key in page.findall("s:Contents/s:Key", NS)]


def test_objects(service: Inside) -> None:
    name = urllib.parse.quote(NAMES[0])
    assert ask(f"{service.base}/s3/b/{name}")[::2] == (200, b"12345")
    status, fields, body = ask(f"{service.base}/s3/b/{name}", "HEAD")
    assert (status, fields["content-length"], body) == (200, "5", b"")
    assert ask(f"{service.base}/s3/b/{name}", Range="bytes=-2")[::2] == (206, b"45")
    assert ask(f"{service.base}/s3/b/nope", "HEAD")[::2] == (404, b"")


@pytest.mark.parametrize("version", ["1", "2"])
def test_pages(service: Inside, version: str) -> None:
    got: list[str | None] = []
    query, pages = {"max_keys": "4", **({"list_type": "2"} if version == "2" else {})}, 0
    while True:
        page = listed(service, **query)
        got, pages = got + keys(page), pages + 1
        if page.findtext("s:IsTruncated", "", NS) == "false":
            break
        if version == "2":
            query["continuation_token"] = page.findtext("s:NextContinuationToken", "", NS)
        else:
            query["marker"] = page.findtext("s:NextMarker", "", NS)
    assert (got, pages) == (sorted(NAMES), 3)


def test_folders(service: Inside) -> None:
    page = listed(service, list_type="2", delimiter="/")
    assert keys(page) == [NAMES[0]]
    assert [p.text for p in page.findall("s:CommonPrefixes/s:Prefix", NS)] == ["d/"]
    page = listed(service, list_type="2", delimiter="/", prefix="d/0")
    assert keys(page) == NAMES[1:8]
    assert page.findtext("s:KeyCount", "", NS) == "7"
    assert page.findtext("s:Contents/s:Size", "", NS) == "5"


def test_names_may_be_escaped(service: Inside) -> None:
    page = listed(service, list_type="2", encoding_type="url", prefix="a b")
    assert keys(page) == [urllib.parse.quote(NAMES[0])]
    assert page.findtext("s:Prefix", "", NS) == "a%20b"
    assert keys(listed(service, list_type="2", start_after="d/05.tar")) == ["d/06.tar", "d/deep/x.tar"]
    assert keys(listed(service, list_type="2", max_keys="0")) == []


def test_buckets(service: Inside) -> None:
    names = ET.fromstring(ask(f"{service.base}/s3")[2]).findall("s:Buckets/s:Bucket/s:Name", NS)
    assert [name.text for name in names] == ["b", "other"]
    assert ET.fromstring(ask(f"{service.base}/s3/b?location")[2]).tag.endswith("LocationConstraint")
    assert ask(f"{service.base}/s3/b", "HEAD")[::2] == (200, b"")
    assert ask(f"{service.base}/s3/other", "HEAD")[0] == 200
    assert ask(f"{service.base}/s3/strange", "HEAD")[0] == 403


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [("acl", 501, "NotImplemented"), ("versions", 501, "NotImplemented"), ("delimiter=x", 501, "NotImplemented"),
     ("max-keys=many", 400, "InvalidArgument"), ("list-type=2&continuation-token=!!", 400, "InvalidArgument")],
)  # fmt: skip
def test_what_is_not_answered_is_no_listing(service: Inside, query: str, status: int, code: str) -> None:
    found, _, body = ask(f"{service.base}/s3/b?{query}")
    assert (found, ET.fromstring(body).findtext("Code")) == (status, code)


def test_signatures_in_the_query_are_passed_over(service: Inside) -> None:
    assert len(keys(listed(service, list_type="2", X_Amz_Signature="0", X_Amz_Credential="a/b"))) == len(NAMES)


def test_no_listing_beside_what_is_allowed(service: Inside) -> None:
    assert ask(f"{service.base}/s3/other?list-type=2")[0] == 403
    assert ask(f"{service.base}/s3/other?list-type=2&prefix=pa")[0] == 403


SUBRESOURCES = ("acl", "tagging", "attributes", "torrent", "retention", "legal-hold", "restore", "uploads",
                "partNumber=1", "uploadId=7", "uploadId=7&partNumber=1", "select&select-type=2", "%61cl=",
                "x-id=GetObjectAcl&acl")  # fmt: skip


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "POST", "DELETE"])
@pytest.mark.parametrize("query", SUBRESOURCES)
def test_an_object_is_not_taken_for_a_sub_resource_of_it(service: Inside, method: str, query: str) -> None:
    for path in ("/s3/b/d/00.tar", "/s3/b/none"):
        status, fields, body = ask(f"{service.base}{path}?{query}", method)
        assert status == 501
        if method != "HEAD":
            assert fields["content-type"].startswith("application/xml")
            assert ET.fromstring(body).findtext("Code") == "NotImplemented"
            assert (ET.fromstring(body).findtext("Message") or "").startswith("?")


@pytest.mark.parametrize(
    "query",
    ["x-id=GetObject", "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Expires=60&X-Amz-Signature=00",
     "AWSAccessKeyId=a&Signature=b&Expires=1",
     "response-content-type=text%2Fplain&response-content-disposition=attachment", "versionId=null",
     "anything=else"],
)  # fmt: skip
def test_other_parameters_of_an_object_are_passed_over(service: Inside, query: str) -> None:
    assert ask(f"{service.base}/s3/b/d/00.tar?{query}")[::2] == (200, b"12345")


@pytest.mark.parametrize(("query", "status"), [("versionId=7", 501), ("versionId=", 400)])
def test_a_version_is_not_taken_for_another(service: Inside, query: str, status: int) -> None:
    assert ask(f"{service.base}/s3/b/d/00.tar?{query}")[0] == status
