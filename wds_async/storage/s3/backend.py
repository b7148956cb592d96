"""S3 and what speaks its protocol: MinIO, Ceph, R2 and the like.

s3fs and botocore find the object's place and the credentials; the engine sends the GET, signed by header (Signature
Version 4, so that no bucket policy against query signatures applies). ``Range`` and ``If-Match`` are not signed, and
one signature serves all parts of a shard.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from wds_async.errors import UrlError
from wds_async.logs import warn_once
from wds_async.redact import redact
from wds_async.storage.base import Access, Answer, Call, Checksum, Description, Entry, Fault, Location, Request, Verdict
from wds_async.storage.checksums import amazon, amazon_etag
from wds_async.storage.cloud import CloudBackend
from wds_async.storage.filesystems import Filesystems
from wds_async.storage.generic import explain_foreign
from wds_async.storage.http.errors import with_place, with_proxy
from wds_async.storage.http.messages import fields_of, version_of
from wds_async.storage.options import NO_OPTIONS, Options
from wds_async.storage.s3.client import S3Client, connect
from wds_async.storage.s3.errors import (
    KEY_REFUSED,
    REGION_CODES,
    SESSION_OVER,
    explain_client,
    explain_refusal,
    refusal_of_answer,
    refusal_of_exception,
)
from wds_async.storage.s3.options import S3Name, with_limits
from wds_async.storage.secrets import hide_in_logs

__all__ = ["ObjectGet", "S3Backend"]

logger = logging.getLogger("wds_async")
_SIGNED_AT_MOST = 10_000
_SEARCHES_AT_MOST = 3
_RENEWED_EVERY_S = 5.0
# Time in which all requests are answered that a refused key or session signed: longer than any stall.
_ON_THE_WAY_S = 60.0


class S3Backend(CloudBackend):
    """Reads ``s3://`` and ``s3a://``. ``options`` are s3fs's (``key``, ``profile``, ``endpoint_url``, …)."""

    store = "S3"

    def __init__(self, call: Call, options: Options = NO_OPTIONS, **limits: Any) -> None:
        super().__init__(call, options, **limits)
        self._filesystems = self._filesystems_of(options)
        self._dropped: list[Filesystems] = []  # ranges may still be read by them
        self._client: S3Client | None = None
        self._former: S3Client | None = None
        self._connecting = asyncio.Lock()
        self._regions: dict[str, str] = {}
        self._searches = 0
        # `S3Client.proof` of the last signature for a URL: an answer to an older one says nothing about the present
        # credentials. And when each proof was first refused.
        self._signed_by: dict[str, int] = {}
        self._refused_at: dict[int, float] = {}
        self._dropped_at = -_RENEWED_EVERY_S
        self._endpoint = ""
        self._secrets.add(options.get("secret"), options.get("password"), options.get("token"))
        hide_in_logs(self._secrets, "botocore", "aiobotocore", "s3fs")

    async def access(self, location: Location) -> Access:
        name = _object_name(location)
        client = await self._connected(name)
        signed = await client.sign(name)
        self._remember(location.target, client)
        if self._why_not(client, signed.url):
            return await self._checked(ObjectGet(client, name), version_of)
        return Request(signed.url, signed.headers, renew_after=signed.renew_after, tls=client.tls, follows=False)

    async def entries(self, location: Location) -> AsyncIterator[Entry]:
        name = S3Name.of(location.target)
        client = await self._connected(name)
        self._remember(location.target, client)
        if not name.bucket:
            for bucket in (await client.client.list_buckets()).get("Buckets", []):
                yield Entry(f"{name.folder}{bucket['Name']}/", None)
            return
        pages = client.client.get_paginator("list_objects_v2").paginate(
            Bucket=name.bucket, Prefix=name.key, Delimiter="/", **client.arguments("ListObjectsV2")
        )
        async for page in pages:
            entries = [Entry(name.folder + item["Prefix"], None) for item in page.get("CommonPrefixes", [])]
            entries += [
                _entry(name.folder + item["Key"], item)
                for item in page.get("Contents", [])
                if item["Key"] != name.key  # a folder that was created is an object of that name
            ]
            for entry in sorted(entries, key=lambda entry: entry.url):
                yield entry

    async def describe(self, location: Location) -> Description:
        name = S3Name.of(location.target)
        client = await self._connected(name)
        signed = await client.sign(name if name.bucket else S3Name(name.scheme, "bucket", ""))
        why = self._why_not(client, signed.url)
        return Description("S3", self._endpoint, signed.identity, not why, why)

    def renew(self, location: Location) -> None:
        if time.monotonic() - self._dropped_at >= _RENEWED_EVERY_S:
            self._drop()

    def checksum(self, fields: Mapping[str, str]) -> Checksum | None:
        return amazon(fields)

    async def remote_checksum(self, location: Location) -> Checksum | None:
        name = S3Name.of(location.target)
        client = await self._connected(name)
        self._remember(location.target, client)
        head = await client.head(name, ChecksumMode="ENABLED")
        fields = fields_of(head["ResponseMetadata"]["HTTPHeaders"])
        return amazon(fields) or (None if name.is_directory else amazon_etag(fields))

    async def create(self, location: Location, data: bytes) -> bool:
        name = _object_name(location)
        client = await self._connected(name)
        self._remember(location.target, client)
        writer = os.urandom(16).hex()
        try:
            await client.put_new(name, data, writer)
        except Exception as exn:
            refusal = refusal_of_exception(exn)
            if refusal is None or (refusal.code != "PreconditionFailed" and refusal.status != 412):
                raise
            # aiohttp repeats a PUT by itself where the connection breaks, so what is there may be our own object.
            with contextlib.suppress(Exception):  # it may not be looked at
                return await client.writer(name) == writer
            return False
        return True

    async def remove(self, location: Location) -> None:
        name = _object_name(location)
        client = await self._connected(name)
        self._remember(location.target, client)
        await client.delete(name)

    async def certainly_creates(self, location: Location) -> bool:
        return (await self._connected(_object_name(location))).at_amazon

    async def close(self) -> None:
        for filesystems in (*self._dropped, self._filesystems):
            await filesystems.close()
        self._dropped.clear()
        self._client = None
        await super().close()

    # Credentials

    async def _connected(self, name: S3Name) -> S3Client:
        """Return the client, made at first use, and again after its credentials were dropped. Without credentials it
        reads anonymously, with one warning a process."""
        async with self._connecting:
            if self._client is not None:
                return self._client
            client = await connect(self._filesystems, name.scheme, self._secrets)
            if client is None:
                warn_once(
                    logger,
                    "s3 anonymous",
                    "%s: no AWS credentials were found (environment, profiles, roles); reading anonymously. "
                    "storage_options={'s3': {'anon': True}} says that this is meant.",
                    name.folder,
                )
                self._searches += 1
                self._use({**self._options, "anon": True})
                client = await connect(self._filesystems, name.scheme)
                assert client is not None
                client.missed = True
            client.use_regions(self._regions)
            self._client = client
            return client

    def _filesystems_of(self, options: Mapping[str, Any]) -> Filesystems:
        return Filesystems(self._call, with_limits(options, *self._timeouts_s))

    def _use(self, options: Mapping[str, Any]) -> None:
        self._dropped.append(self._filesystems)
        self._filesystems = self._filesystems_of(options)

    def _drop(self) -> None:
        """Forget the client with its credentials: the next one reads the environment, files and roles anew."""
        self._dropped_at = time.monotonic()
        self._client, self._former = None, self._client or self._former
        self._use(self._options)

    def _remember(self, url: str, client: S3Client) -> None:
        if len(self._signed_by) >= _SIGNED_AT_MOST:
            self._signed_by.clear()
        self._signed_by[url] = client.proof

    def _renewed(self, url: str) -> bool:
        """Return whether another key or session may sign for ``url`` after a refusal: it does already, or credentials
        are read anew. Not where the same one is still refused when all its earlier requests are answered."""
        client, now = self._client, time.monotonic()
        if client is None or self._signed_by.get(url, client.proof) != client.proof:
            return True
        if now - self._refused_at.setdefault(client.proof, now) > _ON_THE_WAY_S:
            return False
        self._drop()
        return True

    # Errors

    def _explain(self, outcome: Answer | BaseException, url: str) -> Fault:
        refusal = refusal_of_answer(outcome) if isinstance(outcome, Answer) else refusal_of_exception(outcome)
        if refusal is None:
            assert not isinstance(outcome, Answer)
            fault = with_proxy(explain_client(outcome) or explain_foreign(outcome), outcome, self._endpoint)
            settings = (
                ""
                if "AWS_ENDPOINT_URL_S3" in fault.advice
                else "The endpoint follows AWS_REGION and AWS_ENDPOINT_URL_S3."
            )
            return with_place(fault, f"S3 at {self._endpoint}", settings) if self._endpoint else fault
        name, client = S3Name.of(url), self._client or self._former
        identity = client.identity if client is not None else "no credentials yet"
        refusal = replace(refusal, message=self._secrets.hidden(refusal.message))
        if refusal.code in REGION_CODES or refusal.status in (301, 307):
            followed = refusal.region and not refusal.operation  # botocore follows by itself, where it can
            if followed:
                self._regions[name.bucket] = refusal.region
            region = f"AWS_REGION={refusal.region}" if refusal.region else "AWS_REGION to the region of the bucket"
            return Fault(
                Verdict.EXPIRED if followed else Verdict.FATAL,
                f"S3 answered {refusal} to {identity}"
                + (f"; the bucket is in {refusal.region}" if refusal.region else ""),
                f"Set {region}, and check AWS_ENDPOINT_URL_S3 where the store is another than Amazon's.",
            )
        missed = client is not None and client.missed
        fault = explain_refusal(refusal, identity, anonymous=client is not None and client.anonymous, missed=missed)
        if refusal.code == "NoSuchKey" and "%" in name.key:
            fault = replace(fault, advice=f"{fault.advice} It is taken literally, without percent-decoding.")
        # Metadata services turn clients away when all workers of a host start at once: look for credentials again.
        again = missed and fault.verdict is Verdict.DENIED and self._searches < _SEARCHES_AT_MOST
        rotated = refusal.code in KEY_REFUSED and client is not None and client.credentials is not None
        if again or rotated or refusal.code in SESSION_OVER:
            return replace(fault, verdict=Verdict.EXPIRED if self._renewed(url) else Verdict.DENIED)
        return fault

    def _why_not(self, client: S3Client, url: str) -> str:
        """Return why a request cannot be the engine's own; "" where it can."""
        parts = urllib.parse.urlsplit(url)
        self._endpoint = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"  # it may hold a password
        return self._why_indirect(url) or client.by_itself()


