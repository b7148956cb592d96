"""Google Cloud Storage by its JSON API; gcsfs where a proxy or an option requires it."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import json
import math
import os
import re
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from wds_async.config import transfer_config
from wds_async.environment import variable
from wds_async.errors import ConfigError, UrlError
from wds_async.redact import redact
from wds_async.storage import retry
from wds_async.storage.base import (
    Access,
    Answer,
    Call,
    Checksum,
    Description,
    Entry,
    Fault,
    Location,
    Pages,
    RefusedAnswer,
    Request,
    Verdict,
)
from wds_async.storage.checksums import google, google_object
from wds_async.storage.cloud import CloudBackend
from wds_async.storage.filesystems import Filesystems
from wds_async.storage.gcs.credentials import GoogleIdentity, GoogleTokens, emulator, find_identity, metadata_project
from wds_async.storage.gcs.errors import explain
from wds_async.storage.http.messages import PLAIN_HEADERS, answer_of, version_of
from wds_async.storage.options import NO_OPTIONS, Options, check_names
from wds_async.storage.preload import extra_needed

__all__ = ["GcsBackend", "MediaGet", "check_options", "pinned_by"]

_OPTIONS = (
    "token", "project", "endpoint_url", "access", "asynchronous", "batch_size", "block_size", "cache_timeout",
    "cache_type", "check_connection", "consistency", "default_location", "experimental_zonal_hns_support",
    "listings_expiry_time", "loop", "max_paths", "requester_pays", "requests_timeout", "secure_serialize",
    "session_kwargs", "skip_instance_cache", "timeout", "use_listings_cache", "version_aware",
)  # fmt: skip
_GENERATION = re.compile(r"#(\d+)$|\?(?:[^#]*&)?generation=(\d+)(?:&[^#]*)?$")
_LISTED = "items(name,size,updated,generation),prefixes,nextPageToken"
_PAGE = "1000"
_RENEWED_EVERY_S = 5.0


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError, without any value, for an unknown option, and for an ``endpoint_url`` that is no URL."""
    check_names("gs", options, _OPTIONS)
    if endpoint := options.get("endpoint_url"):
        parts = urllib.parse.urlsplit(str(endpoint))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"storage_options for gs: endpoint_url={redact(str(endpoint))!r}: write https://host")


