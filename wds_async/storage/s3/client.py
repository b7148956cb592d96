"""The S3 client of one backend, and the requests that it signs.

The client is s3fs's own, so all that s3fs and botocore read counts (profiles, roles, endpoints, ``storage_options``).
Signed requests are had from its `before-send` event: botocore resolves the endpoint, refreshes credentials and signs,
and is stopped before it sends. That costs 0.27 ms of CPU a request, less than 1 % of what reading 66 MB does.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import re
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from wds_async.environment import variable
from wds_async.errors import ConfigError
from wds_async.redact import redact
from wds_async.storage.base import Tls
from wds_async.storage.filesystems import Filesystems
from wds_async.storage.http.messages import PLAIN_HEADERS
from wds_async.storage.s3.options import S3Name
from wds_async.storage.secrets import Secrets, Writer

__all__ = ["S3Client", "Signed", "connect", "key_in_words", "writer"]

_VALID_FOR_S = 600.0
_SESSION_VALID_FOR_S = 50.0  # botocore renews those of S3 Express when less than a minute is left
_AT_LEAST_S = 1.0
_WRITER = "wds-async-writer"
_LEFT_OUT = frozenset({"user-agent", "accept-encoding", "amz-sdk-invocation-id", "amz-sdk-request"})
_SOURCES = {
    "env": "environment",
    "shared-credentials-file": "credentials file",
    "config-file": "configuration file",
    "assume-role": "assumed role",
    "assume-role-with-web-identity": "web identity",
    "iam-role": "instance role",
    "container-role": "container role",
    "custom-process": "credential_process",
}

_INTERNAL = re.compile(r"\b\w+\.\w+\(\) ")

_locating: contextvars.ContextVar[bool] = contextvars.ContextVar("wds_async_s3_locating", default=False)
_signing: contextvars.ContextVar[bool] = contextvars.ContextVar("wds_async_s3_signing", default=False)


class _SignedRequest(BaseException):
    """Carries a request out of botocore. No `Exception`, which botocore would take for a failure and retry."""

    def __init__(self, request: Any) -> None:
        super().__init__()
        self.request = request


@dataclass(frozen=True, slots=True)
class Signed:
    """A request, valid until ``renew_after`` (``time.monotonic``), and the identity that signed it."""

    url: str = field(repr=False)
    headers: tuple[tuple[str, str], ...] = field(repr=False)
    renew_after: float
    identity: str


class S3Client:
    """``filesystem`` is s3fs's, connected. ``missed``: it is anonymous because no credentials were found."""

    def __init__(self, filesystem: Any, client: Any, secrets: Secrets) -> None:
        self.client = client
        self._secrets = secrets
        self.anonymous = bool(filesystem.anon)
        self.missed = False
        self.identity = "anonymous" if self.anonymous else "credentials that were not used yet"
        # Arguments of every call, as s3fs adds them.
        self._extra: Mapping[str, Any] = {**filesystem.s3_additional_kwargs, **filesystem.req_kw}
        self.tls = _tls(filesystem, client)
        self.proof = 0
        """Differs where another key or session signs."""
        self.credentials: Any = None
        """botocore's, None where ``storage_options`` gave them or there are none."""
        self._authorization = ""
        self._get_arguments = self.arguments("GetObject")
        register = client.meta.events.register
        register("before-send.s3.GetObject", _instead_of_sending)
        register("before-send.s3", self._note)
        register("before-call.s3.HeadBucket", _locate_once)
        register("after-call.s3.HeadBucket", _located)
        register("after-call-error.s3.HeadBucket", _located)

    def by_itself(self) -> str:
        """Return why only the client itself can read; "" where the engine can."""
        if self.client.meta.config.proxies:
            return "config_kwargs name a proxy"
        return "SSE-C" if any(name.startswith("SSECustomer") for name in self._extra) else ""

    def arguments(self, operation: str) -> dict[str, Any]:
        """Return the arguments of every call that ``operation`` takes."""
        taken = self.client.meta.service_model.operation_model(operation).input_shape.members
        return {name: value for name, value in self._extra.items() if name in taken and value is not None}

    def use_regions(self, regions: Mapping[str, str]) -> None:
        """Send requests for a bucket of ``regions`` to its region, whatever the environment names."""

        def correct(params: Mapping[str, Any], builtins: dict[str, Any], **_: Any) -> None:
            if (region := regions.get(params.get("Bucket", ""))) is not None:
                builtins["AWS::Region"] = region

        self.client.meta.events.register("before-endpoint-resolution.s3", correct)

    def use_credentials(self, credentials: Any) -> None:
        """Name the source of the ``credentials`` that sign."""
        self.credentials = credentials
        self.identity = self._identify(S3Name("s3", "bucket", ""))

    async def get(self, name: S3Name, **more: str) -> Any:
        """Return botocore's answer to the GET of an object, with ``more`` arguments; its body is to be closed."""
        extra = {**self._get_arguments, **_version(name), **more}
        return await self.client.get_object(Bucket=name.bucket, Key=name.key or "-", **extra)

    async def head(self, name: S3Name, **more: str) -> Any:
        """Return botocore's answer to the HEAD of an object."""
        extra = {**more, **self.arguments("HeadObject"), **_version(name)}
        return await self.client.head_object(Bucket=name.bucket, Key=name.key, **extra)

    async def put_new(self, name: S3Name, data: bytes, writer: str) -> None:
        """PUT an object where there is none, with the ``writer`` in its metadata. Raise botocore's ClientError (412)
        where there is one."""
        extra = {**self.arguments("PutObject"), "Metadata": {_WRITER: writer}, "IfNoneMatch": "*"}
        await self.client.put_object(Bucket=name.bucket, Key=name.key, Body=data, **extra)

    async def writer(self, name: S3Name) -> str | None:
        """Return the writer in the object's metadata; None where there is none."""
        metadata: Mapping[str, str] = (await self.head(name)).get("Metadata") or {}
        return metadata.get(_WRITER)

    async def delete(self, name: S3Name) -> None:
        """DELETE an object; S3 does not tell whether there was one."""
        extra = {**self.arguments("DeleteObject"), **_version(name)}
        await self.client.delete_object(Bucket=name.bucket, Key=name.key, **extra)

    @property
    def at_amazon(self) -> bool:
        """True if requests go to Amazon, and not to another store with its protocol."""
        host = urllib.parse.urlsplit(str(self.client.meta.endpoint_url)).hostname or ""
        return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))

    async def sign(self, name: S3Name) -> Signed:
        """Return the signed GET of an object. Raise what botocore raises where there is nothing to sign with."""
        token = _signing.set(True)
        try:
            await self.get(name)
        except _SignedRequest as caught:
            return self._signed(caught.request, name)
        finally:
            _signing.reset(token)
        raise RuntimeError("the S3 client sent a request that was only to be signed")

    def _note(self, request: Any, **_: Any) -> None:
        """Remember botocore's proofs as secrets: a store may repeat them."""
        self._secrets.add_headers([(name, _text(value)) for name, value in request.headers.items()])

    def _signed(self, request: Any, name: S3Name) -> Signed:
        own = [(key, _text(value)) for key, value in request.headers.items() if key.lower() not in _LEFT_OUT]
        self._secrets.add_headers(own)
        self._authorization = dict(own).get("Authorization", "")
        self.identity = self._identify(name)
        self.proof = hash((_key_of(self._authorization), request.headers.get("X-Amz-Security-Token")))
        left_s = _SESSION_VALID_FOR_S if name.is_directory else _VALID_FOR_S
        expires = getattr(self.credentials, "_expiry_time", None)
        if isinstance(expires, datetime.datetime):
            left_s = min(left_s, expires.timestamp() - time.time())
        renew_after = time.monotonic() + max(left_s, _AT_LEAST_S)
        return Signed(request.url, (*PLAIN_HEADERS, *own), renew_after, self.identity)

    def _identify(self, name: S3Name) -> str:
        """Return the access key of the signature, shortened, and its source."""
        key = _key_of(self._authorization)
        if not self._authorization:
            return "anonymous"
        return f"S3 Express session {_shortened(key)}" if name.is_directory else key_in_words(key, self.credentials)


