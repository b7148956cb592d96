"""The double of AIStore, held against AIStore's own client."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clouds.ais import no_settings  # noqa: F401 - a fixture
from tests.servers.aistore import AisDouble
from tests.servers.shards import make_tar
from tests.transfer.reading import data

if os.environ.get("WDS_REQUIRE_SERVERS") == "1":
    import aistore.sdk
else:
    aistore = pytest.importorskip("aistore", reason="pip install aistore")

pytestmark = pytest.mark.usefixtures("no_settings")


@pytest.fixture
def double() -> Iterator[AisDouble]:
    with AisDouble(page=7) as running:
        yield running


@pytest.fixture
def client(double: AisDouble) -> Iterator[Any]:
    made = aistore.sdk.Client(double.endpoint)
    yield made
    made._request_client.session_manager.session.close()


def test_put_get_head_delete(double: AisDouble, client: Any) -> None:
    bucket = client.bucket("b").create()
    body = data(300_000)
    bucket.object("a b/c#%.tar").get_writer().put_content(body)
    assert double.get("ais/b/a b/c#%.tar") == body
    assert bucket.object("a b/c#%.tar").get_reader().read_all() == body
    props = bucket.object("a b/c#%.tar").head()
    assert props.size == len(body)
    assert props.present
    bucket.object("a b/c#%.tar").delete()
    assert double.get("ais/b/a b/c#%.tar") is None


def test_redirects_and_their_statuses(double: AisDouble, client: Any) -> None:
    double.put("gcp/b/x", b"0123456789")
    bucket = client.bucket("b", provider="gcp")
    assert bucket.object("x").get_reader().read_all() == b"0123456789"
    at_target = double.at("t*")[0]
    assert at_target.query["provider"] == "gcp"
    assert {"pid", "utm"} <= set(at_target.query)
    import requests

    url = f"{double.endpoint}/v1/objects/b/x?provider=gcp"
    with requests.Session() as session:
        statuses = {
            method: session.request(method, url, allow_redirects=False).status_code
            for method in ("GET", "HEAD", "PUT", "DELETE")
        }
        assert statuses == {"GET": 301, "HEAD": 307, "PUT": 307, "DELETE": 307}
        assert session.get(f"{double.endpoint}/gs/b/x").content == b"0123456789"


def test_ranges(double: AisDouble, client: Any) -> None:
    double.put("ais/b/x", b"0123456789")
    thing = client.bucket("b").object("x")
    assert thing.get_reader(byte_range="bytes=2-4").read_all() == b"234"
    assert thing.get_reader(byte_range="bytes=-3").read_all() == b"789"
    assert thing.get_reader(byte_range="bytes=8-").read_all() == b"89"
    with pytest.raises(aistore.sdk.errors.AISError) as caught:
        thing.get_reader(byte_range="bytes=10-").read_all()
    assert caught.value.status_code == 416


def test_listing_in_pages(double: AisDouble, client: Any) -> None:
    names = [f"d/{i:02}" for i in range(30)]
    for name in [*names, "e"]:
        double.put(f"ais/b/{name}", b"x" * 5)
    bucket = client.bucket("b")
    assert [entry.name for entry in bucket.list_objects_iter(prefix="d/")] == names
    assert {entry.size for entry in bucket.list_all_objects(props="name,size")} == {5}
    page = bucket.list_objects(page_size=3)
    assert len(page.entries) == 3
    assert page.continuation_token
    one_level = aistore.sdk.list_object_flag.ListObjectFlag.NO_RECURSION
    assert sorted(entry.name for entry in bucket.list_objects_iter(flags=[one_level])) == ["d/", "e"]


def test_namespaces(double: AisDouble, client: Any) -> None:
    double.put("ais/@u1#ns/b/x", b"there")
    double.put("ais/b/x", b"here")
    namespace = aistore.sdk.namespace.Namespace(uuid="u1", name="ns")
    assert client.bucket("b", namespace=namespace).object("x").get_reader().read_all() == b"there"
    assert client.bucket("b").object("x").get_reader().read_all() == b"here"


def test_archives(double: AisDouble, client: Any) -> None:
    from aistore.sdk.archive_config import ArchiveConfig, ArchiveMode

    double.put("ais/b/x.tar", make_tar([("a.txt", b"one"), ("a.cls", b"1"), ("b.txt", b"two")]))
    thing = client.bucket("b").object("x.tar")
    assert thing.get_reader(archive_config=ArchiveConfig(archpath="b.txt")).read_all() == b"two"
    got = thing.get_reader(archive_config=ArchiveConfig(regex="a", mode=ArchiveMode.WDSKEY)).read_all()
    with tarfile.open(fileobj=io.BytesIO(got)) as archive:
        assert archive.getnames() == ["a.txt", "a.cls"]
    with pytest.raises(aistore.sdk.errors.AISError) as caught:
        thing.get_reader(archive_config=ArchiveConfig(archpath="a.txt"), byte_range="bytes=0-1").read_all()
    assert caught.value.status_code == 501


def test_transforms(double: AisDouble, client: Any) -> None:
    from aistore.sdk.etl.etl_config import ETLConfig

    double.put("ais/b/x", b"abc")
    double.etls["up"] = lambda body, args: body.upper() + args.encode()
    assert client.bucket("b").object("x").get_reader(etl=ETLConfig(name="up", args="!")).read_all() == b"ABC!"
    with pytest.raises(aistore.sdk.errors.ErrETLNotFound):
        client.bucket("b").object("x").get_reader(etl=ETLConfig(name="no")).read_all()


def test_errors_are_those_that_the_client_knows(double: AisDouble, client: Any) -> None:
    errors = aistore.sdk.errors
    with pytest.raises(errors.ErrBckNotFound):
        client.bucket("nowhere").list_objects()
    double.put("ais/b/x", b"x")
    with pytest.raises(errors.ErrObjNotFound):
        client.bucket("b").object("y").get_reader().read_all()
    double.script("t*", status=409, message='object "ais://b/x" is busy')
    with pytest.raises(errors.ErrGETConflict):
        client.bucket("b").object("x").get_reader().read_all()


def test_tokens_stay_at_the_proxy() -> None:
    with AisDouble(token="right") as double:
        double.put("ais/b/x", b"x")
        for token, status in (("right", 200), ("wrong", 401)):
            client = aistore.sdk.Client(double.endpoint, token=token)
            if status == 200:
                assert client.bucket("b").object("x").get_reader().read_all() == b"x"
            else:
                with pytest.raises(aistore.sdk.errors.AISError) as caught:
                    client.bucket("b").object("x").get_reader().read_all()
                assert caught.value.status_code == 401
            client._request_client.session_manager.session.close()
        assert {seen.authorization for seen in double.at("t*")} == {""}


def test_the_map_of_the_cluster(double: AisDouble, client: Any) -> None:
    double.put("ais/b/x", b"x")
    assert client.cluster().is_ready()
    assert client.bucket("b").object("x").get_reader(direct=True).read_all() == b"x"
    before = len(double.at("proxy"))
    assert client.bucket("b").object("x").get_reader(direct=True).read_all() == b"x"
    assert len(double.at("proxy")) <= before + 1


def test_a_batch_of_ranges(double: AisDouble, client: Any) -> None:
    body = data(70_000)
    shard = make_tar([("a/1.txt", b"text"), ("a/1.cls", b"7")])
    double.put("gcp/b/x", body)
    double.put("ais/other/s.tar", shard)
    batch = client.batch(bucket=client.bucket("b", provider="gcp"))
    batch.add("x", start=512, length=60_000).add("missing").add("x", start=69_990, length=-1).add("x")
    batch.add("s.tar", archpath="a/1.cls", bck="other", provider="ais")
    batch.add("s.tar", length=512, bck="other", provider="ais")
    found = list(batch.get())
    assert [content for _, content in found] == [body[512:60_512], b"", body[69_990:], body, b"7", shard[:512]]
    assert [bool(out.err_msg) for out, _ in found] == [False, True, False, False, False, False]
    assert double.batches[0][0] == {"objname": "x", "bucket": "b", "provider": "gcp", "start": 512, "length": 60_000}
    assert [seen.node for seen in double.seen] == ["proxy", double.seen[1].node]
    double.batch_ranges = None
    with pytest.raises(aistore.sdk.errors.AISError):
        list(batch.add("x").get())