class GcsBackend(CloudBackend):
    """Google Cloud Storage. Credentials are looked for when they are first needed, on a thread of ``call``."""

    store = "Google Cloud Storage"
    endpoint_settings = "The endpoint follows STORAGE_EMULATOR_HOST and endpoint_url= of storage_options."

    def __init__(self, call: Call, options: Options = NO_OPTIONS, **limits: Any) -> None:
        super().__init__(call, options, **limits)
        self._identity = GoogleIdentity("")
        self._identified = False
        self._renewed_at = -math.inf
        self._tokens = GoogleTokens(call, None, secrets=self._secrets)
        self._filesystems: Filesystems | None = None
        self._limits = limits
        self._writes: GcsBackend | None = None
        self._ready = asyncio.Lock()

    async def access(self, location: Location) -> Access:
        bucket, key, query = self._split(location.target)
        if not key:
            raise IsADirectoryError(f"{bucket}: a bucket, not an object")
        if self._why_not():
            filesystems = await self._gcsfs(location.target)

            async def find() -> tuple[Any, str]:
                await self._tokens.headers()
                return await filesystems.find(location.target)

            return await self._checked(MediaGet(find), pinned_by)
        await self._identify()
        headers, renew_after = await self._tokens.headers()
        query = {"alt": "media", **query, **await self._payer()}
        media = f"{self._endpoint()}/download{_object_path(bucket, key)}?{urllib.parse.urlencode(query)}"
        return Request(media, (*PLAIN_HEADERS, *headers), renew_after=renew_after)

    async def entries(self, location: Location) -> AsyncIterator[Entry]:
        """See `Backend.entries`; ``gs://`` alone lists the buckets of the project. In order of names."""
        bucket, _, prefix = location.target.partition("://")[2].partition("/")
        await self._identify()
        if self._only_gcsfs():
            filesystems = await self._gcsfs(location.target)
            entries = [entry async for entry in filesystems.entries(location.target)]
            for entry in sorted(entries, key=lambda entry: entry.url):
                yield entry
            return
        if bucket:
            path, query = f"/storage/v1/b/{_quote(bucket)}/o", {"delimiter": "/", "prefix": prefix, "fields": _LISTED}
            query |= await self._payer()
        else:
            path, query = "/storage/v1/b", {"project": await self._project(), "fields": "items(name),nextPageToken"}
            if not query["project"]:
                advice = "set GOOGLE_CLOUD_PROJECT, or name a bucket, gs://BUCKET/"
                raise UrlError(f"{redact(location.target)}: buckets are listed by project: {advice}")
        query["maxResults"] = _PAGE
        pages = Pages(f"Google Cloud Storage at {redact(self._endpoint())}", location.target)
        while True:
            page = await retry.ask(
                lambda: self._get_json(path, query), lambda exn: self.classify(exn, location), transfer_config().retry
            )
            items = page.get("items", [])
            if not bucket:
                entries = [Entry(f"{location.target}{item['name']}/", None) for item in items]
            else:
                entries = [
                    _entry(location.target, item, len(prefix)) for item in items if len(item["name"]) > len(prefix)
                ]
                entries += [Entry(location.target + folder[len(prefix) :], None) for folder in page.get("prefixes", [])]
            for entry in sorted(entries, key=lambda entry: entry.url):
                yield entry
            if not page.get("nextPageToken"):
                return
            pages.turn(str(page["nextPageToken"]))
            query["pageToken"] = page["nextPageToken"]

    async def describe(self, location: Location) -> Description:
        await self._identify()
        why = self._why_not()
        return Description(self.store, redact(self._endpoint()), self._identity.who, not why, why)

    def renew(self, location: Location) -> None:
        now = time.monotonic()
        if now - self._renewed_at >= _RENEWED_EVERY_S:
            self._renewed_at, self._identified = now, False

    def checksum(self, fields: Mapping[str, str]) -> Checksum | None:
        return google(fields)

    async def remote_checksum(self, location: Location) -> Checksum | None:
        await self._identify()
        if self._only_gcsfs():
            return None
        bucket, key, query = self._split(location.target)
        query = {"fields": "crc32c,md5Hash,contentEncoding", **query, **await self._payer()}
        return google_object(await self._get_json(_object_path(bucket, key), query))

    async def create(self, location: Location, data: bytes) -> bool:
        bucket, key, _ = self._object(location)
        writes = self._writing()
        await writes._identify()
        session = await writes._http.session()
        kind, body = _multipart({"name": key}, data)
        headers = dict((*PLAIN_HEADERS, *(await writes._tokens.headers())[0], ("Content-Type", kind)))
        query = {"uploadType": "multipart", "ifGenerationMatch": "0", **await writes._payer()}
        url = f"{self._endpoint()}/upload/storage/v1/b/{_quote(bucket)}/o"
        async with session.post(url, params=query, headers=headers, data=body) as response:
            if response.status not in (200, 412):
                raise RefusedAnswer(await answer_of(response))
            return response.status == 200

    async def remove(self, location: Location) -> None:
        bucket, key, query = self._object(location)
        writes = self._writing()
        await writes._identify()
        session = await writes._http.session()
        headers = dict((*PLAIN_HEADERS, *(await writes._tokens.headers())[0]))
        url = self._endpoint() + _object_path(bucket, key)
        async with session.delete(url, params={**query, **await writes._payer()}, headers=headers) as response:
            if response.status not in (200, 204, 404):
                raise RefusedAnswer(await answer_of(response))

    async def certainly_creates(self, location: Location) -> bool:
        return True

    def _writing(self) -> GcsBackend:
        """Return the backend whose tokens may write; those of reading may not."""
        if "access" in self._options:
            return self
        if self._writes is None:
            options = Options({**self._options, "access": "read_write"})
            self._writes = GcsBackend(self._call, options, **self._limits)
            self._writes._secrets = self._secrets
        return self._writes

    async def close(self) -> None:
        if self._writes is not None:
            await self._writes.close()
        await super().close()
        if self._filesystems is not None:
            await self._filesystems.close()

    def _explain(self, outcome: Answer | BaseException, url: str) -> Fault:
        generation = self._split(url)[2].get("generation", "")
        fault = explain(outcome, self._identity, generation=generation, renewable=self._tokens.refreshable)
        if fault.verdict is Verdict.EXPIRED:
            for backend in (self, self._writes):
                if backend is not None:
                    backend._tokens.refuse()
        if isinstance(outcome, OSError) and "Google" not in fault.reason:  # no answer is behind it
            fault = self._at_endpoint(fault, outcome, self._endpoint())
        return fault

    def _endpoint(self) -> str:
        named = self._options.get("endpoint_url") or emulator()
        universe = variable("GOOGLE_CLOUD_UNIVERSE_DOMAIN") or "googleapis.com"
        return str(named or f"https://storage.{universe}").rstrip("/")

    def _why_not(self) -> str:
        """Return why gcsfs reads in our place; "" where it does not."""
        return self._why_indirect(self._endpoint()) or self._only_gcsfs()

    def _only_gcsfs(self) -> str:
        """Return why only gcsfs may read; "" where the engine may."""
        if self._options.get("session_kwargs"):
            return "session_kwargs= are for gcsfs's own client"
        certificate = (variable("GOOGLE_API_USE_CLIENT_CERTIFICATE") or "").lower() == "true"
        return "client certificates are presented by gcsfs" if certificate else ""

    def _split(self, url: str) -> tuple[str, str, dict[str, str]]:
        """Return bucket, key and the query of a generation, as gcsfs reads them: "#" and "?" belong to the key where no
        number follows."""
        bucket, _, key = url.partition("://")[2].partition("/")
        pin = _GENERATION.search(key) if self._options.get("version_aware", True) else None
        return (bucket, key, {}) if pin is None else (bucket, key[: pin.start()], {"generation": pin[1] or pin[2]})

    def _object(self, location: Location) -> tuple[str, str, dict[str, str]]:
        """Return the same of an object that is written or removed. UrlError where none is named."""
        bucket, key, query = self._split(location.target)
        if not key:
            raise UrlError(f"{redact(location.target)}: names no object; write gs://BUCKET/OBJECT")
        return bucket, key, query

    async def _identify(self) -> None:
        async with self._ready:
            if not self._identified:
                check_options(self._options)
                with extra_needed("gs:// with credentials", "gcs"):
                    self._identity = await self._call(find_identity, self._options)
                self._tokens = GoogleTokens(self._call, self._identity.credentials, self._tokens, self._secrets)
                self._identified = True

    async def _payer(self) -> dict[str, str]:
        """Return the project that is billed, where the requester pays. ConfigError where it is not known."""
        pays = self._options.get("requester_pays")
        if not pays:
            return {}
        project = pays if isinstance(pays, str) else await self._project()
        if not project:
            raise ConfigError("requester_pays=True: name the project that is billed, requester_pays='PROJECT'")
        return {"userProject": project}

    async def _project(self) -> str:
        if self._identity.project or self._identity.name != "metadata server":
            return self._identity.project
        return str(await self._call(metadata_project))

    async def _gcsfs(self, url: str) -> Filesystems:
        await self._identify()
        await self._tokens.headers()
        if self._filesystems is None:
            # gcsfs gets a token that is always fresh, because it would refresh on the loop, the environment's proxy,
            # which its session ignores, and our time limits: its own are without end.
            session = {"trust_env": True, **(self._options.get("session_kwargs") or {})}
            own = {"token": self._tokens.bearer, "session_kwargs": session}
            if payer := await self._payer():
                own["requester_pays"] = payer["userProject"]
            self._filesystems = Filesystems(
                self._call, {"requests_timeout": self._http.timeout(), **self._options, **own}
            )
        filesystem, _ = await self._filesystems.find(url)
        # The engine retries itself; gcsfs would repeat a refused token for half a minute, and log it.
        if (once := getattr(type(filesystem)._request, "__wrapped__", None)) is not None:
            filesystem._request = functools.partial(once, filesystem)
        return self._filesystems

    async def _get_json(self, path: str, query: dict[str, str]) -> dict[str, Any]:
        """Return the answer of the JSON API. Raise `RefusedAnswer`, or the network's exception."""
        session = await self._http.session()
        headers = dict((*PLAIN_HEADERS, *(await self._tokens.headers())[0]))
        async with session.get(self._endpoint() + path, params=query, headers=headers) as response:
            if response.status != 200:
                raise RefusedAnswer(await answer_of(response))
            page = json.loads(await response.read())
            return page if isinstance(page, dict) else {}


