"""Other people's clients, and our own loader, read a real ``wds-async serve``: of Google's store, Amazon's and the web,
which emulators and a scripted server stand for."""

from __future__ import annotations

import concurrent.futures
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.servers import Origin
from tests.servers.fakegcs import FakeGcs, fake_gcs  # noqa: F401 - a fixture
from tests.servers.moto import CREDENTIALS, moto  # noqa: F401 - a fixture
from tests.servers.process import ServerMissing, required
from tests.servers.shards import make_tar
from tests.service.serving import Process, ask
from tests.transfer.reading import MIB, data

if os.environ.get("WDS_REQUIRE_SERVERS") == "1":
    import aistore.sdk
    import s3fs
else:
    aistore = pytest.importorskip("aistore", reason="pip install aistore")
    s3fs = pytest.importorskip("s3fs")

BUCKET = "wds-service-clients"
SAMPLES = 12
LARGE = data(9 * MIB + 77)
NAMES = [f"train-{n}.tar" for n in range(3)]


def members(shard: int) -> list[tuple[str, bytes]]:
    return [
        (f"{shard}{n:03}.{ext}", data(size, n)) for n in range(SAMPLES) for ext, size in (("bin", 20_000), ("cls", 3))
    ]


SHARDS = {name: make_tar(members(n)) for n, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def web() -> Iterator[Origin]:
    with Origin({f"/d/{name}": body for name, body in SHARDS.items()}) as running:
        yield running


@pytest.fixture(scope="module")
def service(
    fake_gcs: FakeGcs,  # noqa: F811
    moto: str,  # noqa: F811
    web: Origin,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Process]:
    fake_gcs.bucket(BUCKET)
    for name, body in [*SHARDS.items(), ("deep/large.bin", LARGE)]:
        fake_gcs.put(BUCKET, name, body)
    put_in_moto(moto)
    folder = tmp_path_factory.mktemp("service")
    environ = {
        **{
            name: None for name in os.environ if name.startswith(("AIS_", "AWS_", "GOOGLE_")) or "proxy" in name.lower()
        },
        **CREDENTIALS,
        "STORAGE_EMULATOR_HOST": fake_gcs.base,
        "AWS_ENDPOINT_URL_S3": moto,
        "AWS_DEFAULT_REGION": "us-east-1",
        "HOME": str(folder),
    }
    allow = (f"gs://{BUCKET}/", f"s3://{BUCKET}/", "s3://versioned/", f"{web.base}/")
    given: dict[str, Any] = {"allow": allow, "buckets": {"web": f"{web.base}/d/"}, "private": True}
    with Process(folder, environ=environ, folder=folder / "cache", socket=folder / "socket", **given) as running:
        yield running


def put_in_moto(base: str) -> None:
    for path, body in [("", b""), *((f"/{name}", body) for name, body in SHARDS.items())]:
        assert ask(f"{base}/{BUCKET}{path}", "PUT", body)[0] == 200


# -- AIStore's own --------------------------------------------------------------------------------------------


@pytest.fixture
def client(service: Process) -> Iterator[Any]:
    made = aistore.sdk.Client(service.base)
    yield made
    made._request_client.session_manager.session.close()


def test_aistores_client_reads(client: Any) -> None:
    from aistore.sdk.archive_config import ArchiveConfig

    bucket = client.bucket(BUCKET, provider="gcp")
    large = bucket.object("deep/large.bin")
    assert large.get_reader().read_all() == LARGE
    assert large.get_reader(byte_range="bytes=-9").read_all() == LARGE[-9:]
    assert large.get_reader(direct=True).read_all() == LARGE  # by the cluster's map
    props = large.head()
    assert (props.size, props.checksum_type) == (len(LARGE), "crc32c")
    name, content = members(1)[4]
    assert bucket.object(NAMES[1]).get_reader(archive_config=ArchiveConfig(archpath=name)).read_all() == content
    assert client.bucket(BUCKET, provider="aws").object(NAMES[2]).get_reader().read_all() == SHARDS[NAMES[2]]
    assert client.bucket("web").object(NAMES[0]).get_reader().read_all() == SHARDS[NAMES[0]]


def test_aistores_client_lists(client: Any) -> None:
    bucket = client.bucket(BUCKET, provider="gcp")
    found = {entry.name: entry.size for entry in bucket.list_objects_iter(page_size=2)}
    assert found == {**{name: len(body) for name, body in SHARDS.items()}, "deep/large.bin": len(LARGE)}
    assert [entry.name for entry in bucket.list_all_objects(prefix="deep/")] == ["deep/large.bin"]
    assert [b.name for b in client.cluster().list_buckets(provider="gcp")] == [BUCKET]
    assert client.cluster().is_ready()


def test_aistores_client_knows_its_errors(client: Any) -> None:
    errors = aistore.sdk.errors
    with pytest.raises(errors.ErrObjNotFound):
        client.bucket(BUCKET, provider="gcp").object("nope").get_reader().read_all()
    with pytest.raises(errors.AISError) as caught:
        client.bucket(BUCKET, provider="gcp").object(NAMES[0]).delete()
    assert caught.value.status_code == 405


# -- WebDataset ------------------------------------------------------------------------------------------------


def run(script: str, **environ: str) -> Any:
    """What a program prints, as JSON."""
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**kept, **environ}, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def test_stock_webdataset_reads_by_rewriting(service: Process) -> None:
    pytest.importorskip("webdataset")
    have_curl()
    script = f"""
import hashlib, json, webdataset as wds
data = wds.WebDataset("gs://{BUCKET}/train-{{0..2}}.tar", shardshuffle=False)
print(json.dumps([[s["__key__"], hashlib.md5(s["bin"]).hexdigest()] for s in data]))
"""
    got = run(script, GOPEN_REWRITE=f"gs://={service.base}/gs/")
    import hashlib

    expected = [
        [name.removesuffix(".bin"), hashlib.md5(content).hexdigest()]
        for shard in range(3)
        for name, content in members(shard)
        if name.endswith(".bin")
    ]
    assert got == expected


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        if name.startswith(("AIS_", "WDS_", "GOPEN_")) or name in ("USE_AIS_FOR",) or "proxy" in name.lower():
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_our_loader_reads_the_same_as_without_it(
    service: Process, nothing_set: pytest.MonkeyPatch, web: Origin, scheme: str
) -> None:
    def samples(url: str) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in sample.items() if not name.startswith("__url")}
            for sample in wds.WebDataset(url, shardshuffle=False, empty_check=False)
        ]

    direct = samples(f"{web.base}/d/train-{{0..2}}.tar")
    assert len(direct) == 3 * SAMPLES
    nothing_set.setenv("AIS_ENDPOINT", service.base)
    nothing_set.setenv("USE_AIS_FOR", "gs:s3")
    for _ in range(2):  # cold and warm
        assert samples(f"{scheme}://{BUCKET}/train-{{0..2}}.tar") == direct
    assert samples("ais://web/train-{0..2}.tar") == direct


