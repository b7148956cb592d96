"""Bad input on every store: what can be wrong × how it is read, listed or written; read by direct requests and not.

Each cell is an error that says which URL, which store, who asked, what the store said and what to set, and says it at
once. The words are the same for both ways, so direct requests and the fallback say the same thing.
"""

# ruff: noqa: F811 - fixtures that are imported

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.clouds.ais import no_settings  # noqa: F401 - fixture
from tests.servers import Origin, Tls
from tests.servers import moto as moto_server
from tests.servers import radosgw as rados
from tests.servers.aistore import AisDouble
from tests.servers.azurite import ACCOUNT, azure_environment_fixture, azurite_fixture  # noqa: F401 - fixtures
from tests.servers.fakegcs import FakeGcs, clean_google, fake_gcs  # noqa: F401 - fixtures
from tests.servers.gcsauth import GcsAuth, service_account_file
from tests.servers.hub import Hub, Repo
from tests.servers.nginx import free_port
from tests.servers.shards import make_tar
from tests.servers.sigv4 import Account, SignedStore
from wds_async.errors import AccessDenied, ConfigError, ShardNotFound, TransferError, WdsError
from wds_async.storage.listing.folders import forget

clean_aws, radosgw = moto_server.clean_aws, rados.radosgw

SHARD = make_tar([("a.txt", b"text")])
SECRET = "HuShHuSh"
READS = ("samples", "bytes")
EVERY = (*READS, "listing", "writing")
Kind = type[WdsError]