def _multipart(metadata: Mapping[str, Any], data: bytes) -> tuple[str, bytes]:
    """Return the type and body of an upload with its metadata, which an emulator reads conditions with."""
    boundary = os.urandom(16).hex()
    head = f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(metadata)}\r\n"
    start = f"{head}--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n".encode()
    return f"multipart/related; boundary={boundary}", b"".join((start, data, f"\r\n--{boundary}--\r\n".encode()))


def _quote(name: str) -> str:
    return urllib.parse.quote(name, safe="")


def _object_path(bucket: str, key: str) -> str:
    return f"/storage/v1/b/{_quote(bucket)}/o/{_quote(key)}"


def _entry(url: str, item: dict[str, Any], skipped: int) -> Entry:
    modified = datetime.datetime.fromisoformat(item["updated"]).timestamp() if "updated" in item else None
    size, generation = int(item.get("size", 0)), item.get("generation")
    version = f"generation {generation}, {size} bytes" if generation else ""
    return Entry(url + item["name"][skipped:], size, modified, version)


def pinned_by(fields: Mapping[str, str], total: int | None) -> str:
    """See `checked.Identify`. The generation counts too: an emulator may give no ETag."""
    generation = fields.get("x-goog-generation", "")
    return f"{version_of(fields, total)}{f', generation {generation}' if generation else ''}"


