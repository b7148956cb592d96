"""Requests that botocore signs and does not send: for every way of naming a bucket, and every key."""

from __future__ import annotations

import contextlib
import logging
import re
import time
import urllib.parse
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.servers import moto as moto_server
from tests.servers.awsmetadata import AwsMetadata
from tests.servers.sigv4 import signature_of
from tests.storage.locations import location_of, on_backend
from wds_async.storage.base import Answer, Request, Tls
from wds_async.storage.s3 import client as s3client
from wds_async.storage.s3.backend import S3Backend
from wds_async.transfer.connection import request_bytes

pytest.importorskip("s3fs")

clean_aws, moto = moto_server.clean_aws, moto_server.moto

T = TypeVar("T")
KEY, SECRET, TOKEN = "AKIAIOSFODNN7EXAMPLE", "hush-secret", "hush-token"


@pytest.fixture
def aws(clean_aws: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    clean_aws.setenv("AWS_ACCESS_KEY_ID", KEY)
    clean_aws.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return clean_aws


def on_s3(do: Callable[[S3Backend], Awaitable[T]], direct: bool = True, **options: Any) -> T:
    result: T = on_backend(S3Backend, do, options, direct=direct)
    return result


def request_for(url: str, **options: Any) -> Request:
    async def get(backend: S3Backend) -> Request:
        access = await backend.access(location_of(url))
        assert isinstance(access, Request)
        return access

    return on_s3(get, **options)


def as_sent(request: Request) -> tuple[str, dict[str, str]]:
    """Target and header fields (names in lower case) of what the engine puts on the wire."""
    lines = request_bytes(request.url, request.headers).decode().split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines[1:] if line)
    return lines[0].split(" ")[1], {name.lower(): value for name, value in fields.items()}


def assert_signed(request: Request, secret: str = SECRET) -> str:
    """What is sent is what was signed; the region of the signature."""
    target, fields = as_sent(request)
    credential, names, given = (part.partition("=")[2] for part in fields["authorization"].split(" ", 1)[1].split(", "))
    scope = credential.partition("/")[2]
    date, payload = fields["x-amz-date"], fields["x-amz-content-sha256"]
    assert signature_of("GET", target, fields, names, scope, date, secret, payload) == given
    assert "range" not in names
    assert "if-match" not in names
    return scope.split("/")[1]


@pytest.mark.parametrize(
    ("url", "options", "start"),
    [
        ("s3://bucket/x", {}, "https://bucket.s3.eu-west-1.amazonaws.com/x"),
        ("s3://with.dots/x", {}, "https://s3.eu-west-1.amazonaws.com/with.dots/x"),
        (
            "s3://bucket/x",
            {"config_kwargs": {"s3": {"addressing_style": "path"}}},
            "https://s3.eu-west-1.amazonaws.com/bucket/x",
        ),
        ("s3://bucket/x", {"endpoint_url": "http://minio:9000"}, "http://minio:9000/bucket/x"),
        (
            "s3://bucket/x",
            {"endpoint_url": "https://r2.example", "config_kwargs": {"s3": {"addressing_style": "virtual"}}},
            "https://bucket.r2.example/x",
        ),
        ("s3://bucket/x", {"use_ssl": False}, "http://bucket.s3.eu-west-1.amazonaws.com/x"),
        ("s3://bucket/x?versionId=a/b", {}, "https://bucket.s3.eu-west-1.amazonaws.com/x?versionId=a%2Fb"),
        ("s3://mine-abc-s3alias/x", {}, "https://mine-abc-s3alias.s3.eu-west-1.amazonaws.com/x"),
        (
            "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/mine/a/x",
            {},
            "https://mine-123456789012.s3-accesspoint.eu-west-1.amazonaws.com/a/x",
        ),
    ],
)
def test_endpoints(aws: pytest.MonkeyPatch, url: str, options: dict[str, Any], start: str) -> None:
    aws.setenv("AWS_REGION", "eu-central-1")
    aws.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    request = request_for(url, **options)
    assert request.url == start
    assert assert_signed(request) == "eu-west-1"


