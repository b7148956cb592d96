"""S3 as users have it: listing, writing and reading on moto, and Ceph's gateway, which checks signatures for real.

The store that most other tests use is ours (`SignedStore`), so botocore, as its client, has to agree with it first.
"""

from __future__ import annotations

import io
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.servers import moto as moto_server
from tests.servers import radosgw as rados
from tests.servers.shards import make_shards
from tests.servers.sigv4 import Account, SignedStore
from tests.storage.locations import location_of
from tests.storage.s3.test_client import on_s3
from tests.transfer.reading import KIB, data, outcomes, quick
from wds_async.config import RetryPolicy, TransferConfig
from wds_async.errors import ObjectChanged
from wds_async.storage.base import Answer, Entry, Location, RefusedAnswer, Verdict
from wds_async.storage.s3.backend import S3Backend
from wds_async.transfer.reader import open_shards

pytest.importorskip("s3fs")
boto3 = pytest.importorskip("boto3")

clean_aws, moto, radosgw = moto_server.clean_aws, moto_server.moto, rados.radosgw
OBJECT = data(1200 * KIB)


def client(base: str, key: str = rados.KEY, secret: str = rados.SECRET, **config: Any) -> Any:
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=base,
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        region_name=config.pop("region", "us-east-1"),
        config=Config(retries={"total_max_attempts": 1}, **config),
    )


# -- our own store, by botocore -------------------------------------------------------------------------------------


@pytest.fixture
def store(clean_aws: pytest.MonkeyPatch) -> Iterator[SignedStore]:
    with SignedStore() as running:
        running.objects["bucket", "a b/ü+%20#?.tar"] = OBJECT
        running.accounts[rados.KEY] = Account(rados.SECRET)
        yield running


def test_the_store_takes_what_botocore_signs(store: SignedStore) -> None:
    name = {"Bucket": "bucket", "Key": "a b/ü+%20#?.tar"}
    assert client(store.base).get_object(**name)["Body"].read() == OBJECT
    assert client(store.base).get_object(**name, Range="bytes=5-9")["Body"].read() == OBJECT[5:10]
    presigned = client(store.base, signature_version="s3v4").generate_presigned_url("get_object", name)
    with urllib.request.urlopen(presigned) as answer:
        assert answer.read() == OBJECT
    assert {seen.key for seen in store.seen} == {rados.KEY}


def test_the_store_refuses_what_it_should(store: SignedStore) -> None:
    from botocore.exceptions import ClientError

    name = {"Bucket": "bucket", "Key": "a b/ü+%20#?.tar"}

    def refused(**given: Any) -> str:
        with pytest.raises(ClientError) as info:
            client(store.base, **given).get_object(**name)
        return str(info.value.response["Error"]["Code"])

    assert refused(secret="other") == "SignatureDoesNotMatch"
    assert refused(key="other") == "InvalidAccessKeyId"
    assert refused(signature_version="s3") == "InvalidArgument"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"{store.base}/bucket/x")
    store.ahead_s = 1000
    assert refused() == "RequestTimeTooSkewed"
    store.ahead_s = 0
    store.regions["bucket"] = "eu-west-1"
    assert client(store.base).get_object(**name)["Body"].read() == OBJECT, "botocore follows the region that is named"


# -- moto: listing and writing --------------------------------------------------------------------------------------


@pytest.fixture
def bucket(moto: str, clean_aws: pytest.MonkeyPatch) -> Any:
    for name, value in {**moto_server.CREDENTIALS, "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": moto}.items():
        clean_aws.setenv(name, value)
    moto_server.reset(moto)
    made = boto3.client("s3")
    made.create_bucket(Bucket="bucket")
    return made


def listing(url: str, **options: Any) -> list[Entry]:
    async def collect(backend: S3Backend) -> list[Entry]:
        return [entry async for entry in backend.entries(location_of(url))]

    return on_s3(collect, **options)


def test_listing(bucket: Any) -> None:
    keys = ["a/x.tar", "a/b/y.tar", "a/b/z.tar", "a/c d+%20.tar", "a/", "b.tar"]
    for key in keys:
        bucket.put_object(Bucket="bucket", Key=key, Body=key.encode())
    found = listing("s3://bucket/a/")
    assert [(entry.url, entry.size) for entry in found] == [
        ("s3://bucket/a/b/", None),
        ("s3://bucket/a/c d+%20.tar", 13),
        ("s3://bucket/a/x.tar", 7),
    ]
    assert found[-1].modified
    assert [entry.url for entry in listing("s3a://bucket/")] == ["s3a://bucket/a/", "s3a://bucket/b.tar"]
    assert listing("s3://") == [Entry("s3://bucket/", None)]
    assert listing("s3://bucket/none/") == []


