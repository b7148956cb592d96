"""What each store says of its objects, asked by its own backend, and what is made of it from end to end."""

# ruff: noqa: F811 - fixtures that are imported

from __future__ import annotations

import base64
import hashlib
from typing import Any

import crc32c
import pytest
import xxhash

from tests.clouds.ais import no_settings  # noqa: F401 - a fixture
from tests.servers import Origin, moto
from tests.servers.azurite import Azurite, azure_environment_fixture, azurite_fixture  # noqa: F401 - fixtures
from tests.servers.fakegcs import FakeGcs, clean_google, fake_gcs  # noqa: F401 - fixtures
from tests.transfer.reading import KIB, bytes_of, data, outcomes, quick, snapshot
from wds_async.errors import ChecksumMismatch
from wds_async.transfer.stats import Counters

SHARD = data(700 * KIB)
MD5, SHA256 = hashlib.md5(SHARD), hashlib.sha256(SHARD)
ALWAYS = quick(verify="always")

moto_server, clean_aws = moto.moto, moto.clean_aws


def verified(url: str, **config: Any) -> float:
    """How many shards were compared in reading ``url``, which holds `SHARD`."""
    counters = Counters()
    assert bytes_of([url], quick(**config), counters) == [SHARD]
    return snapshot(counters).verified_shards


@pytest.mark.servers
@pytest.mark.parametrize("direct", [True, False])
def test_google(fake_gcs: FakeGcs, clean_google: pytest.MonkeyPatch, direct: bool) -> None:
    clean_google.setenv("STORAGE_EMULATOR_HOST", fake_gcs.base)
    bucket = fake_gcs.bucket("vouched")
    fake_gcs.put(bucket, "a/x.tar", SHARD)
    for verify, expected in (("never", 0), ("auto", 1), ("always", 1)):
        assert verified(f"gs://{bucket}/a/x.tar", verify=verify, direct=direct) == expected


def test_google_is_asked_where_no_answer_said_it(clean_google: pytest.MonkeyPatch) -> None:
    said = {"crc32c": base64.b64encode(crc32c.crc32c(SHARD).to_bytes(4, "big")).decode()}
    with Origin() as server:
        clean_google.setenv("STORAGE_EMULATOR_HOST", server.base)
        server.add("/download/storage/v1/b/bkt/o/x.tar", SHARD)
        for digest, good in ((said["crc32c"], True), ("AAAAAA==", False)):
            server.forget()
            server.behave(path="/storage/v1/b/bkt/o/x.tar", body=f'{{"crc32c": "{digest}"}}'.encode())
            ((_, error),) = outcomes(["gs://bkt/x.tar"], ALWAYS)
            assert isinstance(error, ChecksumMismatch) is not good
            assert "crc32c" in server.requests[-1].target or not good


@pytest.mark.servers
def test_s3(moto_server: str, clean_aws: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    import boto3  # comes with moto

    clean_aws.setenv("AWS_ENDPOINT_URL_S3", moto_server)
    clean_aws.setenv("AWS_ACCESS_KEY_ID", "k" * 20)
    clean_aws.setenv("AWS_SECRET_ACCESS_KEY", "s" * 40)
    client = boto3.client("s3", region_name="us-east-1", endpoint_url=moto_server)
    client.create_bucket(Bucket="vouched")
    client.put_object(Bucket="vouched", Key="x.tar", Body=SHARD, ChecksumAlgorithm="SHA256")
    assert verified("s3://vouched/x.tar") == 0  # of ranges it says nothing
    assert verified("s3://vouched/x.tar", verify="always") == 1
    assert verified("s3://vouched/x.tar", verify="always", direct=False) == 1


@pytest.mark.servers
def test_azure(azurite: Azurite, azure_environment: pytest.MonkeyPatch) -> None:
    azurite.put("vouched", {"x.tar": SHARD})
    azure_environment.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite.connection_string)
    assert verified("az://vouched/x.tar") == 0  # an MD5, which nobody asked for
    assert verified("az://vouched/x.tar", verify="always") == 1


def test_a_blob_by_its_signature() -> None:
    with Origin() as server:
        server.behave(headers={"x-ms-blob-content-md5": base64.b64encode(MD5.digest()).decode()})
        assert verified(server.add("c/x.tar", SHARD) + "?sig=s", verify="always") == 1
        assert not any(request.path != "/c/x.tar" for request in server.requests)


def test_hugging_face(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with Origin() as hub, Origin() as cdn:
        monkeypatch.setenv("HF_ENDPOINT", hub.base)
        linked = {"X-Linked-Etag": f'"{SHA256.hexdigest()}"'}
        hub.behave(path="/datasets/o/n/*", redirect=cdn.add("signed", SHARD), headers=linked)
        assert verified("hf://datasets/o/n/x.tar", verify="always") == 1
        assert not any(request.method == "HEAD" for request in cdn.requests)  # its URL is signed for a GET
        hub.forget()
        hub.behave(path="/datasets/*", redirect=cdn.url("signed"), headers={"X-Linked-Etag": f'"{"0" * 64}"'})
        ((_, error),) = outcomes(["hf://datasets/o/n/x.tar"], ALWAYS)
        assert isinstance(error, ChecksumMismatch)


@pytest.mark.parametrize("kind", ["xxhash", "xxhash2", "md5", "crc32c", "sha256", "none"])
def test_aistore(no_settings: None, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    sums = {"md5": MD5.hexdigest(), "crc32c": f"{crc32c.crc32c(SHARD):08x}", "sha256": SHA256.hexdigest(), "none": ""}
    head = {"Ais-Checksum-Type": kind, "Ais-Checksum-Value": sums.get(kind, xxhash.xxh64(SHARD).hexdigest())}
    target = {"/v1/objects/b/x.tar": SHARD}
    with Origin(target) as proxy, Origin(target) as node:
        monkeypatch.setenv("AIS_ENDPOINT", proxy.base)
        proxy.behave(path="/v1/*", redirect=node.url("v1/objects/b/x.tar") + "?provider=ais&pid=p")
        node.behave(when=lambda request: request.range is None, headers=head)
        # A range's answer holds the range's, where the bucket is set so.
        node.behave(headers={**head, "Ais-Checksum-Value": "0" * len(head["Ais-Checksum-Value"])})
        assert verified("ais://b/x.tar") == 0
        assert verified("ais://b/x.tar", verify="always") == (kind != "none")
