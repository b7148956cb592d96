"""S3 and what speaks its protocol: MinIO, Ceph, R2 and the like.

s3fs and botocore say where an object is and with whose authority; the engine sends the GET, signed by header
(Signature Version 4, so that no bucket policy against query signatures applies). ``Range`` and ``If-Match`` are not
signed, and one signature serves all parts of a shard.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from wds_async.config import proxy_for
from wds_async.errors import UrlError
from wds_async.logs import warn_once
from wds_async.redact import redact
from wds_async.storage.base import (
    Access,
    Answer,
    Call,
    Checksum,
    Contradiction,
    Description,
    Entry,
    Fault,
    RefusedAnswer,
    Request,
    Stream,
    Verdict,
)
from wds_async.storage.checked import CheckedRanges
from wds_async.storage.checksums import amazon, amazon_etag
from wds_async.storage.filesystems import Filesystems
from wds_async.storage.generic import GenericBackend, explain_foreign
from wds_async.storage.http.backend import HttpBackend
from wds_async.storage.http.errors import with_place, with_proxy
from wds_async.storage.http.messages import fields_of, version_of
from wds_async.storage.options import NO_OPTIONS, Options
from wds_async.storage.s3.client import S3Client, Signed, connect
from wds_async.storage.s3.errors import (
    KEY_REFUSED,
    REGION_CODES,
    SESSION_OVER,
    S3Refusal,
    explain_client,
    explain_refusal,
    refusal_of_answer,
    refusal_of_exception,
)
from wds_async.storage.s3.options import S3Name, tried_once, with_patience
from wds_async.storage.secrets import Secrets, hide_in_logs

__all__ = ["ObjectGet", "S3Backend"]

logger = logging.getLogger("wds_async")
_SIGNED_AT_MOST = 10_000
_SEARCHES_AT_MOST = 3
_LATE_S = 5.0
_ON_THE_WAY_S = 60.0
"""In which all requests are answered that were sent before another session signed: longer than any stall."""


class S3Backend(GenericBackend):
    """Reads ``s3://`` and ``s3a://``. ``options`` are s3fs's (``key``, ``profile``, ``endpoint_url``, …)."""

    def __init__(
        self,
        call: Call,
        options: Options = NO_OPTIONS,
        *,
        direct: bool = True,
        connect_timeout_s: float = 5.0,
        stall_timeout_s: float = 30.0,
    ) -> None:
        super().__init__(call, options)
        self._call = call
        self._options = options
        self._timeouts_s = connect_timeout_s, stall_timeout_s
        self._filesystems = self._filesystems_of(options)
        self._direct = direct
        self._client: S3Client | None = None
        self._former: S3Client | None = None
        self._connecting: asyncio.Lock | None = None
        self._left: list[Filesystems] = []  # of credentials that were dropped; ranges may still be read by them
        self._regions: dict[str, str] = {}
        self._searches = 0
        # How often credentials were dropped, and how often when a shard was last signed: an answer to an older
        # signature is no reason to drop the present ones.
        self._generation = 0
        self._generations: dict[str, int] = {}
        # Keys and sessions (`S3Client.proof`): since when they sign, and at which generation they were refused as over.
        self._since: dict[int, float] = {}
        self._over: dict[int, int] = {}
        self._proxies: dict[str, str | None] = {}
        self._http: HttpBackend | None = None
        self._endpoint = ""
        self._key_dropped_at = -_LATE_S
        self._secrets = Secrets(options.get("secret"), options.get("password"), options.get("token"))
        hide_in_logs(self._secrets, "botocore", "aiobotocore", "s3fs")

    async def access(self, url: str) -> Access:
        name = S3Name.of(url)
        if not name.bucket or not name.key:
            raise UrlError(f"{redact(url)}: names no object; write s3://bucket/key")
        client = await self._connected(name)
        self._remember(url, client)
        signed = await client.sign(name)
        if self._why_not(client, signed):
            return await self._ranges(client, name)
        return Request(signed.url, signed.headers, renew_after=signed.renew_after, tls=client.tls, follows=False)

    async def entries(self, url: str) -> AsyncIterator[Entry]:
        name = S3Name.of(url)
        client = await self._connected(name)
        self._remember(url, client)
        if not name.bucket:
            for bucket in (await client.client.list_buckets()).get("Buckets", []):
                yield Entry(f"{name.folder}{bucket['Name']}/", None)
            return
        pages = client.client.get_paginator("list_objects_v2").paginate(
            Bucket=name.bucket, Prefix=name.key, Delimiter="/", **client.arguments("ListObjectsV2")
        )
        async for page in pages:
            found = [Entry(name.folder + each["Prefix"], None) for each in page.get("CommonPrefixes", [])]
            for each in page.get("Contents", []):
                if each["Key"] != name.key:  # a folder that somebody made is an object of that name
                    found.append(Entry(name.folder + each["Key"], each["Size"], each["LastModified"].timestamp()))
            for entry in sorted(found, key=lambda entry: entry.url):
                yield entry

    async def describe(self, url: str) -> Description:
        name = S3Name.of(url)
        client = await self._connected(name)
        signed = await client.sign(name if name.bucket else S3Name(name.scheme, "bucket", ""))
        why = self._why_not(client, signed)
        return Description("S3", self._endpoint, signed.identity, not why, why)

    def streamed(self, request: Request) -> Stream:
        if self._http is None:
            connect_s, stall_s = self._timeouts_s
            self._http = HttpBackend(call=self._call, connect_timeout_s=connect_s, stall_timeout_s=stall_s)
        return self._http.streamed(request)

    def classify(self, outcome: Answer | BaseException, url: str) -> Fault:
        if isinstance(outcome, RefusedAnswer):
            outcome = outcome.answer
        if isinstance(outcome, Answer):
            outcome = self._secrets.of_answer(outcome)
        return self._secrets.of_fault(self._classified(outcome, url))

    def _classified(self, outcome: Answer | BaseException, url: str) -> Fault:
        said = refusal_of_answer(outcome) if isinstance(outcome, Answer) else refusal_of_exception(outcome)
        if said is None:
            assert not isinstance(outcome, Answer)
            fault = explain_client(outcome) or explain_foreign(outcome)
            return self._at_endpoint(with_proxy(fault, outcome, self._endpoint))
        client = self._client or self._former
        identity = client.identity if client is not None else "nobody yet"
        said = replace(said, message=self._secrets.hidden(said.message))
        if self._elsewhere(said, S3Name.of(url).bucket):
            return self._moved(said, identity)
        anonymous, found = (client.anonymous, client.found) if client is not None else (False, True)
        fault = explain_refusal(said, identity, anonymous=anonymous, asked=found)
        if said.code == "NoSuchKey" and "%" in S3Name.of(url).key:
            fault = replace(fault, advice=f"{fault.advice} It is taken literally, without percent-decoding.")
        if fault.verdict is Verdict.DENIED and not found and self._searches < _SEARCHES_AT_MOST:
            # Metadata services turn clients away when all workers of a host start at once: look for credentials again.
            fault = replace(fault, verdict=Verdict.EXPIRED)
        if said.code in KEY_REFUSED and client is not None and client.credentials is not None:
            return replace(fault, verdict=self._after_a_refused_key())
        if said.code in SESSION_OVER and client is not None and self._is_over(client, url):
            fault = replace(fault, verdict=Verdict.DENIED)
        if fault.verdict is Verdict.EXPIRED and self._generations.get(url, self._generation) == self._generation:
            self._drop()
        return fault

    def renew(self, url: str) -> None:
        now = time.monotonic()
        if now - self._key_dropped_at >= _LATE_S and self._generations.get(url, self._generation) == self._generation:
            self._key_dropped_at = now
            self._drop()

    def checksum(self, fields: Mapping[str, str]) -> Checksum | None:
        return amazon(fields)

    async def remote_checksum(self, url: str) -> Checksum | None:
        name = S3Name.of(url)
        client = await self._connected(name)
        self._remember(url, client)
        extra = {**client.arguments("HeadObject"), **({"VersionId": name.version} if name.version else {})}
        found = await client.client.head_object(
            Bucket=name.bucket, Key=name.key, **{"ChecksumMode": "ENABLED", **extra}
        )
        fields = fields_of(found["ResponseMetadata"]["HTTPHeaders"])
        is_directory = name.bucket.endswith("--x-s3")  # its ETags are made up
        return amazon(fields) or (None if is_directory else amazon_etag(fields))

    async def close(self) -> None:
        for filesystems in (*self._left, self._filesystems):
            await filesystems.close()
        self._left.clear()
        self._client = None
        if self._http is not None:
            await self._http.close()

    async def _connected(self, name: S3Name) -> S3Client:
        """Return the client, made at first use, and again after its credentials were dropped."""
        if self._connecting is None:
            self._connecting = asyncio.Lock()
        async with self._connecting:
            if self._client is None:
                client = await connect(self._filesystems, name.scheme, self._secrets)
                if client is None:
                    client = await self._anonymous(name)
                client.use_regions(self._regions)
                self._client = client
            return self._client

    async def _anonymous(self, name: S3Name) -> S3Client:
        """Read public buckets without credentials; a warning is logged once a process."""
        warn_once(
            logger,
            "s3 anonymous",
            "%s: no AWS credentials were found (environment, profiles, roles); reading anonymously. "
            "storage_options={'s3': {'anon': True}} says that this is meant.",
            name.folder,
        )
        self._searches += 1
        self._left.append(self._filesystems)
        self._filesystems = self._filesystems_of({**self._options, "anon": True})
        client = await connect(self._filesystems, name.scheme)
        assert client is not None
        client.found = False
        return client

    def _drop(self) -> None:
        """Forget the client with its credentials: the next one reads the environment, files and roles anew."""
        self._generation += 1
        self._client, self._former = None, self._client or self._former
        self._left.append(self._filesystems)
        self._filesystems = self._filesystems_of(self._options)

    def _filesystems_of(self, options: Mapping[str, Any]) -> Filesystems:
        return Filesystems(self._call, with_patience(tried_once(options), *self._timeouts_s))

    def _remember(self, url: str, client: S3Client) -> None:
        """Remember which credentials sign for ``url`` now."""
        self._since.setdefault(client.proof, time.monotonic() if self._since else -math.inf)
        if len(self._generations) >= _SIGNED_AT_MOST:
            self._generations.clear()
        self._generations[url] = self._generation

    def _after_a_refused_key(self) -> Verdict:
        """Somebody may have put another key in its place since it was read: look once more. Requests that were on their
        way with the old one are refused a little later than the first."""
        now, client, former = time.monotonic(), self._client, self._former
        if now - self._key_dropped_at < _LATE_S:
            another = client is None or former is None or client.proof != former.proof
            return Verdict.EXPIRED if another else Verdict.DENIED
        self._key_dropped_at = now
        self._drop()
        return Verdict.EXPIRED

    def _is_over(self, client: S3Client, url: str) -> bool:
        """Return whether the session that was refused as over is the one that was found again since it was dropped for
        that: looking for credentials once more gives nothing else. What an answer to a former session says, or one that
        may be to such, is nothing about the present one."""
        asked, now = self._generations.get(url, self._generation), time.monotonic()
        if asked != self._generation or now - self._since.get(client.proof, now) < _ON_THE_WAY_S:
            return False
        return asked > self._over.setdefault(client.proof, asked)

    async def _ranges(self, client: S3Client, name: S3Name) -> Access:
        """Return the object by botocore's client. There is no reading in order by it."""
        ranges = await CheckedRanges.of(ObjectGet(client, name), version_of, sum(self._timeouts_s))
        if ranges is None:
            raise Contradiction("asked for the first byte, the store answered with the whole object")
        return ranges

    def _why_not(self, client: S3Client, signed: Signed) -> str:
        """Return why a request cannot be the engine's own; "" where it can."""
        parts = urllib.parse.urlsplit(signed.url)
        self._endpoint = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"  # it may hold a password
        if not self._direct:
            return "WDS_DIRECT=0"
        if self._endpoint not in self._proxies:
            self._proxies[self._endpoint] = proxy_for(signed.url)
        return "a proxy is in the way" if self._proxies[self._endpoint] else client.by_itself()

    def _elsewhere(self, said: S3Refusal, bucket: str) -> bool:
        """Return whether the bucket is in another region, and remember which."""
        wrong = said.code in REGION_CODES or said.status in (301, 307)
        if wrong and said.region and not said.operation:  # botocore follows by itself, where it can
            self._regions[bucket] = said.region
        return wrong

    def _moved(self, said: S3Refusal, identity: str) -> Fault:
        verdict = Verdict.EXPIRED if said.region and not said.operation else Verdict.FATAL
        where = f"; the bucket is in {said.region}" if said.region else ""
        right = f"AWS_REGION={said.region}" if said.region else "AWS_REGION to the region of the bucket"
        advice = f"Set {right}, and check AWS_ENDPOINT_URL_S3 where the store is another than Amazon's."
        return Fault(verdict, f"S3 answered {said} to {identity}{where}", advice)

    def _at_endpoint(self, fault: Fault) -> Fault:
        if not self._endpoint:
            return fault
        advice = "The endpoint follows AWS_REGION and AWS_ENDPOINT_URL_S3."
        return with_place(fault, f"S3 at {self._endpoint}", "" if "AWS_ENDPOINT_URL_S3" in fault.advice else advice)