def test_aistores_client_hears_that_there_are_no_batches(client: Any) -> None:
    bucket = client.bucket(BUCKET, provider="gcp")
    with pytest.raises(Exception, match=r"501.*GetBatch"):
        list(client.batch([NAMES[0], NAMES[1]], bucket=bucket).get())


# -- others ----------------------------------------------------------------------------------------------------


def test_s3fs_reads_below_s3(service: Process) -> None:
    fs = s3fs.S3FileSystem(
        key="anybody", secret="x", endpoint_url=f"{service.base}/s3", client_kwargs={"region_name": "us-east-1"},
        skip_instance_cache=True,
    )  # fmt: skip
    assert sorted(fs.ls(BUCKET)) == [f"{BUCKET}/{name}" for name in NAMES]
    assert fs.cat_file(f"{BUCKET}/{NAMES[0]}") == SHARDS[NAMES[0]]
    assert fs.cat_file(f"{BUCKET}/{NAMES[0]}", start=512, end=1024) == SHARDS[NAMES[0]][512:1024]
    assert fs.info(f"{BUCKET}/{NAMES[1]}")["size"] == len(SHARDS[NAMES[1]])
    assert fs.glob(f"{BUCKET}/train-*.tar") == [f"{BUCKET}/{name}" for name in NAMES]
    with fs.open(f"web/{NAMES[2]}", block_size=100_000) as file:
        assert file.read() == SHARDS[NAMES[2]]
    with pytest.raises(FileNotFoundError):
        fs.cat_file(f"{BUCKET}/nope")