def test_the_region_of_the_environment(aws: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """botocore reads AWS_DEFAULT_REGION only; Amazon's command line and other SDKs read AWS_REGION."""
    assert assert_signed(request_for("s3://bucket/x")) == "us-east-1"
    (tmp_path / "config").write_text("[default]\nregion = sa-east-1\n")
    aws.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert assert_signed(request_for("s3://bucket/x")) == "sa-east-1"
    aws.setenv("AWS_REGION", "eu-central-1")
    assert assert_signed(request_for("s3://bucket/x")) == "eu-central-1"
    aws.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert assert_signed(request_for("s3://bucket/x")) == "eu-west-1"
    assert assert_signed(request_for("s3://bucket/x", client_kwargs={"region_name": "us-west-2"})) == "us-west-2"


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_endpoint_of_the_environment(aws: pytest.MonkeyPatch, name: str) -> None:
    aws.setenv(name, "http://127.0.0.1:9000")
    assert request_for("s3a://bucket/x").url == "http://127.0.0.1:9000/bucket/x"


@pytest.mark.parametrize(
    "key",
    ["a b", "a+b", "a%20b", "100%", "#1", "a?b=c&d", "ü/日本", "/x", "a//b", "../x", "a/../b", "./.", "[a]*{b}",
     "a:b@c", "!$&'()*,;=", "~-._", "\"<>\\^`|", "\x7f\t", "x/"],
)  # fmt: skip
def test_any_key_is_sent_as_it_is_signed(aws: pytest.MonkeyPatch, key: str) -> None:
    request = request_for(f"s3://bucket/{key}", endpoint_url="http://127.0.0.1:1")
    target, _ = as_sent(request)
    assert urllib.parse.unquote(target) == f"/bucket/{key}"
    assert_signed(request)


def test_session_tokens_and_requester_pays_are_signed(aws: pytest.MonkeyPatch) -> None:
    aws.setenv("AWS_SESSION_TOKEN", TOKEN)
    request = request_for("s3://bucket/x", requester_pays=True, s3_additional_kwargs={"ExpectedBucketOwner": "1"})
    fields = {name.lower(): value for name, value in request.headers}
    assert fields["x-amz-request-payer"] == "requester"
    assert fields["x-amz-expected-bucket-owner"] == "1"
    assert fields["x-amz-security-token"] == TOKEN
    for name in ("x-amz-request-payer", "x-amz-security-token"):
        assert name in fields["authorization"]
    assert_signed(request)
    assert time.monotonic() + 590 < request.renew_after <= time.monotonic() + 600
    assert not {"hush", TOKEN, SECRET} & set(repr(request).split())
    assert "hush" not in repr(request)
    assert "Signature" not in repr(request)


@pytest.mark.parametrize(
    ("options", "tls"),
    [
        ({}, Tls()),
        ({"client_kwargs": {"verify": False}}, Tls(verify=False)),
        ({"client_kwargs": {"verify": "/ca.pem"}}, Tls(ca_file="/ca.pem")),
        ({"config_kwargs": {"client_cert": ("/c.pem", "/k.pem")}}, Tls(certificate="/c.pem", key="/k.pem")),
    ],
)
def test_tls(aws: pytest.MonkeyPatch, options: dict[str, Any], tls: Tls) -> None:
    assert request_for("s3://bucket/x", **options).tls == tls


def test_authorities_of_the_environment(aws: pytest.MonkeyPatch) -> None:
    aws.setenv("AWS_CA_BUNDLE", "/bundle.pem")
    assert request_for("s3://bucket/x").tls == Tls(ca_file="/bundle.pem")


def identity(**options: Any) -> str:
    return on_s3(lambda backend: backend.describe(location_of("s3://bucket/x")), **options).identity


def test_identities_of_variables_options_and_files(aws: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert identity() == "access key AKIA…MPLE (environment)"
    assert identity(key="AKIAOTHEROTHEROTHER1", secret="x") == "access key AKIA…HER1 (storage_options)"
    assert identity(anon=True) == "anonymous"
    (tmp_path / "credentials").write_text(
        f"[mine]\naws_access_key_id = AKIAFILEFILEFILE0001\naws_secret_access_key = {SECRET}\n"
    )
    aws.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    assert identity(profile="mine") == "access key AKIA…0001 (credentials file)"
    aws.delenv("AWS_ACCESS_KEY_ID")
    aws.delenv("AWS_SECRET_ACCESS_KEY")
    aws.setenv("AWS_PROFILE", "mine")
    assert identity() == "access key AKIA…0001 (credentials file)"


def test_credentials_of_an_instance_a_container_and_a_web_identity(
    clean_aws: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with AwsMetadata(lambda *given: None) as service:
        clean_aws.delenv("AWS_EC2_METADATA_DISABLED")
        clean_aws.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.base)
        assert identity() == "access key ASIA…0001 (instance role)"
        clean_aws.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{service.base}/container")
        clean_aws.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", service.container_token)
        assert identity() == "access key ASIA…0002 (container role)"
        (tmp_path / "token").write_text("good")
        clean_aws.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
        clean_aws.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/training")
        clean_aws.setenv("AWS_ENDPOINT_URL_STS", service.base)
        clean_aws.setenv("AWS_DEFAULT_REGION", "eu-west-1")
        assert identity().endswith("0003 (web identity, role arn:aws:iam::123456789012:role/training)")
        assert service.asked == ["imds", "container", "AssumeRoleWithWebIdentity"]


def test_a_profile_that_assumes_a_role(aws: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(
        "[profile role]\nrole_arn = arn:aws:iam::123456789012:role/x\ncredential_source = Environment\n"
        "region = eu-west-1\n"
    )
    aws.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with AwsMetadata(lambda *given: None) as service:
        aws.setenv("AWS_ENDPOINT_URL_STS", service.base)
        assert identity(profile="role") == "access key ASIA…0001 (assumed role)"


def test_a_signature_does_not_outlive_its_credentials(clean_aws: pytest.MonkeyPatch) -> None:
    """botocore fetches others when little is left of them; the engine asks again in time."""
    with AwsMetadata(lambda *given: None, lives_s=120) as service:
        clean_aws.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{service.base}/container")
        clean_aws.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", service.container_token)

        async def twice(backend: S3Backend) -> list[Any]:
            return [await backend.access(location_of("s3://bucket/x")) for _ in range(2)]

        first, second = on_s3(twice)
        assert first.headers != second.headers
        assert len(service.asked) >= 2
        for request in (first, second):
            assert 60 < request.renew_after - time.monotonic() <= 120


def test_debug_lines_of_the_client_show_no_secret(
    clean_aws: pytest.MonkeyPatch, moto: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG)
    with AwsMetadata(lambda key, secret, token: given.extend((secret, token))) as service:
        given: list[str] = [service.container_token]
        clean_aws.setenv("AWS_ENDPOINT_URL_S3", moto)
        clean_aws.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{service.base}/container")
        clean_aws.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", service.container_token)

        async def listed(backend: S3Backend) -> Request:
            with contextlib.suppress(Exception):  # the bucket does not exist
                async for _ in backend.entries(location_of("s3://missing/x/")):
                    pass
            access = await backend.access(location_of("s3://missing/x"))
            assert isinstance(access, Request)
            return access

        signed = [dict(on_s3(listed).headers)]
        (tmp_path / "token").write_text("good")
        clean_aws.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
        clean_aws.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/training")
        clean_aws.setenv("AWS_ENDPOINT_URL_STS", service.base)
        clean_aws.setenv("AWS_DEFAULT_REGION", "eu-west-1")
        signed.append(dict(on_s3(listed).headers))
    for headers in signed:
        fields = {name.lower(): value for name, value in headers.items()}
        given += [fields["x-amz-security-token"], fields["authorization"].rpartition("Signature=")[2]]
    lines = [f"{record.name} {record.getMessage()}" for record in caplog.records if "boto" in record.name]
    text = "\n".join(lines)
    assert "CanonicalRequest" in text
    assert "Sending http request" in text
    assert [secret for secret in given if secret and secret in text] == []
    assert re.findall(r"Signature(?:=|:\s*)[0-9a-f]+", text) == []


def test_percent_decoding_is_explained_only_for_keys_with_a_percent_sign(aws: pytest.MonkeyPatch) -> None:
    answer = Answer(
        404, {"content-type": "application/xml"}, b"<Error><Code>NoSuchKey</Code><Message>No</Message></Error>"
    )

    async def advice(backend: S3Backend) -> list[bool]:
        urls = ("s3://b/a%20b.tar", "s3://b/ab.tar")
        return ["percent-decoding" in backend.classify(answer, location_of(url)).advice for url in urls]

    assert on_s3(advice) == [True, False]


@pytest.mark.parametrize(
    "text",
    ["2026-01-02T03:04:05.000Z", "2026-01-02T03:04:05Z", "2026-01-02T03:04:05.123456Z", "2026-01-02T03:04:05+02:00",
     "20260102T030405Z", "Fri, 02 Jan 2026 03:04:05 GMT", "1767323045", "1711123110", 1767323045, 1767323045.5],
)  # fmt: skip
def test_times_are_those_of_botocore(text: str | float) -> None:
    from botocore.utils import parse_timestamp

    assert s3client._timestamp(text) == parse_timestamp(text)


def test_what_is_no_time_is_an_error_of_botocore() -> None:
    with pytest.raises(ValueError, match="Invalid timestamp"):
        s3client._timestamp("2026-01-02Tx")