_PIECE_BYTES = 1 << 20


class ObjectGet:
    """A `checked.RangeGet` of one object; raises what botocore does. Its client is asked, and not s3fs's methods, which
    give the body only, and try five times."""

    def __init__(self, client: S3Client, name: S3Name) -> None:
        self._client, self._name = client, name

    @contextlib.asynccontextmanager
    async def __call__(self, start: int, stop: int, etag: str) -> AsyncIterator[tuple[Answer, AsyncIterator[bytes]]]:
        more = {"IfMatch": etag} if etag else {}
        try:
            found = await self._client.get(self._name, Range=f"bytes={start}-{stop - 1}", **more)
        except Exception as exn:
            if (unsatisfied := _unsatisfied(exn)) is None:
                raise
            if not unsatisfied.fields.get("content-range"):  # some stores leave the size out
                size = await self._client.size(self._name)
                unsatisfied = Answer(416, {**unsatisfied.fields, "content-range": f"bytes */{size}"})
            yield unsatisfied, _pieces(None)
            return
        meta = found["ResponseMetadata"]
        try:
            yield Answer(meta["HTTPStatusCode"], fields_of(meta["HTTPHeaders"])), _pieces(found["Body"])
        finally:
            found["Body"].close()


async def _pieces(body: Any) -> AsyncIterator[bytes]:
    while body is not None and (piece := await body.read(_PIECE_BYTES)):
        yield bytes(piece)


def _unsatisfied(exn: Exception) -> Answer | None:
    """Return the 416 that botocore makes an exception of: an object may be empty."""
    meta = (getattr(exn, "response", None) or {}).get("ResponseMetadata") or {}
    return Answer(416, fields_of(meta.get("HTTPHeaders") or {})) if meta.get("HTTPStatusCode") == 416 else None
