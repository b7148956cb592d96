"""Google Cloud Storage as a user has it: fake-gcs-server, and before it what it leaves out."""

from __future__ import annotations

import io
import json
import logging
import re
import socket
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.servers.fakegcs import FakeGcs, clean_google, fake_gcs
from tests.servers.gcemetadata import EMAIL, GceMetadata, gce_metadata
from tests.servers.gcsauth import GcsAuth, service_account_file
from tests.transfer.reading import KIB, MIB, bytes_of, data, outcomes, quick
from wds_async import logs
from wds_async.config import RetryPolicy
from wds_async.errors import AccessDenied, ConfigError, ObjectChanged, TransferError
from wds_async.storage.gcs import credentials as gcscredentials
from wds_async.storage.options import StorageOptions
from wds_async.transfer.reader import open_shards

__all__ = ["clean_google", "fake_gcs", "gce_metadata"]

Clean = pytest.MonkeyPatch


@pytest.fixture
def bucket(fake_gcs: FakeGcs, clean_google: Clean) -> str:
    clean_google.setenv("STORAGE_EMULATOR_HOST", fake_gcs.base)
    return fake_gcs.bucket("bucket")


@pytest.fixture
def guarded(fake_gcs: FakeGcs, gce_metadata: GceMetadata) -> Iterator[GcsAuth]:
    """A store that wants tokens of this machine's metadata server."""
    fake_gcs.bucket("bucket")
    with GcsAuth(fake_gcs.base, gce_metadata.good) as store:
        yield store


def _read(url: str, store: GcsAuth, config: Any = None, **options: Any) -> bytes:
    got, error = _outcome(url, store, config, **options)
    if error is not None:
        raise error
    return got


def _outcome(url: str, store: GcsAuth, config: Any = None, **options: Any) -> tuple[bytes, Any]:
    given = StorageOptions({"gs": {"endpoint_url": store.base, **options}})
    with open_shards([url], config=config or quick(), options=given) as reader:
        got, error = bytearray(), None
        for shard in reader:
            try:
                while (piece := shard.read()) is not None:
                    got += piece
            except wds.errors.WdsError as exn:
                error = exn
    return bytes(got), error


NAMES = [
    "a/b c#d?e%f.tar",
    "ä//ü ☃.tar",
    "/leading.tar",
    "x?generation=no",
    'q"&=+;:@,~.tar',
    "50%25.tar",
    "{x}[1].tar",
]


def test_a_proxy_is_used(guarded: GcsAuth, fake_gcs: FakeGcs, clean_google: Clean) -> None:
    content = data(300 * KIB)
    fake_gcs.put("bucket", "proxied.tar", content)
    clean_google.setenv("http_proxy", guarded.base)  # it forwards any URL's path to the server behind
    given = StorageOptions({"endpoint_url": "http://storage.example:80", "token": "cloud"})
    with open_shards(["gs://bucket/proxied.tar"], config=quick(), options=given) as reader:
        got = b"".join(bytes(piece) for shard in reader for piece in iter(shard.read, None))
    assert got == content
    assert all(path.startswith("http://storage.example") for path, _ in guarded.seen)


def test_generations(fake_gcs: FakeGcs, bucket: str) -> None:
    generation = fake_gcs.put(bucket, "v.tar", b"content")
    assert (
        bytes_of([f"gs://{bucket}/v.tar#{generation}", f"gs://{bucket}/v.tar?generation={generation}"])
        == [b"content"] * 2
    )
    fake_gcs.put(bucket, "v.tar", b"newer")
    ((_, error),) = outcomes([f"gs://{bucket}/v.tar#{generation}"])
    assert isinstance(error, ObjectChanged)
    assert generation in str(error)
    assert bytes_of([f"gs://{bucket}/v.tar"]) == [b"newer"]


def test_tokens_of_the_metadata_server(guarded: GcsAuth, gce_metadata: GceMetadata, fake_gcs: FakeGcs) -> None:
    content = data(2 * MIB)
    fake_gcs.put("bucket", "meta.tar", content)
    assert _read("gs://bucket/meta.tar", guarded) == content
    assert gce_metadata.token_requests == 1
    assert {token for _, token in guarded.seen} == {f"Bearer {gce_metadata.handed_out[0]}"}