def _object_name(location: Location) -> S3Name:
    name = S3Name.of(location.target)
    if not name.bucket or not name.key:
        raise UrlError(f"{redact(location.target)}: names no object; write s3://bucket/key")
    return name


def _entry(url: str, item: Mapping[str, Any]) -> Entry:
    version = f"etag {etag}" if (etag := item.get("ETag")) else ""
    return Entry(url, item["Size"], item["LastModified"].timestamp(), version)


_PIECE_BYTES = 1 << 20


class ObjectGet:
    """A `checked.RangeGet` of one object; raises what botocore does. Its client is used, and not s3fs's methods, which
    give the body only, and try five times."""

    def __init__(self, client: S3Client, name: S3Name) -> None:
        self._client, self._name = client, name

    @contextlib.asynccontextmanager
    async def __call__(self, start: int, stop: int, etag: str) -> AsyncIterator[tuple[Answer, AsyncIterator[bytes]]]:
        try:
            found = await self._client.get(
                self._name, Range=f"bytes={start}-{stop - 1}", **({"IfMatch": etag} if etag else {})
            )
        except Exception as exn:
            meta = (getattr(exn, "response", None) or {}).get("ResponseMetadata") or {}
            if meta.get("HTTPStatusCode") != 416:  # an object may be empty
                raise
            fields = fields_of(meta.get("HTTPHeaders") or {})
            if not fields.get("content-range"):  # some stores leave the size out
                size = (await self._client.head(self._name))["ContentLength"]
                fields = {**fields, "content-range": f"bytes */{size}"}
            yield Answer(416, fields), _pieces(None)
            return
        meta = found["ResponseMetadata"]
        try:
            yield Answer(meta["HTTPStatusCode"], fields_of(meta["HTTPHeaders"])), _pieces(found["Body"])
        finally:
            found["Body"].close()


async def _pieces(body: Any) -> AsyncIterator[bytes]:
    while body is not None and (piece := await body.read(_PIECE_BYTES)):
        yield bytes(piece)