def test_listing_goes_page_by_page(bucket: Any) -> None:
    names = [f"{number:03d}{'/x' if number % 5 == 0 else ''}" for number in range(48)]
    for name in names:
        bucket.put_object(Bucket="bucket", Key=name, Body=b"")
    found = [entry.url for entry in listing("s3://bucket/", s3_additional_kwargs={"MaxKeys": 10})]
    assert found == [f"s3://bucket/{name.removesuffix('x')}" for name in names]


# -- Ceph -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ceph(radosgw: Any, clean_aws: pytest.MonkeyPatch) -> Any:
    clean_aws.setenv("AWS_ENDPOINT_URL_S3", radosgw.base)
    clean_aws.setenv("AWS_ACCESS_KEY_ID", rados.KEY)
    clean_aws.setenv("AWS_SECRET_ACCESS_KEY", rados.SECRET)
    made = client(radosgw.base)
    made.create_bucket(Bucket="bucket")
    return made


def one_by_one(**overrides: Any) -> TransferConfig:
    """The gateway answers four requests at once."""
    return quick(connections=2, **overrides)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("key", ["x.tar", "a b+c/ü#?%20 [1]*.tar", "a//b", "~'!$&(),;=:@"])
def test_ceph_gives_what_was_put(ceph: Any, key: str, direct: bool) -> None:
    ceph.put_object(Bucket="bucket", Key=key, Body=OBJECT)
    ((got, error),) = outcomes([f"s3://bucket/{key}"], one_by_one(direct=direct))
    assert error is None
    assert got == OBJECT


def test_ceph_reads_a_dataset(ceph: Any, tmp_path: Path) -> None:
    for path in make_shards(tmp_path, 3, 5):
        ceph.upload_file(str(path), "bucket", path.name)
    listed = [entry.url for entry in listing("s3://bucket/") if entry.url.endswith(".tar")]
    names = sorted(f"s3://bucket/{path.name}" for path in tmp_path.iterdir())
    assert set(names) <= set(listed)
    expected = [sample["__key__"] for sample in wds.WebDataset([str(p) for p in sorted(tmp_path.iterdir())])]
    assert [sample["__key__"] for sample in wds.WebDataset(names, shardshuffle=False)] == expected


def test_ceph_slows_down_and_is_waited_for(ceph: Any) -> None:
    """More requests at once than it answers: real 503s, and all bytes."""
    ceph.put_object(Bucket="bucket", Key="many.tar", Body=data(8 << 20))
    refused: list[str] = []

    class Watching(S3Backend):
        def classify(self, outcome: Answer | BaseException, location: Location) -> Any:
            fault = super().classify(outcome, location)
            if isinstance(outcome, RefusedAnswer):
                refused.append(fault.reason)
                assert fault.verdict is Verdict.TRANSIENT
            return fault

    config = quick(connections=32, part_bytes=64 * KIB, retry=RetryPolicy(max_attempts=50, base_s=0.005, cap_s=0.1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wds_async.storage.s3.backend.S3Backend", Watching)
        found = outcomes(["s3://bucket/many.tar"] * 4, config)
    assert [error for _, error in found] == [None] * 4
    assert all(got == data(8 << 20) for got, _ in found)
    assert refused
    assert "SlowDown" in refused[0]


def test_ceph_answers_412_when_the_object_was_replaced(ceph: Any) -> None:
    ceph.put_object(Bucket="bucket", Key="swap.tar", Body=OBJECT)
    config = quick(connections=1, budget_bytes=256 * KIB, part_bytes=64 * KIB)
    with open_shards(["s3://bucket/swap.tar"], config=config) as reader:
        shard = next(iter(reader))
        got = io.BytesIO(shard.read())
        ceph.put_object(Bucket="bucket", Key="swap.tar", Body=data(1200 * KIB, seed=1))
        with pytest.raises(ObjectChanged, match="replaced"):
            list(iter(shard.read, None))
    assert OBJECT.startswith(got.getvalue())