@pytest.mark.parametrize("direct", [True, False])
def test_a_token_that_lapses_in_the_middle(
    guarded: GcsAuth, gce_metadata: GceMetadata, fake_gcs: FakeGcs, direct: bool
) -> None:
    """The token is refused from the sixth request on: another is fetched once, and no byte is lost."""
    content = data(3 * MIB)
    fake_gcs.put("bucket", "lapse.tar", content)

    def lapse(path: str, headers: Any) -> None:
        if len(guarded.seen) == 6:
            gce_metadata.expire()

    guarded.before = lapse
    assert _read("gs://bucket/lapse.tar", guarded, quick(direct=direct)) == content
    assert len(gce_metadata.handed_out) == 2
    if direct:
        refused = [path for path, token in guarded.seen[5:] if token.endswith(gce_metadata.handed_out[0])]
        assert gce_metadata.token_requests <= 1 + len(refused)


def test_tokens_are_renewed_before_they_expire(guarded: GcsAuth, gce_metadata: GceMetadata, fake_gcs: FakeGcs) -> None:
    """Each token is good for a second. The shard is read for longer than two, and nothing is refused."""
    gce_metadata.lifetime_s = 1.0
    content = data(12 * MIB)
    fake_gcs.put("bucket", "short.tar", content)
    given, got, refused = StorageOptions({"endpoint_url": guarded.base}), bytearray(), []
    guarded.good = lambda token: gce_metadata.good(token) or refused.append(token) is not None
    started = time.monotonic()
    with open_shards(["gs://bucket/short.tar"], config=quick(budget_bytes=2 * MIB), options=given) as reader:
        for shard in reader:
            while (piece := shard.read()) is not None:
                got += piece
                while time.monotonic() - started < 2.2 * len(got) / len(content):
                    time.sleep(0.005)
    assert bytes(got) == content
    assert len(gce_metadata.handed_out) >= 3
    assert refused == []


ONE_PART = {"part_bytes": MIB, "first_part_bytes": MIB}


def test_a_token_that_is_always_refused(guarded: GcsAuth, fake_gcs: FakeGcs) -> None:
    fake_gcs.put("bucket", "never.tar", b"x")
    guarded.good = lambda token: False
    _, error = _outcome("gs://bucket/never.tar", guarded, quick(**ONE_PART))
    assert isinstance(error, AccessDenied)
    assert f"metadata server, service account {EMAIL}" in str(error)
    assert len(guarded.seen) == 4  # and three times with what might have been a better token


def test_service_account(guarded: GcsAuth, fake_gcs: FakeGcs, clean_google: Clean, tmp_path: Path) -> None:
    content = data(700 * KIB)
    fake_gcs.put("bucket", "sa.tar", content)
    key_file = tmp_path / "key.json"
    guarded.key = service_account_file(key_file, f"{guarded.base}/token")
    guarded.good = lambda token: token == f"sa-marked-secret-{guarded.tokens_made}"
    clean_google.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key_file))
    assert _read("gs://bucket/sa.tar", guarded) == content
    assert _read("gs://bucket/sa.tar", guarded, quick(direct=False)) == content
    clean_google.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    assert _read("gs://bucket/sa.tar", guarded, token=str(key_file)) == content
    assert _read("gs://bucket/sa.tar", guarded, token=json.loads(key_file.read_text())) == content
    assert guarded.tokens_made == 4

    guarded.clock_off_s = 3600
    _, error = _outcome("gs://bucket/sa.tar", guarded, token=str(key_file))
    assert isinstance(error, AccessDenied)
    assert "clock is wrong" in str(error)
    assert "reader@p.iam.gserviceaccount.com" in str(error)
    guarded.clock_off_s = 0
    guarded.key = service_account_file(tmp_path / "other.json", "")
    _, error = _outcome("gs://bucket/sa.tar", guarded, token=str(key_file))
    assert isinstance(error, AccessDenied)
    assert "Invalid JWT Signature" in str(error)
    assert "PRIVATE" not in "".join(traceback.format_exception(error))


