"""The S3 client of one backend, and what it would send.

The client is s3fs's own, so all that s3fs and botocore read counts (profiles, roles, endpoints, ``storage_options``).
Signed requests are had from its `before-send` event: botocore resolves the endpoint, refreshes credentials and signs,
and is stopped before it sends. That costs 0.27 ms of CPU a request, less than 1 % of what reading 66 MB does.
"""

from __future__ import annotations

import contextvars
import datetime
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wds_async.environment import variable
from wds_async.storage.base import Tls
from wds_async.storage.filesystems import Filesystems
from wds_async.storage.s3.names import S3Name

__all__ = ["S3Client", "Signed", "connect"]

_VALID_FOR_S = 600.0
_SESSION_VALID_FOR_S = 50.0  # botocore renews those of S3 Express when less than a minute is left
_AT_LEAST_S = 1.0
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

_asked: contextvars.ContextVar[bool] = contextvars.ContextVar("wds_async_s3_asked", default=False)


class _NotSent(BaseException):
    """Carries a request out of botocore. No `Exception`, which botocore would take for a failure and try again."""

    def __init__(self, request: Any) -> None:
        super().__init__()
        self.request = request


@dataclass(frozen=True, slots=True)
class Signed:
    """What is to be sent, until ``renew_after`` (``time.monotonic``), and by whom it is signed."""

    url: str = field(repr=False)
    headers: tuple[tuple[str, str], ...] = field(repr=False)
    renew_after: float
    identity: str


class S3Client:
    """``filesystem`` is s3fs's, connected; ``found`` is False where it is anonymous for want of credentials."""

    def __init__(self, filesystem: Any, client: Any, *, found: bool) -> None:
        self.client = client
        self.anonymous = bool(filesystem.anon)
        self.found = found
        self.identity = "anonymous" if self.anonymous else "credentials that were not asked for yet"
        self.given: Mapping[str, Any] = {**filesystem.s3_additional_kwargs, **filesystem.req_kw}
        """Arguments for every call, as s3fs adds them."""
        self.tls = _tls(filesystem, client)
        self.credentials: Any = None
        """botocore's, None where ``storage_options`` gave them or there are none."""
        self._get_arguments = self.arguments("GetObject")
        client.meta.events.register("before-send.s3.GetObject", _instead_of_sending)

    def by_itself(self) -> str:
        """Why only the client itself can read, "" where the engine can."""
        if self.client.meta.config.proxies:
            return "config_kwargs name a proxy"
        return "SSE-C" if any(name.startswith("SSECustomer") for name in self.given) else ""

    def arguments(self, operation: str) -> dict[str, Any]:
        """Those of ``given`` that ``operation`` takes."""
        taken = self.client.meta.service_model.operation_model(operation).input_shape.members
        return {name: value for name, value in self.given.items() if name in taken and value is not None}

    def use_regions(self, regions: Mapping[str, str]) -> None:
        """Ask for a bucket in its region of ``regions``, whatever the environment says."""

        def correct(params: Mapping[str, Any], builtins: dict[str, Any], **_: Any) -> None:
            if (region := regions.get(params.get("Bucket", ""))) is not None:
                builtins["AWS::Region"] = region

        self.client.meta.events.register("before-endpoint-resolution.s3", correct)

    async def sign(self, name: S3Name) -> Signed:
        """The GET of an object. Raises what botocore does, where there is nothing to sign with."""
        extra = dict(self._get_arguments)
        if name.version:
            extra["VersionId"] = name.version
        token = _asked.set(True)
        try:
            await self.client.get_object(Bucket=name.bucket, Key=name.key or "-", **extra)
        except _NotSent as caught:
            return self._signed(caught.request, name)
        finally:
            _asked.reset(token)
        raise RuntimeError("the S3 client sent a request that it was asked for only")

    def _signed(self, request: Any, name: S3Name) -> Signed:
        headers = [("User-Agent", "wds-async"), ("Accept", "*/*"), ("Accept-Encoding", "identity")]
        for key, value in request.headers.items():
            if key.lower() not in _LEFT_OUT:
                headers.append((key, value.decode("latin-1") if isinstance(value, bytes) else str(value)))
        self.identity = self._identify(dict(headers).get("Authorization", ""), name)
        return Signed(request.url, tuple(headers), self._renew_after(name), self.identity)

    def _renew_after(self, name: S3Name) -> float:
        left_s = _SESSION_VALID_FOR_S if name.bucket.endswith("--x-s3") else _VALID_FOR_S
        expires = getattr(self.credentials, "_expiry_time", None)
        if isinstance(expires, datetime.datetime):
            left_s = min(left_s, expires.timestamp() - time.time())
        return time.monotonic() + max(left_s, _AT_LEAST_S)

    def _identify(self, authorization: str, name: S3Name) -> str:
        """The access key of the signature, shortened, and where it came from."""
        if not authorization:
            return "anonymous"
        scope = authorization.partition("Credential=")[2] or authorization.partition(" ")[2].partition(":")[0]
        key = scope.partition("/")[0].strip(",")
        if name.bucket.endswith("--x-s3"):
            return f"S3 Express session {_shortened(key)}"
        if self.credentials is None:
            return f"access key {_shortened(key)} (storage_options)"
        method = str(getattr(self.credentials, "method", ""))
        source = _SOURCES.get(method, method)
        if method == "assume-role-with-web-identity" and (role := variable("AWS_ROLE_ARN")):
            source = f"{source}, role {role}"
        return f"access key {_shortened(key)} ({source})"


async def connect(filesystems: Filesystems, scheme: str) -> S3Client | None:
    """A client for reading on this loop; None where nobody gave credentials, nor asked to be anonymous."""
    filesystem, _ = await filesystems.find(f"{scheme}://")
    made = S3Client(filesystem, await filesystem.get_s3(), found=True)
    if filesystem.anon:
        return made
    try:
        # Signing tells whether the client found credentials. To ask its session would be to search once more, where
        # nothing was found: seconds, on a machine whose metadata service does not answer.
        await made.sign(S3Name(scheme, "bucket", ""))
    except Exception as exn:
        if type(exn).__name__ == "NoCredentialsError":
            return None
        raise
    if not (filesystem.key or filesystem.client_kwargs.get("aws_access_key_id")):
        made.credentials = await filesystem.session.get_credentials()
    return made


def _instead_of_sending(request: Any, **_: Any) -> None:
    if _asked.get():
        raise _NotSent(request)


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
