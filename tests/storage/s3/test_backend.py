"""The backend against a store that checks every signature: what is read, what is refused, and what is said then."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers import Origin, moto
from tests.servers import Tls as Authority
from tests.servers.awsmetadata import AwsMetadata
from tests.servers.sigv4 import Account, SignedStore
from tests.storage.locations import location_of
from tests.storage.s3.test_client import on_s3
from tests.transfer.reading import KIB, data, quick
from wds_async.config import RetryPolicy
from wds_async.errors import AccessDenied, ConfigError, ObjectChanged, TransferError, UrlError, WdsError
from wds_async.logs import Once
from wds_async.storage.base import Answer, Verdict
from wds_async.storage.options import StorageOptions
from wds_async.storage.s3 import backend as s3
from wds_async.storage.s3.backend import S3Backend
from wds_async.transfer.reader import open_shards

pytest.importorskip("s3fs")

clean_aws = moto.clean_aws
KEY, SECRET = "AKIAIOSFODNN7EXAMPLE", "hush-secret"
SHARD = data(1500 * KIB)


@pytest.fixture
def store(clean_aws: pytest.MonkeyPatch) -> Iterator[SignedStore]:
    """One object, one account, and the environment that fits."""
    with SignedStore() as running:
        running.objects["bucket", "x.tar"] = SHARD
        running.accounts[KEY] = Account(SECRET)
        clean_aws.setenv("AWS_ENDPOINT_URL_S3", running.base)
        clean_aws.setenv("AWS_ACCESS_KEY_ID", KEY)
        clean_aws.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        yield running


def read(*urls: str, config: Any = None, **options: Any) -> bytes:
    """The bytes of all; raises the first error."""
    got = bytearray()
    with open_shards(urls, config=config or quick(), options=StorageOptions(options)) as reader:
        for shard in reader:
            while (piece := shard.read()) is not None:
                got += piece
    return bytes(got)


def refusal(url: str = "s3://bucket/x.tar", **options: Any) -> WdsError:
    with pytest.raises(WdsError) as info:
        read(url, **options)
    assert "hush" not in f"{info.value!r} {info.value.__cause__!r}"
    return info.value


def test_parts_share_one_signature(store: SignedStore) -> None:
    assert read("s3://bucket/x.tar") == SHARD
    assert len(store.seen) > 3
    assert {seen.key for seen in store.seen} == {KEY}
    assert len({seen.headers["authorization"] for seen in store.seen}) == 1
    assert all(seen.headers["range"].startswith("bytes=") for seen in store.seen)
    assert any("if-match" in seen.headers for seen in store.seen)


def test_any_key(store: SignedStore) -> None:
    keys = ["a b+c", "100%", "%20", "#1?x=y&z", "ü", "/x", "a//b", "a/../b", "[a]*", "~'\"!"]
    for number, key in enumerate(keys):
        store.objects["bucket", key] = f"{number} ".encode()
    assert read(*(f"s3://bucket/{key}" for key in keys)).split() == [str(n).encode() for n in range(len(keys))]


@pytest.mark.parametrize(
    "options", [{}, {"s3_additional_kwargs": {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": "k" * 32}}]
)
def test_the_same_bytes_by_the_client_itself(store: SignedStore, options: dict[str, Any]) -> None:
    assert read("s3://bucket/x.tar", config=quick(direct=bool(options)), **options) == SHARD
    assert not any("wds-async" in seen.headers["user-agent"] for seen in store.seen)
    if options:
        assert "x-amz-server-side-encryption-customer-key" in store.seen[-1].headers


def test_a_proxy_is_the_clients_business(store: SignedStore, clean_aws: pytest.MonkeyPatch) -> None:
    clean_aws.setenv("http_proxy", "http://127.0.0.1:9")
    clean_aws.setenv("no_proxy", "")
    found = on_s3(lambda backend: backend.describe(location_of("s3://bucket/x.tar")))
    assert (found.direct, found.why) == (False, "a proxy is in the way")


@pytest.mark.parametrize("key", ["x.tar", "a b+c/ü#?%20 [1]*.tar"])
def test_a_store_that_answers_in_chunks(store: SignedStore, key: str) -> None:
    store.chunked, store.objects["bucket", key] = True, SHARD
    assert read(f"s3://bucket/{key}") == SHARD


@pytest.mark.parametrize("direct", [True, False])
def test_s3_express_by_its_sessions(store: SignedStore, direct: bool) -> None:
    store.objects["fast--use1-az4--x-s3", "x.tar"] = SHARD
    assert read("s3://fast--use1-az4--x-s3/x.tar", config=quick(direct=direct)) == SHARD
    sessions = [seen for seen in store.seen if seen.target.endswith("?session")]
    assert 1 <= len(sessions) <= 2
    assert {seen.key for seen in sessions} == {KEY}
    assert all(seen.key.startswith("ASIAEXPRESS") for seen in store.seen if seen not in sessions)


def test_versions_and_requester_pays(store: SignedStore) -> None:
    store.objects["bucket", "x.tar", "v/1"] = b"older"
    store.payer.add("bucket")
    assert "requester_pays" in str(refusal())
    assert read("s3://bucket/x.tar?versionId=v/1", requester_pays=True) == b"older"
    assert read("s3://bucket/x.tar?versionId=v/1", requester_pays=True, config=quick(direct=False)) == b"older"


@pytest.mark.parametrize("elsewhere", ["malformed", "redirect"])
def test_the_region_is_learnt_once(store: SignedStore, elsewhere: str, clean_aws: pytest.MonkeyPatch) -> None:
    store.elsewhere, store.regions["bucket"] = elsewhere, "eu-north-1"
    store.objects["bucket", "y.tar"] = b"other"
    clean_aws.setenv("AWS_DEFAULT_REGION", "us-west-2")
    assert read("s3://bucket/x.tar", "s3://bucket/y.tar", config=quick(connections=1)) == SHARD + b"other"
    refused = [seen for seen in store.seen if seen.status not in (200, 206)]
    assert 1 <= len(refused) <= 2
    assert "eu-north-1" in store.seen[-1].headers["authorization"]


@pytest.mark.parametrize("direct", [True, False])
def test_a_session_that_ends_while_a_shard_is_read(
    store: SignedStore, clean_aws: pytest.MonkeyPatch, direct: bool
) -> None:
    """Three requests and the token is refused; the part goes on with credentials that are fetched anew."""
    clean_aws.delenv("AWS_ACCESS_KEY_ID")
    clean_aws.delenv("AWS_SECRET_ACCESS_KEY")

    def issued(key: str, secret: str, token: str) -> None:
        store.accounts[key] = Account(secret, token, uses=3)

    with AwsMetadata(issued) as service:
        clean_aws.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{service.base}/container")
        clean_aws.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", service.container_token)
        assert read("s3://bucket/x.tar", config=quick(connections=1, direct=direct)) == SHARD
        good = [seen for seen in store.seen if seen.status == 206]
        keys = {seen.key for seen in good}
        assert len(keys) > 2
        assert len([seen for seen in store.seen if seen.status == 400]) == len(keys) - 1
        assert len(service.asked) == len(keys)
        asked_for_its_size = "bytes=0-0"
        spans = [seen.headers["range"] for seen in good if seen.headers["range"] != asked_for_its_size]
        assert len(set(spans)) == len(spans), "a part was read twice"


def test_a_session_that_is_over_for_good(store: SignedStore, clean_aws: pytest.MonkeyPatch) -> None:
    store.accounts[KEY] = Account(SECRET, "hush-token", uses=0)
    clean_aws.setenv("AWS_SESSION_TOKEN", "hush-token")
    error = refusal()
    assert isinstance(error, AccessDenied)
    assert "ExpiredToken" in str(error)
    assert "AKIA…MPLE (environment)" in str(error)
    assert "aws sso login" in str(error)
    assert len(store.seen) < 40


_OVER = Answer(400, {}, b"<Error><Code>ExpiredToken</Code><Message>says so</Message></Error>")


def test_what_a_former_session_is_told_is_not_held_against_the_next(
    store: SignedStore, clean_aws: pytest.MonkeyPatch
) -> None:
    """Requests for two shards are on their way when the session ends: all are refused, one after another."""

    async def run(backend: S3Backend) -> list[Verdict]:
        def refused(name: str) -> Verdict:
            return backend.classify(_OVER, location_of(f"s3://bucket/{name}")).verdict

        async def sign(*names: str) -> None:
            for name in names:
                await backend.access(location_of(f"s3://bucket/{name}"))

        clean_aws.setenv("AWS_SESSION_TOKEN", "hush-1")
        await sign("a", "b")
        told = [refused("a")]
        clean_aws.setenv("AWS_SESSION_TOKEN", "hush-2")
        await sign("a")
        told += [refused("b"), refused("a"), refused("a")]  # the next session signs "a" already
        for _ in range(3):
            await sign("a", "b")
            told += [refused("b"), refused("a")]
        clean_aws.setattr(s3, "_ON_THE_WAY_S", 0.0)  # they are all answered
        clean_aws.setenv("AWS_SESSION_TOKEN", "hush-3")
        await sign("a", "b")
        told += [refused("a"), refused("b")]
        await sign("b")
        return [*told, refused("b")]

    *told, last = on_s3(run)
    assert set(told) == {Verdict.EXPIRED}
    assert last is Verdict.DENIED  # it was found again, and refused again


def test_the_client_itself_waits_as_long_as_the_engine(clean_aws: pytest.MonkeyPatch, origin: Origin) -> None:
    origin.add("bucket/x.tar", SHARD)
    origin.behave(stall_after=0, times=1)
    clean_aws.setenv("AWS_ENDPOINT_URL_S3", origin.base)
    assert read("s3://bucket/x.tar", config=quick(direct=False, stall_timeout_s=0.2), key=KEY, secret=SECRET) == SHARD


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/"])
def test_a_bucket_is_no_shard(store: SignedStore, url: str) -> None:
    assert isinstance(refusal(url), UrlError)


def test_slow_down_is_waited_for(store: SignedStore) -> None:
    store.script = [(503, "SlowDown", {"Retry-After": "0"}), (500, "InternalError", {})]
    assert read("s3://bucket/x.tar") == SHARD
    store.script = [(503, "SlowDown", {})] * 40
    error = refusal()
    assert isinstance(error, TransferError)
    assert "SlowDown" in str(error)


def test_an_object_that_is_replaced(store: SignedStore) -> None:
    config = quick(connections=1, budget_bytes=256 * KIB, part_bytes=64 * KIB)
    with open_shards(["s3://bucket/x.tar"], config=config) as reader:
        shard = next(iter(reader))
        assert shard.read() is not None
        store.objects["bucket", "x.tar"] = data(1500 * KIB, seed=1)
        with pytest.raises(ObjectChanged, match="replaced"):
            list(iter(shard.read, None))


def test_without_credentials_public_buckets_are_read(
    store: SignedStore, clean_aws: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clean_aws.delenv("AWS_ACCESS_KEY_ID")
    clean_aws.delenv("AWS_SECRET_ACCESS_KEY")
    clean_aws.setattr("wds_async.logs._process", Once())
    store.public.add("bucket")
    store.objects["closed", "x"] = b"x"
    for direct in (True, False):
        assert read("s3://bucket/x.tar", config=quick(direct=direct)) == SHARD
    assert [r.levelno for r in caplog.records if "anonymously" in r.message] == [logging.WARNING]
    error = refusal("s3://closed/x")
    assert isinstance(error, AccessDenied)
    assert "no credentials were found" in str(error)
    assert "anonymous reads are refused" in str(error)
    assert "no credentials were found" not in str(refusal("s3://closed/x", anon=True))


def test_a_metadata_service_that_turned_us_away(store: SignedStore, clean_aws: pytest.MonkeyPatch) -> None:
    """Many workers ask at once, and some get no credentials: the first refusal is not the last word."""
    clean_aws.delenv("AWS_ACCESS_KEY_ID")
    clean_aws.delenv("AWS_SECRET_ACCESS_KEY")
    clean_aws.delenv("AWS_EC2_METADATA_DISABLED")
    with AwsMetadata(lambda key, secret, token: store.accounts.update({key: Account(secret, token)})) as service:
        clean_aws.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.base)
        service.busy = 1
        assert read("s3://bucket/x.tar") == SHARD
        assert service.asked == ["imds"]
        assert "" in {seen.key for seen in store.seen if seen.status == 403}


def test_fsspecs_own_configuration_counts(store: SignedStore, clean_aws: pytest.MonkeyPatch) -> None:
    import fsspec

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL_S3"):
        clean_aws.delenv(name)
    given = {"key": KEY, "secret": SECRET, "endpoint_url": store.base}
    clean_aws.setitem(fsspec.config.conf, "s3", given)
    assert read("s3://bucket/x.tar") == SHARD
    assert isinstance(refusal(secret="hush-other"), AccessDenied), "what the program says goes over it"


def test_tls_with_an_authority_of_ones_own(clean_aws: pytest.MonkeyPatch, tls: Authority) -> None:
    with SignedStore(tls.server_context()) as store:
        store.objects["bucket", "x.tar"] = SHARD
        store.accounts[KEY] = Account(SECRET)
        options: dict[str, Any] = {"key": KEY, "secret": SECRET, "endpoint_url": store.base}
        assert read("s3://bucket/x.tar", **options, client_kwargs={"verify": False}) == SHARD
        assert read("s3://bucket/x.tar", **options, client_kwargs={"verify": str(tls.ca)}) == SHARD
        assert "certificate" in str(refusal(**options))
        clean_aws.setenv("AWS_CA_BUNDLE", str(tls.ca))
        for direct in (True, False):
            assert read("s3://bucket/x.tar", config=quick(direct=direct), **options) == SHARD
        clean_aws.setenv("AWS_CA_BUNDLE", "/nowhere.pem")
        assert isinstance(refusal(**options), ConfigError)


def test_secrets_stay_inside(
    store: SignedStore, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every log of ours, also the finest, and every error; a part is refused, renewed and tried again meanwhile."""
    caplog.set_level(logging.DEBUG, logger="wds_async")
    store.accounts[KEY] = Account(SECRET, "hush-token", uses=2)
    options = {"key": KEY, "secret": SECRET, "token": "hush-token"}
    error = refusal(config=quick(connections=1), **options)
    out, err = capfd.readouterr()
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("wds_async")]
    assert ours
    everything = "\n".join([*ours, out, err, repr(error), repr(StorageOptions(options))])
    for secret in ("hush", "AWS4-HMAC", KEY):
        assert secret not in everything