def test_a_key_file_that_is_rotated(guarded: GcsAuth, fake_gcs: FakeGcs, clean_google: Clean, tmp_path: Path) -> None:
    """After the first answer the store refuses the key's account; the file has another key by then."""
    content, path = data(700 * KIB), tmp_path / "key.json"
    fake_gcs.put("bucket", "rotated.tar", content)
    clean_google.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    guarded.key = service_account_file(path, f"{guarded.base}/token")
    refused = (403, "application/json", b'{"error": {"code": 403, "message": "Permission denied"}}')

    def good(token: str) -> bool:
        if guarded.tokens_made == 1 and len(guarded.seen) == 2:  # the token's request, and the first for bytes
            guarded.key = service_account_file(path, f"{guarded.base}/token")
            guarded.before = lambda path, headers: (
                refused if headers.get("Authorization") == f"Bearer {token}" else None
            )
        return True

    guarded.good = good
    config = quick(connections=1, part_bytes=64 * KIB, retry=RetryPolicy(refusal_timeout_s=20.0))
    assert _read("gs://bucket/rotated.tar", guarded, config) == content
    assert guarded.tokens_made == 2


def test_requester_pays(guarded: GcsAuth, fake_gcs: FakeGcs) -> None:
    fake_gcs.put("bucket", "pays.tar", b"paid")
    guarded.requester_pays.add("bucket")
    _, error = _outcome("gs://bucket/pays.tar", guarded)
    assert isinstance(error, AccessDenied)
    assert "requester_pays" in str(error)
    for direct in (True, False):
        assert _read("gs://bucket/pays.tar", guarded, quick(direct=direct), requester_pays="payer") == b"paid"
        assert _read("gs://bucket/pays.tar", guarded, quick(direct=direct), requester_pays=True) == b"paid"
    assert "userProject=project-of-tests" in guarded.seen[-1][0]
    assert _read("gs://bucket/pays.tar", guarded, requester_pays=True, project="mine") == b"paid"
    assert "userProject=mine" in guarded.seen[-1][0]


def test_requester_pays_without_a_project(bucket: str, fake_gcs: FakeGcs) -> None:
    given = StorageOptions({"requester_pays": True})
    with open_shards([f"gs://{bucket}/x.tar"], config=quick(), options=given) as reader:
        shard = next(iter(reader))
        with pytest.raises((ConfigError, TransferError), match="name the project"):
            shard.read()


@pytest.fixture
def silence() -> Iterator[str]:
    """An address that takes connections and never answers, as a firewall's or a captive portal's may."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_anonymous_within_three_seconds(
    fake_gcs: FakeGcs, clean_google: Clean, silence: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No metadata server that answers. It is said once, and a refusal says why."""
    clean_google.setattr(logs, "_process", logs.Once())
    clean_google.delenv("NO_GCE_CHECK")
    clean_google.setenv("GCE_METADATA_HOST", silence)
    fake_gcs.bucket("bucket")
    fake_gcs.put("bucket", "anonymous.tar", b"public")
    with GcsAuth(fake_gcs.base, lambda token: True) as store:
        started = time.monotonic()
        _, error = _outcome("gs://bucket/anonymous.tar", store)
        assert time.monotonic() - started > 1.9
        assert isinstance(error, AccessDenied)
        assert "no credentials were found, and the bucket refuses anonymous reads" in str(error)
        assert "Anonymous caller does not have storage.objects.get access" in str(error)
        assert "GOOGLE_APPLICATION_CREDENTIALS" in str(error)
        store.public = True
        started = time.monotonic()
        assert _read("gs://bucket/anonymous.tar", store) == b"public"
        assert _read("gs://bucket/anonymous.tar", store, quick(direct=False)) == b"public"
        assert silence in gcscredentials._silent_until  # it is remembered, and not waited for again
        assert all(token == "" for _, token in store.seen)
    told = [record for record in caplog.records if "anonymously" in record.message]
    assert len(told) == 1
    assert told[0].levelno == logging.WARNING


