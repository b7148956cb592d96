"""S3 and what speaks its protocol: MinIO, Ceph, R2 and the like.

s3fs and botocore say where an object is and with whose authority; the engine sends the GET, signed by header
(Signature Version 4, so that no bucket policy against query signatures applies). ``Range`` and ``If-Match`` are not
signed, and one signature serves all parts of a shard.
"""

from __future__ import annotations

import asyncio
import logging
import urllib.parse
from collections.abc import AsyncIterator
from dataclasses import replace

from wds_async.config import proxy_for
from wds_async.errors import UrlError
from wds_async.redact import redact
from wds_async.storage.base import (
    Access,
    Answer,
    Call,
    Description,
    Entry,
    Fault,
    RefusedAnswer,
    Request,
    Stream,
    Verdict,
)
from wds_async.storage.filesystems import Filesystems
from wds_async.storage.generic import GenericBackend, explain_foreign
from wds_async.storage.http.backend import HttpBackend
from wds_async.storage.http.errors import explain_status
from wds_async.storage.options import NO_OPTIONS, Options
from wds_async.storage.s3.client import S3Client, Signed, connect
from wds_async.storage.s3.errors import (
    REGION_CODES,
    Said,
    explain_client,
    explain_said,
    said_by_answer,
    said_by_exception,
)
from wds_async.storage.s3.names import S3Name

__all__ = ["S3Backend"]

logger = logging.getLogger("wds_async")

_SIGNED_AT_MOST = 10_000
_SEARCHES_AT_MOST = 3
_told_of_anonymity: set[str] = set()


class S3Backend(GenericBackend):
    """Reads ``s3://`` and ``s3a://``. ``options`` are s3fs's (``key``, ``profile``, ``endpoint_url``, …)."""

    def __init__(self, call: Call, options: Options = NO_OPTIONS, *, direct: bool = True) -> None:
        super().__init__(call, options)
        self._call = call
        self._options = options
        self._filesystems = Filesystems(call, self._options)
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
        self._proxies: dict[str, str | None] = {}
        self._http: HttpBackend | None = None
        self._endpoint = ""

    async def access(self, url: str) -> Access:
        name = S3Name.of(url)
        if not name.bucket or not name.key:
            raise UrlError(f"{redact(url)}: names no object; write s3://bucket/key")
        client = await self._connected(name)
        if len(self._generations) >= _SIGNED_AT_MOST:
            self._generations.clear()
        self._generations[url] = self._generation
        signed = await client.sign(name)
        if self._why_not(client, signed):
            return await self._filesystems.ranges(url)
        return Request(signed.url, signed.headers, renew_after=signed.renew_after, tls=client.tls, follows=False)

    async def entries(self, url: str) -> AsyncIterator[Entry]:
        name = S3Name.of(url)
        client = await self._connected(name)
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
            self._http = HttpBackend(call=self._call)
        return self._http.streamed(request)

    def classify(self, outcome: Answer | BaseException, url: str) -> Fault:
        if isinstance(outcome, RefusedAnswer):
            outcome = outcome.answer
        said = said_by_answer(outcome) if isinstance(outcome, Answer) else said_by_exception(outcome)
        if said is None:
            assert not isinstance(outcome, Answer)
            fault = explain_client(outcome) or explain_foreign(outcome)
            return self._at_endpoint(fault)
        if self._elsewhere(said, S3Name.of(url).bucket):
            return self._moved(said)
        client = self._client or self._former
        identity = client.identity if client is not None else "nobody yet"
        anonymous, found = (client.anonymous, client.found) if client is not None else (False, True)
        fault = explain_said(said, identity, anonymous=anonymous, asked=found)
        if fault.verdict is Verdict.DENIED and not found and self._searches < _SEARCHES_AT_MOST:
            # Metadata services turn clients away when all workers of a host start at once: look for credentials again.
            fault = replace(fault, verdict=Verdict.EXPIRED)
        if fault.verdict is Verdict.EXPIRED and self._generations.get(url, self._generation) == self._generation:
            self._drop()
        wait_s = explain_status(outcome).retry_after_s if isinstance(outcome, Answer) else None
        return replace(fault, retry_after_s=wait_s)

    async def close(self) -> None:
        for filesystems in (*self._left, self._filesystems):
            await filesystems.close()
        self._left.clear()
        self._client = None
        if self._http is not None:
            await self._http.close()

    async def _connected(self, name: S3Name) -> S3Client:
        """The client, made at first use, and again after its credentials were dropped."""
        if self._connecting is None:
            self._connecting = asyncio.Lock()
        async with self._connecting:
            if self._client is None:
                client = await connect(self._filesystems, name.scheme)
                if client is None:
                    client = await self._anonymous(name)
                client.use_regions(self._regions)
                self._client = client
            return self._client

    async def _anonymous(self, name: S3Name) -> S3Client:
        """Public buckets are read without credentials, which is said once a run."""
        if not _told_of_anonymity:
            _told_of_anonymity.add(name.bucket)
            logger.warning(
                "%s: no AWS credentials were found (environment, profiles, roles); reading anonymously. "
                "storage_options={'s3': {'anon': True}} says that this is meant.",
                name.folder,
            )
        self._searches += 1
        self._left.append(self._filesystems)
        self._filesystems = Filesystems(self._call, {**self._options, "anon": True})
        client = await connect(self._filesystems, name.scheme)
        assert client is not None
        client.found = False
        return client

    def _drop(self) -> None:
        """Forget the client with its credentials: the next one reads the environment, files and roles anew."""
        self._generation += 1
        self._client, self._former = None, self._client or self._former
        self._left.append(self._filesystems)
        self._filesystems = Filesystems(self._call, self._options)

    def _why_not(self, client: S3Client, signed: Signed) -> str:
        """Why a request cannot be the engine's own; "" where it can."""
        parts = urllib.parse.urlsplit(signed.url)
        self._endpoint = f"{parts.scheme}://{parts.netloc}"
        if not self._direct:
            return "WDS_DIRECT=0"
        if self._endpoint not in self._proxies:
            self._proxies[self._endpoint] = proxy_for(signed.url)
        return "a proxy is in the way" if self._proxies[self._endpoint] else client.by_itself()

    def _elsewhere(self, said: Said, bucket: str) -> bool:
        """Whether the bucket was asked for in the wrong region."""
        if said.operation:  # botocore follows by itself
            return False
        wrong = said.code in REGION_CODES or said.status in (301, 307)
        if wrong and said.region:
            self._regions[bucket] = said.region
        return wrong

    def _moved(self, said: Said) -> Fault:
        verdict = Verdict.EXPIRED if said.region else Verdict.FATAL
        where = f"; the bucket is in {said.region}" if said.region else ""
        return Fault(
            verdict, f"S3 answered {said}{where}", f"Set AWS_REGION={said.region or 'the region of the bucket'}."
        )

    def _at_endpoint(self, fault: Fault) -> Fault:
        if fault.verdict not in (Verdict.TRANSIENT, Verdict.STALLED) or not self._endpoint:
            return fault
        advice = f"{fault.advice} The endpoint follows AWS_REGION and AWS_ENDPOINT_URL_S3.".lstrip()
        return replace(fault, reason=f"{self._endpoint}: {fault.reason}", advice=advice)