def test_the_endpoints_password_is_not_shown(clean_aws: pytest.MonkeyPatch) -> None:
    clean_aws.setenv("AWS_ENDPOINT_URL_S3", "http://u:hush@127.0.0.1:1")
    clean_aws.setenv("AWS_ACCESS_KEY_ID", KEY)
    clean_aws.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    clean_aws.setenv("WDS_RETRIES", "1")
    assert "S3 at http://127.0.0.1:1: " in str(refusal())


def test_an_option_that_s3fs_does_not_take(store: SignedStore) -> None:
    error = refusal(s3={"key": KEY, "secret": SECRET, "nonsense": "hush"})
    assert isinstance(error, ConfigError)
    assert "storage_options" in str(error)
    assert "'nonsense'" in str(error)


@pytest.mark.parametrize("kept", ["", KEY])
def test_a_key_that_is_rotated_in_the_credentials_file(
    store: SignedStore, clean_aws: pytest.MonkeyPatch, tmp_path: Any, kept: str
) -> None:
    """The store answers InvalidAccessKeyId, or SignatureDoesNotMatch where only the secret is another (``kept``)."""
    new, new_secret = kept or "AKIANEWNEWNEWNEWNEWN", "hush-a-new-one" if kept else SECRET
    path = tmp_path / "credentials"
    clean_aws.delenv("AWS_ACCESS_KEY_ID")
    clean_aws.delenv("AWS_SECRET_ACCESS_KEY")
    clean_aws.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))

    def say(key: str, secret: str) -> None:
        path.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key={secret}\n")

    say(KEY, SECRET)
    config = quick(retry=RetryPolicy(refusal_timeout_s=20.0))
    store.objects["bucket", "y.tar"] = SHARD
    with open_shards(["s3://bucket/x.tar", "s3://bucket/y.tar"] * 4, config=config) as reader:
        got = []
        for number, shard in enumerate(reader):
            if number == 1:
                say(new, new_secret)
                store.accounts.clear()
                store.accounts[new] = Account(new_secret)
            data_read = bytearray()
            while (piece := shard.read()) is not None:
                data_read += piece
            got.append(bytes(data_read) == SHARD)
    assert got == [True] * 8
    store.accounts.clear()
    assert "InvalidAccessKeyId" in str(refusal())  # another look gives the same key: no more of them