def test_throttling_and_faults_heal(guarded: GcsAuth, fake_gcs: FakeGcs) -> None:
    content = data(600 * KIB)
    fake_gcs.put("bucket", "busy.tar", content)
    answers = [guarded.refusal(429, "rateLimitExceeded", "The object exceeded the rate limit."),
               guarded.refusal(503, "backendError", "Backend Error")]  # fmt: skip
    # The second request or a later one, and the fourth or a later one: several may come at once.
    guarded.before = lambda path, headers: (
        answers.pop() if answers and len(guarded.seen) >= 6 - 2 * len(answers) else None
    )
    assert _read("gs://bucket/busy.tar", guarded) == content
    assert not answers


def test_reading_without_the_permission_to_list(guarded: GcsAuth, fake_gcs: FakeGcs) -> None:
    fake_gcs.put("bucket", "unlisted.tar", b"x")
    words = f"{EMAIL} does not have storage.objects.list access to the Google Cloud Storage bucket."
    guarded.before = lambda path, headers: guarded.refusal(403, "forbidden", words) if "/o?" in path else None
    for direct in (True, False):
        assert _read("gs://bucket/unlisted.tar", guarded, quick(direct=direct)) == b"x"


WRITE = """
import sys, warnings
import wds_async as wds
with wds.TarWriter(sys.argv[1] + "/one.tar") as sink:
    sink.write({"__key__": "a", "bin": b"x" * 100})
with wds.ShardWriter(sys.argv[1] + "/s-%02d.tar", maxcount=2, verbose=0) as sink:
    for i in range(5):
        sink.write({"__key__": f"{i:03d}", "cls": i, "bin": bytes(6_000_000) if i == 0 else b""})
with wds.gopen(sys.argv[1] + "/plain", "wb") as file:
    file.write(b"plain bytes")
try:
    with wds.TarWriter(sys.argv[1] + "/aborted.tar") as sink:
        sink.write({"__key__": "a", "bin": bytes(12_000_000)})
        raise RuntimeError("stop")
except RuntimeError:
    pass
sink = wds.TarWriter(sys.argv[1] + "/left-open.tar")
sink.write({"__key__": "a", "bin": bytes(12_000_000)})
"""


def test_writing(fake_gcs: FakeGcs, bucket: str) -> None:
    """In a process of its own, so that its exit is seen too: in time, and without a word."""
    large = "ignore:Sending a large body"  # aiohttp, of what gcsfs gives it
    command = [sys.executable, "-W", "error", "-W", large, "-c", WRITE, f"gs://{bucket}/written"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"gs://\S+ was never closed", done.stderr) == [
        f"gs://{bucket}/written/left-open.tar was never closed"
    ]
    assert done.stderr.count("\n") == 1
    names = [name for name in fake_gcs.keys(bucket) if name.startswith("written/")]
    assert names == [f"written/{name}" for name in ("one.tar", "plain", "s-00.tar", "s-01.tar", "s-02.tar")]
    with tarfile.open(fileobj=io.BytesIO(fake_gcs.get(bucket, "written/s-00.tar"))) as archive:
        assert [member.name for member in archive] == ["000.bin", "000.cls", "001.bin", "001.cls"]
    assert fake_gcs.get(bucket, "written/plain") == b"plain bytes"
    samples = list(wds.WebDataset(f"gs://{bucket}/written/s-{{00..02}}.tar", shardshuffle=False))
    assert [sample["__key__"] for sample in samples] == [f"{i:03d}" for i in range(5)]


def test_secrets_stay_secret(
    guarded: GcsAuth, gce_metadata: GceMetadata, fake_gcs: FakeGcs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    fake_gcs.put("bucket", "secret.tar", data(400 * KIB))
    _read("gs://bucket/secret.tar", guarded)
    _read("gs://bucket/secret.tar", guarded, quick(direct=False))
    guarded.good = lambda token: False
    _, error = _outcome("gs://bucket/secret.tar", guarded)
    shown = "".join(traceback.format_exception(error)) + repr(error) + caplog.text
    assert "secret.tar" in shown
    for token in gce_metadata.handed_out:
        assert token not in shown