class MediaGet:
    """A `checked.RangeGet` of one object; raises `RefusedAnswer`, or what aiohttp does. ``find`` gives gcsfs's
    filesystem, with credentials that hold now, and the path in it. Its session is used, and not its methods, which
    drop status and head, and try six times."""

    def __init__(self, find: Callable[[], Awaitable[tuple[Any, str]]]) -> None:
        self._find = find

    @contextlib.asynccontextmanager
    async def __call__(self, start: int, stop: int, etag: str) -> AsyncIterator[tuple[Answer, AsyncIterator[bytes]]]:
        filesystem, path = await self._find()
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        await filesystem._set_session()
        response = await filesystem.session.get(
            filesystem.url(path),
            params=filesystem._get_params({}),
            headers=filesystem._get_headers({**headers, **({"If-Match": etag} if etag else {})}),
            timeout=filesystem.requests_timeout,
        )
        try:
            answer = await answer_of(response)
            if answer.status >= 300 and answer.status != 416:
                raise RefusedAnswer(answer)
            if answer.status == 416 and "content-range" not in answer.fields:  # an emulator leaves the size out
                size = (await filesystem._info(path))["size"]
                answer = Answer(416, {**answer.fields, "content-range": f"bytes */{size}"})
            yield answer, response.content.iter_any()
        finally:
            response.close()