class World:
    """What a case sets up: servers, started when they are first named, and the environment."""

    def __init__(self, request: pytest.FixtureRequest, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.fixture = request.getfixturevalue
        self.patch, self.folder = patch, folder
        self._open = contextlib.ExitStack()

    def run(self, server: Any) -> Any:
        """``server``, running until the test is over."""
        return self._open.enter_context(server)

    def set(self, **variables: str) -> None:
        for name, value in variables.items():
            self.patch.setenv(name, value)

    def close(self) -> None:
        self._open.close()

    # Each returns storage_options.

    def ceph(self, key: str = rados.KEY, secret: str = rados.SECRET) -> dict[str, Any]:
        gateway = self.fixture("radosgw")
        self.set(AWS_ENDPOINT_URL_S3=gateway.base)
        if key:
            self.set(AWS_ACCESS_KEY_ID=key, AWS_SECRET_ACCESS_KEY=secret)
        return {}

    def signed(self, **account: Any) -> SignedStore:
        """A store whose account is `rados.KEY`'s, which the environment has."""
        store: SignedStore = self.run(SignedStore())
        store.objects["bucket", "x.tar"] = SHARD
        store.accounts[rados.KEY] = Account(rados.SECRET, **account)
        self.set(AWS_ENDPOINT_URL_S3=store.base, AWS_ACCESS_KEY_ID=rados.KEY, AWS_SECRET_ACCESS_KEY=rados.SECRET)
        if "token" in account:
            self.set(AWS_SESSION_TOKEN=account["token"])
        return store

    def google(self, **options: Any) -> tuple[GcsAuth, dict[str, Any]]:
        server: FakeGcs = self.fixture("fake_gcs")
        server.bucket("bucket")
        server.put("bucket", "x.tar", SHARD)
        store: GcsAuth = self.run(GcsAuth(server.base, lambda token: token == "ya29.good" + SECRET))
        return store, {"gs": {"endpoint_url": store.base, **options}}

    def azure(self, **options: Any) -> dict[str, Any]:
        server = self.fixture("azurite")
        server.put("private", {"x.tar": SHARD})
        return {"az": {"account_name": ACCOUNT, "account_host": server.endpoint, **options}}

    def hub(self, token: str = "") -> Hub:
        hub: Hub = self.run(Hub())
        self.set(HF_ENDPOINT=hub.url, HF_HOME=str(self.folder / "hf"))
        hub.add("x.tar", SHARD)
        if token:
            self.set(HF_TOKEN=token)
        return hub

    def cluster(self, token: str = "") -> AisDouble:
        double: AisDouble = self.run(AisDouble())
        double.put("ais/bucket/x.tar", SHARD)
        self.set(AIS_ENDPOINT=double.endpoint)
        if token:
            self.set(AIS_AUTHN_TOKEN=token)
        return double

    def web(self, **options: Any) -> tuple[Origin, dict[str, Any]]:
        tls: Tls = self.fixture("tls")
        self.set(SSL_CERT_FILE=str(tls.ca))
        origin = self.run(Origin({"/x.tar": SHARD}, tls=tls.server_context()))
        return origin, {"https": options} if options else {}


@dataclass(frozen=True)
class Case:
    """``words`` are in every message: store, identity, what it said, what to set. ``more`` are by way."""

    name: str
    url: str
    kind: Kind
    words: tuple[str, ...]
    arrange: Callable[[World], Any]
    ways: tuple[str, ...] = EVERY
    more: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def store(self) -> str:
        return self.name.partition(" ")[0]


# -- S3 -----------------------------------------------------------------------------------------------------------


def expired(world: World) -> None:
    world.signed(token="hush-token", uses=0)


def wrong_region(world: World) -> None:
    """Redirected without a word about where to."""
    world.signed().script += [(301, "PermanentRedirect", {})] * 100


def skewed(world: World) -> None:
    world.signed().ahead_s = 4000


def payer(world: World) -> None:
    world.signed().payer.add("bucket")


def only_reads(world: World) -> None:
    """Everybody may read the objects, and nobody else than their owner list them."""
    import boto3

    gateway = world.fixture("radosgw")
    owner = boto3.client("s3", endpoint_url=gateway.base, aws_access_key_id=rados.KEY,
                         aws_secret_access_key=rados.SECRET, region_name="us-east-1")  # fmt: skip
    owner.create_bucket(Bucket="readable")
    owner.put_object(Bucket="readable", Key="x.tar", Body=SHARD)
    statement = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::readable/*"}
    owner.put_bucket_policy(Bucket="readable", Policy=json.dumps({"Version": "2012-10-17", "Statement": [statement]}))
    world.ceph("")


def private(world: World, *credentials: str) -> None:
    import boto3

    gateway = world.fixture("radosgw")
    boto3.client("s3", endpoint_url=gateway.base, aws_access_key_id=rados.KEY, aws_secret_access_key=rados.SECRET,
                 region_name="us-east-1").create_bucket(Bucket="private")  # fmt: skip
    world.ceph(*credentials)


def s3_at(address: Callable[[World], str]) -> Callable[[World], None]:
    def arrange(world: World) -> None:
        world.set(AWS_ENDPOINT_URL_S3=address(world), AWS_ACCESS_KEY_ID=rados.KEY, AWS_SECRET_ACCESS_KEY=SECRET)

    return arrange


def refusing(world: World) -> str:
    return f"http://127.0.0.1:{free_port()}"


WHO_S3 = "access key AKIA…DOS1 (environment)"
S3 = [
    Case("s3 no credentials", "s3://private/x.tar", AccessDenied,
         ("S3", "no credentials were found", "403", "AWS_ACCESS_KEY_ID"), lambda world: private(world, ""),
         more={"writing": ("S3", "credentials", "AWS_ACCESS_KEY_ID")}),
    Case("s3 wrong key", "s3://private/x.tar", AccessDenied,
         ("S3", "AKIA…BODY (environment)", "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
         lambda world: private(world, "AKIANOBODYNOBODYBODY", SECRET),
         more={"writing": ("S3", "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID")}),
    Case("s3 wrong secret", "s3://private/x.tar", AccessDenied,
         ("S3", WHO_S3, "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"),
         lambda world: private(world, rados.KEY, SECRET),
         more={"writing": ("S3", "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY")}),
    Case("s3 unknown profile", "s3://private/x.tar", AccessDenied, ("S3", "nobody-here", "AWS_PROFILE"),
         lambda world: world.set(AWS_PROFILE="nobody-here")),
    Case("s3 expired token", "s3://bucket/x.tar", AccessDenied,
         ("S3", WHO_S3, "ExpiredToken", "aws sso login"), expired, ways=(*READS, "listing")),
    Case("s3 wrong region", "s3://bucket/x.tar", TransferError, ("S3", "301", "PermanentRedirect", "AWS_REGION"),
         wrong_region, ways=(*READS, "listing")),
    Case("s3 clock", "s3://bucket/x.tar", AccessDenied, ("S3", WHO_S3, "RequestTimeTooSkewed", "clock (NTP)"),
         skewed, ways=(*READS, "listing")),
    Case("s3 requester pays", "s3://bucket/x.tar", AccessDenied,
         ("S3", WHO_S3, "AccessDenied", "requester_pays"), payer,
         ways=(*READS, "listing"), more={"listing": ("S3", WHO_S3, "AccessDenied", "s3:ListBucket", "requester_pays")}),
    Case("s3 missing bucket", "s3://nobucket/x.tar", ShardNotFound, ("S3", "NoSuchBucket", "bucket's name"),
         World.ceph, more={"writing": ("bucket", "make it first")}),
    Case("s3 missing key", "s3://private/none.tar", ShardNotFound, ("S3", "NoSuchKey", "Check the key"),
         private, ways=READS),
    Case("s3 may read but not list", "s3://readable/x.tar", AccessDenied, ("S3", "403", "braces"),
         only_reads, ways=("listing",)),
    Case("s3 refused connection", "s3://bucket/x.tar", TransferError, ("S3", "127.0.0.1", "AWS_ENDPOINT_URL_S3"),
         s3_at(refusing), ways=(*READS, "listing")),
]  # fmt: skip

# -- Google Cloud Storage -----------------------------------------------------------------------------------------


def google(**options: Any) -> Callable[[World], Any]:
    return lambda world: world.google(**options)[1]


def key_file(clock_off_s: int = 0, revoked: bool = False) -> Callable[[World], Any]:
    def arrange(world: World) -> Any:
        store, options = world.google()
        path = world.folder / "key.json"
        store.key = service_account_file(path, f"{store.base}/token")
        if revoked:
            store.key = service_account_file(world.folder / "other.json", f"{store.base}/token")
        store.clock_off_s = clock_off_s
        store.good = lambda token: token.startswith("sa-")
        world.set(GOOGLE_APPLICATION_CREDENTIALS=str(path))
        return options

    return arrange


def refused(words: str, status: int = 403, reason: str = "forbidden") -> Callable[[World], Any]:
    """Refuses in Google's words, of which the emulator has none."""

    def arrange(world: World) -> Any:
        store, options = world.google(token="ya29.good" + SECRET)
        store.before = lambda path, headers: store.refusal(status, reason, words)
        return options

    return arrange


def missing(words: str) -> Callable[[World], Any]:
    return refused(words, 404, "notFound")


def google_payer(world: World) -> Any:
    store, options = world.google(token="ya29.good" + SECRET)
    store.requester_pays.add("bucket")
    return options


def google_at(address: Callable[[World], str]) -> Callable[[World], Any]:
    return lambda world: {"gs": {"endpoint_url": address(world), "token": "anon"}}


GIVEN_GS = "access token (storage_options)"
GCS_NAME = "Google Cloud Storage"
GS = [
    Case("gs no credentials", "gs://bucket/x.tar", AccessDenied,
         (GCS_NAME, "no credentials were found", "401", "GOOGLE_APPLICATION_CREDENTIALS"), google(),
         ways=(*READS, "listing")),
    Case("gs wrong token", "gs://bucket/x.tar", AccessDenied,
         (GCS_NAME, GIVEN_GS, "401", "Invalid Credentials", "gcloud auth"), google(token="ya29." + SECRET),
         ways=(*READS, "listing")),
    Case("gs no such key file", "gs://bucket/x.tar", AccessDenied,
         ("GOOGLE_APPLICATION_CREDENTIALS", "No such file"),
         lambda world: world.set(GOOGLE_APPLICATION_CREDENTIALS="/nowhere/key.json")),
    Case("gs revoked key", "gs://bucket/x.tar", AccessDenied,
         ("reader@p.iam.gserviceaccount.com", "invalid_grant", "gcloud auth"), key_file(revoked=True),
         ways=(*READS, "listing")),
    Case("gs clock", "gs://bucket/x.tar", AccessDenied,
         ("reader@p.iam.gserviceaccount.com", "invalid_grant", "clock is wrong"), key_file(clock_off_s=4000),
         ways=(*READS, "listing")),
    Case("gs no permission", "gs://bucket/x.tar", AccessDenied,
         (GCS_NAME, GIVEN_GS, "403", "storage.objects.get", "roles/storage.objectViewer"),
         refused("x@y does not have storage.objects.get access to the object."), ways=READS),
    Case("gs may read but not list", "gs://bucket/x.tar", AccessDenied,
         (GCS_NAME, GIVEN_GS, "403", "storage.objects.list", "braces"),
         refused("x@y does not have storage.objects.list access to the bucket."), ways=("listing",)),
    Case("gs requester pays", "gs://bucket/x.tar", AccessDenied, (GCS_NAME, GIVEN_GS, "400", "requester_pays"),
         google_payer, ways=(*READS, "listing")),
    Case("gs missing bucket", "gs://nobucket/x.tar", ShardNotFound,
         (GCS_NAME, GIVEN_GS, "404", "specified bucket does not exist", "Check the bucket's name"),
         missing("The specified bucket does not exist."), ways=(*READS, "listing")),
    Case("gs missing key", "gs://bucket/none.tar", ShardNotFound,
         (GCS_NAME, GIVEN_GS, "404", "No such object", "Check its name"),
         missing("No such object: bucket/none.tar"), ways=READS),
    Case("gs refused connection", "gs://bucket/x.tar", TransferError,
         (GCS_NAME, "127.0.0.1", "refused", "STORAGE_EMULATOR_HOST"), google_at(refusing),
         ways=(*READS, "listing")),
]  # fmt: skip

# -- Azure --------------------------------------------------------------------------------------------------------


def signature(stop_s: float = 3600, permission: str = "r") -> str:
    from tests.clouds.test_azure import signature as sign

    return sign("private", permission=permission, start_s=-7200, stop_s=stop_s)


def azure(**options: Any) -> Callable[[World], Any]:
    def arrange(world: World) -> Any:
        return world.azure(**{name: each() if callable(each) else each for name, each in options.items()})

    return arrange


def azure_clock(world: World) -> Any:
    """Azure says what time it is there."""
    origin = world.run(Origin())
    body = (
        b"<Error><Code>AuthenticationFailed</Code><Message>Server failed to authenticate the request.</Message></Error>"
    )
    origin.behave(status=403, body=body, headers={"Date": "Fri, 20 Nov 2020 00:00:00 GMT",
                                                  "x-ms-error-code": "AuthenticationFailed"})  # fmt: skip
    return {"az": {"account_name": "acct", "account_host": f"{origin.base}/acct", "account_key": "bm8ga2V5"}}


def azure_at(address: Callable[[World], str]) -> Callable[[World], Any]:
    return lambda world: {
        "az": {"account_name": "acct", "account_host": f"{address(world)}/acct", "account_key": "bm8ga2V5"}
    }


AZ = [
    Case("az no account", "az://private/x.tar", ConfigError, ("AZURE_STORAGE_ACCOUNT_NAME",), lambda world: {}),
    Case("az no credentials", "az://private/x.tar", AccessDenied, ("Azure", "anonymous", "AZURE_STORAGE_ACCOUNT_KEY"),
         azure(anon=True), ways=(*READS, "listing")),
    Case("az wrong key", "az://private/x.tar", AccessDenied,
         ("Azure", f"account key of {ACCOUNT}", "403", "AZURE_STORAGE_ACCOUNT_KEY"), azure(account_key="bm8ga2V5")),
    Case("az expired signature", "az://private/x.tar", AccessDenied,
         ("Azure", "shared access signature (valid from", "403", "AZURE_STORAGE_SAS_TOKEN"),
         azure(sas_token=lambda: signature(-3600))),
    Case("az clock", "az://private/x.tar", AccessDenied,
         ("Azure", "account key of acct", "403", "clock is"), azure_clock, ways=(*READS, "listing")),
    Case("az may read but not list", "az://private/x.tar", AccessDenied,
         ("Azure", "shared access signature", "403", "braces"), azure(sas_token=signature), ways=("listing",)),
    Case("az missing container", "az://nocontainer/x.tar", ShardNotFound,
         ("Azure", f"account key of {ACCOUNT}", "404", "container's name"),
         lambda world: world.azure(account_key=azurite_key()), more={"writing": ("Azure", "404", "container's name")}),
    Case("az missing blob", "az://private/none.tar", ShardNotFound,
         ("Azure", f"account key of {ACCOUNT}", "404", "blob's name"),
         lambda world: world.azure(account_key=azurite_key()), ways=READS),
    Case("az refused connection", "az://private/x.tar", TransferError,
         ("Azure", "127.0.0.1", "refused", "AZURE_STORAGE_ACCOUNT_NAME"), azure_at(refusing), ways=(*READS, "listing")),
]  # fmt: skip


def azurite_key() -> str:
    from tests.servers.azurite import KEY

    return KEY


# -- Hugging Face -------------------------------------------------------------------------------------------------


def hub(token: str = "", **repo: Any) -> Callable[[World], None]:
    def arrange(world: World) -> None:
        double = world.hub(token)
        double.tokens = {"hf_known" + SECRET}
        double.repos["datasets", "o/n"] = Repo({"main": {"x.tar": SHARD}}, **repo)

    return arrange


KNOWN_HF = "hf_known" + SECRET
HF = [
    Case("hf no token", "hf://datasets/o/n/x.tar", AccessDenied, ("hub", "no credentials", "401", "HF_TOKEN"),
         hub(private=True), ways=(*READS, "listing")),
    Case("hf wrong token", "hf://datasets/o/n/x.tar", AccessDenied, ("hub", "token of HF_TOKEN", "401", "Renew"),
         hub("hf_" + SECRET), ways=(*READS, "listing")),
    Case("hf gated", "hf://datasets/o/n/x.tar", AccessDenied,
         ("gated", "token of HF_TOKEN", "Accept its terms at http://"), hub(KNOWN_HF, gated=True), ways=READS),
    Case("hf missing repository", "hf://datasets/o/none/x.tar", ShardNotFound,
         ("hub", "token of HF_TOKEN", "Repository not found", "Check the name"), hub(KNOWN_HF),
         ways=(*READS, "listing")),
    Case("hf missing revision", "hf://datasets/o/n@v9/x.tar", ShardNotFound,
         ("o/n", "'v9'", "Invalid rev id", "Check what follows the @"), hub(KNOWN_HF), ways=(*READS, "listing")),
    Case("hf missing file", "hf://datasets/o/n/none.tar", ShardNotFound,
         ("o/n", "'none.tar'", "Entry not found", "Check the path"), hub(KNOWN_HF), ways=READS),
    Case("hf refused connection", "hf://datasets/o/n/x.tar", TransferError,
         ("Hugging Face hub", "127.0.0.1", "refused", "HF_ENDPOINT"),
         lambda world: world.set(HF_ENDPOINT=refusing(world)), ways=(*READS, "listing")),
]  # fmt: skip

# -- AIStore ------------------------------------------------------------------------------------------------------


def cluster(wants: str = "", token: str = "") -> Callable[[World], None]:
    def arrange(world: World) -> None:
        world.cluster(token).token = wants

    return arrange


def token_file(world: World) -> None:
    world.cluster().token = "right"
    path = world.folder / "token.json"
    path.write_text(json.dumps({"token": SECRET}))
    world.set(AIS_AUTHN_TOKEN_FILE=str(path))


def forbidden(world: World) -> None:
    double = world.cluster(SECRET)
    for method in ("GET", "PUT"):
        double.script("proxy", status=403, method=method, times=99, message="permission denied: ais://bucket")


AIS = [
    Case("ais no endpoint", "ais://bucket/x.tar", ConfigError, ("AIStore", "AIS_ENDPOINT=http"), lambda world: None),
    Case("ais no token", "ais://bucket/x.tar", AccessDenied,
         ("AIStore", "anonymous (no token)", "401", "token required", "AIS_AUTHN_TOKEN"), cluster("right")),
    Case("ais wrong token", "ais://bucket/x.tar", AccessDenied,
         ("AIStore", "token of AIS_AUTHN_TOKEN", "401", "invalid token", "ais auth login"), cluster("right", SECRET)),
    Case("ais expired token", "ais://bucket/x.tar", AccessDenied,
         ("AIStore", "token file /", "401", "invalid token", "ais auth login"), token_file),
    Case("ais no permission", "ais://bucket/x.tar", AccessDenied,
         ("AIStore", "token of AIS_AUTHN_TOKEN", "403", "permission denied", "AIS_AUTHN_TOKEN"), forbidden),
    Case("ais missing bucket", "ais://nobucket/x.tar", ShardNotFound,
         ("AIStore", "404", "does not exist", "no such bucket in this cluster"), cluster(),
         ways=(*READS, "listing")),
    Case("ais missing object", "ais://bucket/none.tar", ShardNotFound,
         ("AIStore", "404", "does not exist", "Check the object's name"), cluster(), ways=READS),
    Case("ais refused connection", "ais://bucket/x.tar", TransferError, ("AIStore", "127.0.0.1", "AIS_ENDPOINT"),
         lambda world: world.set(AIS_ENDPOINT=refusing(world))),
]  # fmt: skip

# -- web servers --------------------------------------------------------------------------------------------------


def web(status: int = 0, trusted: bool = True, **options: Any) -> Callable[[World], Any]:
    def arrange(world: World) -> Any:
        origin, given = world.web(**options)
        if status:
            origin.behave(status=status)
        if not trusted:
            world.patch.delenv("SSL_CERT_FILE")
        return given, origin.url("x.tar")

    return arrange


def no_page(world: World) -> Any:
    return {}, world.web()[0].url("none.tar")


HTTPS = [
    Case("https no credentials", "", AccessDenied, ("the server", "no credentials", "401", "netrc"), web(401)),
    Case("https wrong token", "", AccessDenied, ("the server", "token of storage_options", "401", "netrc"),
         web(401, token=SECRET)),
    Case("https no permission", "", AccessDenied, ("the server", "token of storage_options", "403", "may"),
         web(403, token=SECRET)),
    Case("https missing file", "", ShardNotFound, ("the server", "404", "Check the URL"), no_page, ways=READS),
    Case("https unknown authority", "", TransferError, ("certificate", "SSL_CERT_FILE"), web(trusted=False)),
    Case("https refused connection", "", TransferError, ("refused", "port"),
         lambda world: ({}, refusing(world).replace("http:", "https:") + "/x.tar")),
]  # fmt: skip

CASES = [*S3, *GS, *AZ, *HF, *AIS, *HTTPS]


# -- the matrix ---------------------------------------------------------------------------------------------------


@pytest.fixture
def world(
    request: pytest.FixtureRequest,
    clean_aws: pytest.MonkeyPatch,
    clean_google: pytest.MonkeyPatch,
    azure_environment: pytest.MonkeyPatch,
    no_settings: None,
    tmp_path: Path,
) -> Iterator[World]:
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING_FACE", "WDS_", "NETRC")) and name not in (
            "WDS_REQUIRE_SERVERS",
            "WDS_AZURITE",
        ):
            clean_aws.delenv(name)
    clean_aws.setenv("HOME", str(tmp_path))
    clean_aws.setenv("HF_HOME", str(tmp_path / "hf"))
    clean_aws.setenv("WDS_RETRIES", "2")
    made = World(request, clean_aws, tmp_path)
    yield made
    made.close()
    forget()


def do(way: str, url: str, options: Any) -> None:
    if way == "samples":
        list(wds.WebDataset(url, shardshuffle=False, storage_options=options))
    elif way == "bytes":
        with wds.gopen(url, storage_options=options) as file:
            file.read()
    elif way == "listing":
        list(wds.WebDataset(url.rpartition("/")[0] + "/*.tar", shardshuffle=False, storage_options=options))
    else:
        with wds.TarWriter(url, storage_options=options) as sink:
            sink.write({"__key__": "a", "txt": "x"})


def message(world: World, case: Case, way: str) -> tuple[WdsError, str]:
    arranged = case.arrange(world)
    options, url = arranged if isinstance(arranged, tuple) else (arranged, case.url)
    with pytest.raises(WdsError) as caught:
        do(way, url, options or None)
    return caught.value, url


CELLS = [
    pytest.param(case, way, direct, id=f"{case.name}-{way}-{direct}")
    for case in CASES
    for way in case.ways
    for direct in ("1", "0")
    if direct == "1" or way in READS  # lists and writers know one way only
]


@pytest.mark.parametrize(("case", "way", "direct"), CELLS)
def test_bad_input(world: World, case: Case, way: str, direct: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    world.set(WDS_DIRECT=direct)
    error, url = message(world, case, way)
    said = str(error)
    place = url if way != "listing" else url.rpartition("/")[0] + "/"
    assert type(error) is case.kind
    for words in (place, *case.more.get(way, case.words)):
        assert words in said
    _is_readable(said)
    for secret in (SECRET, rados.SECRET, "hush-token", azurite_key()):
        assert secret not in said + caplog.text


def _is_readable(said: str) -> None:
    """A line or two for people, with nothing of a client's own in it."""
    assert len(said) < 800
    assert said.isprintable()
    for noise in ("Traceback", "Error(", "<", "None", " object at ", "400 400", "403 403", "..", ", 401", "  "):
        assert noise not in said.replace("{000..999}", "")