def _version(name: S3Name) -> dict[str, str]:
    return {"VersionId": name.version} if name.version else {}


def key_in_words(key: str, credentials: Any) -> str:
    """Return the access ``key``, shortened, and where it came from: botocore's ``credentials``, or None for options."""
    if credentials is None:
        return f"access key {_shortened(key)} (storage_options)"
    method = str(getattr(credentials, "method", ""))
    source = _SOURCES.get(method, method)
    if method == "assume-role-with-web-identity" and (role := variable("AWS_ROLE_ARN")):
        source = f"{source}, role {role}"
    return f"access key {_shortened(key)} ({source})"


async def connect(filesystems: Filesystems, scheme: str, secrets: Secrets | None = None) -> S3Client | None:
    """Return a client for reading on this loop; None where there are no credentials and anonymous access was not
    requested. Its proofs are added to ``secrets``."""
    secrets = secrets or Secrets()
    with _options_named(secrets):
        filesystem, _ = await filesystems.find(f"{scheme}://")
        filesystem.retries = 1  # the engine retries itself
        client = S3Client(filesystem, await filesystem.get_s3(), secrets)
        filesystem.session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_timestamp)
    if client.anonymous:
        return client
    try:
        # Signing shows whether the client found credentials. Its session would search once more, where nothing was
        # found: seconds, on a machine whose metadata service does not answer.
        await client.sign(S3Name(scheme, "bucket", ""))
    except Exception as exn:
        if type(exn).__name__ == "NoCredentialsError":
            return None
        raise
    if not (filesystem.key or filesystem.client_kwargs.get("aws_access_key_id")):
        client.use_credentials(await filesystem.session.get_credentials())
    return client