def test_boto3_reads_below_s3(service: Process, moto: str) -> None:  # noqa: F811
    import boto3  # comes with moto
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config
    from botocore.exceptions import ClientError

    def s3(endpoint: str) -> Any:
        return boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="anybody",
                            aws_secret_access_key="x", config=Config(s3={"addressing_style": "path"}))  # fmt: skip

    store, client = s3(moto), s3(f"{service.base}/s3")
    store.create_bucket(Bucket="versioned")
    store.put_bucket_versioning(Bucket="versioned", VersioningConfiguration={"Status": "Enabled"})
    versions = [store.put_object(Bucket="versioned", Key="x", Body=body)["VersionId"] for body in (b"first", b"second")]
    for version, body in [(None, b"second"), *zip(versions, (b"first", b"second"), strict=True)]:
        which = {} if version is None else {"VersionId": version}
        assert client.get_object(Bucket="versioned", Key="x", **which)["Body"].read() == body
    name = {"Bucket": BUCKET, "Key": NAMES[0]}
    assert client.get_object(**name, ResponseContentType="text/plain")["Body"].read() == SHARDS[NAMES[0]]
    assert client.get_object(**name, ChecksumMode="ENABLED", VersionId="null")["Body"].read() == SHARDS[NAMES[0]]
    assert client.head_object(**name)["ContentLength"] == len(SHARDS[NAMES[0]])
    url = client.generate_presigned_url("get_object", {**name, "ResponseContentDisposition": "attachment"})
    assert ask(url)[::2] == (200, SHARDS[NAMES[0]])
    whole = io.BytesIO()
    client.download_fileobj(BUCKET, NAMES[0], whole, Config=TransferConfig(4096, multipart_chunksize=4096))
    assert whole.getvalue() == SHARDS[NAMES[0]]
    for call, more in [
        (client.get_object_tagging, {}),
        (client.get_object_acl, {}),
        (client.get_object_attributes, {"ObjectAttributes": ["ETag"]}),
        (client.get_object_torrent, {}),
        (client.get_object, {"PartNumber": 1}),
        (client.create_multipart_upload, {}),
        (client.delete_object_tagging, {}),
        (client.put_object_tagging, {"Tagging": {"TagSet": []}}),
    ]:
        with pytest.raises(ClientError) as caught:
            call(**name, **more)
        assert caught.value.response["Error"]["Code"] == "NotImplemented", call
    with pytest.raises(ClientError, match="501"):
        client.head_object(**name, PartNumber=1)
    with pytest.raises(ClientError, match="MethodNotAllowed"):
        client.put_object(**name, Body=b"x")


def have_curl() -> None:
    with required():
        if shutil.which("curl") is None:
            raise ServerMissing("curl is not here: apt-get install curl")


def curl(*arguments: str) -> bytes:
    have_curl()
    done = subprocess.run(["curl", "-sS", "--noproxy", "*", *arguments], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_curl(service: Process, tmp_path: Path) -> None:
    url = f"{service.base}/gs/{BUCKET}/deep/large.bin"
    assert b"Content-Length: %d" % len(LARGE) in curl("-I", url)
    assert curl("-r", "100-199", url) == LARGE[100:200]
    half = tmp_path / "half"
    half.write_bytes(LARGE[: 4 * MIB + 1])
    curl("-C", "-", "-o", str(half), url)
    assert half.read_bytes() == LARGE
    assert (
        curl("--unix-socket", service.addresses[1].removeprefix("unix:"), f"http://x/gs/{BUCKET}/{NAMES[0]}")
        == (SHARDS[NAMES[0]])
    )
    assert curl("-f", f"{service.base}/readyz", f"{service.base}/metrics").startswith(b"ready\n")


def test_sixteen_clients_cost_one_fetch(service: Process, web: Origin) -> None:
    body = data(12 * MIB, 16)
    web.add("/d/once.bin", body)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        got = list(pool.map(lambda _: ask(f"{service.base}/ais/web/once.bin")[2] == body, range(16)))
    assert all(got)
    fetched = sum(sent.body_bytes for sent in web.sent if sent.request.path == "/d/once.bin")
    assert len(body) <= fetched <= 1.02 * len(body)
