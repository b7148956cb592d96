"""Buckets in AIStore's words, of a folder of this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.service.serving import Inside, ask

NAMES = [f"d/{n:02}.tar" for n in range(12)] + ["e.tar", "d/deep/x.tar"]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Inside]:
    for name in NAMES:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"12345")
    folder = f"{tmp_path}/data/"
    with Inside(allow=(folder, "gs://bucket/train/", "s3://other/"), buckets={"b": folder}) as running:
        yield running


def listed(service: Inside, **value: Any) -> dict[str, Any]:
    status, _, body = ask(f"{service.base}/v1/buckets/b", body={"action": "list", "value": value})
    assert status == 200, body
    found: dict[str, Any] = json.loads(body)
    return found


def test_all_of_it_in_pages(service: Inside) -> None:
    got, token, pages = [], "", 0
    while pages == 0 or token:
        page = listed(service, pagesize=5, continuation_token=token, uuid="u")
        got += [entry["name"] for entry in page["entries"]]
        token, pages = page["continuation_token"], pages + 1
        assert page["uuid"] == "u"
    assert (got, pages) == (sorted(NAMES), 3)


def test_a_prefix_and_one_level(service: Inside) -> None:
    entries = listed(service, prefix="d/", flags=str(1 << 11))["entries"]
    assert [entry["name"] for entry in entries] == [*sorted(NAMES)[:12], "d/deep/"]
    assert entries[0] == {"name": "d/00.tar", "size": "5", "flags": 1 << 6}
    assert entries[-1]["flags"] == 1 << 8
    hidden = listed(service, prefix="d/", flags=str(1 << 11 | 1 << 14))["entries"]
    assert [entry["name"] for entry in hidden] == sorted(NAMES)[:12]


def test_messagepack_where_it_is_asked_for(service: Inside) -> None:
    body = {"action": "list", "value": {"prefix": "e"}}
    status, fields, packed = ask(f"{service.base}/v1/buckets/b", body=body, Accept="application/msgpack")
    assert (status, fields["content-type"]) == (200, "application/msgpack")
    page = msgpack.unpackb(packed)
    assert page["Entries"] == [{"n": "e.tar", "s": 5, "f": 1 << 6}]


def test_without_a_message_it_is_a_listing(service: Inside) -> None:
    assert len(json.loads(ask(f"{service.base}/v1/buckets/b")[2])["entries"]) == len(NAMES)


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"[]", 400), (b"no json", 400), (b'{"action": "list", "value": 7}', 400),
     (b'{"action": "list", "value": {"flags": "many"}}', 400), (b'{"action": "destroy-bck"}', 405)],
)  # fmt: skip
def test_messages_that_are_none(service: Inside, body: bytes, status: int) -> None:
    assert ask(f"{service.base}/v1/buckets/b", body=body)[0] == status


def test_which_buckets_there_are(service: Inside) -> None:
    every = [
        {"name": "b", "provider": "ais"},
        {"name": "other", "provider": "aws"},
        {"name": "bucket", "provider": "gcp"},
    ]
    assert json.loads(ask(f"{service.base}/v1/buckets")[2]) == every
    assert json.loads(ask(f"{service.base}/v1/buckets?provider=gcp")[2]) == every[2:]
    assert json.loads(ask(f"{service.base}/v1/buckets?provider=s3")[2]) == every[1:2]


def test_a_buckets_head(service: Inside) -> None:
    status, fields, _ = ask(f"{service.base}/v1/buckets/b", "HEAD")
    assert (status, json.loads(fields["ais-bucket-props"])["provider"]) == (200, "ais")
    assert ask(f"{service.base}/v1/buckets/bucket?provider=gcp", "HEAD")[0] == 200  # a part of it is allowed
    assert ask(f"{service.base}/v1/buckets/strange?provider=gcp", "HEAD")[0] == 403
    assert ask(f"{service.base}/v1/buckets/none", "HEAD")[0] == 404


def test_no_listing_beside_what_is_allowed(service: Inside) -> None:
    for value in ({}, {"prefix": "tr"}, {"prefix": "test/"}):
        body = {"action": "list", "value": value}
        assert ask(f"{service.base}/v1/buckets/bucket?provider=gcp", body=body)[0] == 403


def test_the_cluster_is_this_node(service: Inside) -> None:
    smap = json.loads(ask(f"{service.base}/v1/daemon?what=smap")[2])
    net = smap["proxy_si"]["public_net"]
    assert (net["direct_url"], net["node_hostname"]) == (service.base, "127.0.0.1")
    assert [node["daemon_type"] for node in smap["tmap"].values()] == ["target"]
    assert ask(f"{service.base}/v1/cluster?what=smap")[0] == 200
    assert ask(f"{service.base}/v1/daemon?what=log")[0] == 501