@contextlib.contextmanager
def _options_named(secrets: Secrets) -> Iterator[None]:
    """Raise ConfigError for options that make no client."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as exn:
        if type(exn).__module__.startswith(("botocore", "aiobotocore", "wds_async")):
            raise
        words = _INTERNAL.sub("", redact(secrets.hidden(" ".join(str(exn).split()))))[:200].rstrip(".")
        raise ConfigError(
            f"S3's client cannot be made: {words or type(exn).__name__}. Check storage_options={{'s3': …}} (the "
            "options are s3fs's: key, secret, token, profile, anon, endpoint_url, client_kwargs, config_kwargs, …) and "
            "AWS_ENDPOINT_URL_S3."
        ) from None


def _instead_of_sending(request: Any, **_: Any) -> None:
    if _signing.get():
        raise _SignedRequest(request)


def _locate_once(**_: Any) -> None:
    """Stop botocore from looking for a bucket's region again when that request is redirected, without end."""
    if _locating.get():
        from botocore.exceptions import ClientError  # noqa: PLC0415 (loaded by now)

        raise ClientError({"Error": {}, "ResponseMetadata": {"HTTPHeaders": {}}}, "HeadBucket")
    _locating.set(True)


def _located(**_: Any) -> None:
    _locating.set(False)


def _timestamp(value: Any) -> datetime.datetime:
    """Return the time in an answer. botocore's way takes two thirds of the time of a listing."""
    if isinstance(value, str) and value[10:11] == "T":
        with contextlib.suppress(ValueError):
            return datetime.datetime.fromisoformat(value)
    from botocore.utils import parse_timestamp  # noqa: PLC0415 (loaded by now)

    parsed: datetime.datetime = parse_timestamp(value)
    return parsed


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _key_of(authorization: str) -> str:
    scope = authorization.partition("Credential=")[2] or authorization.partition(" ")[2].partition(":")[0]
    return scope.partition("/")[0].strip(",")


def _shortened(key: str) -> str:
    return f"{key[:4]}…{key[-4:]}" if len(key) >= 16 else f"{key[:2]}…"


def _tls(filesystem: Any, client: Any) -> Tls:
    verify = filesystem.client_kwargs.get("verify")
    if verify is None:
        verify = filesystem.session.get_config_variable("ca_bundle")
    own = client.meta.config.client_cert or ""
    certificate, key = (own, "") if isinstance(own, str) else own
    if isinstance(verify, str):
        return Tls(ca_file=verify, certificate=certificate, key=key)
    return Tls(verify=verify is not False, certificate=certificate, key=key)


def writer(url: str, options: Mapping[str, Any], filesystem: Any) -> Writer:
    """Return the identity and secrets that an s3fs writes with."""
    if filesystem.anon:
        return Writer("anonymous")
    own = filesystem.client_kwargs
    if key := filesystem.key or own.get("aws_access_key_id"):
        tokens = filesystem.token, own.get("aws_session_token")
        secrets = Secrets(filesystem.secret, own.get("aws_secret_access_key"), *tokens)
        return Writer(key_in_words(str(key), None), secrets)
    credentials = filesystem.session._credentials
    frozen = getattr(credentials, "_frozen_credentials", None) or credentials
    return Writer(key_in_words(frozen.access_key, credentials), Secrets(frozen.secret_key, frozen.token))
