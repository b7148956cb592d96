"""Google Cloud Storage by its JSON API; gcsfs where a proxy or an option requires it."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import difflib
import functools
import json
import math
import re
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from wds_async.config import proxy_for, transfer_config
from wds_async.environment import variable
from wds_async.errors import ConfigError, UrlError
from wds_async.redact import redact
from wds_async.storage import retry
from wds_async.storage.base import (
    Access,
    Answer,
    Backend,
    Call,
    Checksum,
    Contradiction,
    Description,
    Entry,
    Fault,
    Location,
    Pages,
    RefusedAnswer,
    Request,
    Stream,
    Verdict,
)
from wds_async.storage.checked import CheckedRanges
from wds_async.storage.checksums import google, google_object
from wds_async.storage.filesystems import Filesystems
from wds_async.storage.gcs.credentials import GoogleIdentity, GoogleTokens, emulator, find_identity, metadata_project
from wds_async.storage.gcs.errors import explain
from wds_async.storage.http.backend import HttpBackend
from wds_async.storage.http.errors import with_place, with_proxy
from wds_async.storage.http.messages import PLAIN_HEADERS, answer_of, version_of
from wds_async.storage.options import NO_OPTIONS, Options
from wds_async.storage.preload import extra_needed
from wds_async.storage.secrets import Secrets

__all__ = ["GcsBackend", "MediaGet", "check_options", "pinned_by"]

_KNOWN = frozenset({
    "access", "asynchronous", "batch_size", "block_size", "cache_timeout", "cache_type", "check_connection",
    "consistency", "default_location", "endpoint_url", "experimental_zonal_hns_support", "listings_expiry_time",
    "loop", "max_paths", "project", "requester_pays", "requests_timeout", "secure_serialize", "session_kwargs",
    "skip_instance_cache", "timeout", "token", "use_listings_cache", "version_aware",
})  # fmt: skip


def check_options(options: Mapping[str, Any]) -> None:
    """ConfigError, without any value, for an option that means nothing, and for an ``endpoint_url`` that is no URL."""
    unknown = sorted(str(name) for name in options if name not in _KNOWN)
    if unknown:
        near = difflib.get_close_matches(unknown[0], _KNOWN, 1)
        meant = f"did you mean {near[0]}?" if near else "they are gcsfs's: token, project, endpoint_url, …"
        raise ConfigError(f"storage_options for gs: {', '.join(unknown)} means nothing here; {meant}")
    endpoint = options.get("endpoint_url")
    if endpoint:
        parts = urllib.parse.urlsplit(str(endpoint))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"storage_options for gs: endpoint_url={redact(str(endpoint))!r}: write https://host")


_GENERATION = re.compile(r"#(\d+)$|\?(?:[^#]*&)?generation=(\d+)(?:&[^#]*)?$")
_LISTED = "items(name,size,updated),prefixes,nextPageToken"
_PAGE = "1000"
_RENEWED_EVERY_S = 5.0
_PLACE = "The endpoint follows STORAGE_EMULATOR_HOST and endpoint_url= of storage_options."


class GcsBackend(Backend):
    """Google Cloud Storage. Credentials are looked for when they are first needed, on a thread of ``call``."""

    def __init__(
        self,
        call: Call,
        options: Options = NO_OPTIONS,
        *,
        direct: bool = True,
        connect_timeout_s: float = 5.0,
        stall_timeout_s: float = 30.0,
    ) -> None:
        self._call = call
        self._options = options
        self._direct = direct
        self._http = HttpBackend(connect_timeout_s=connect_timeout_s, stall_timeout_s=stall_timeout_s)
        self._secrets = Secrets()
        self._identity = GoogleIdentity("")
        self._identified = False
        self._renewed_at = -math.inf
        self._tokens = GoogleTokens(call, None, secrets=self._secrets)
        self._filesystems: Filesystems | None = None
        self._ready = asyncio.Lock()

    async def access(self, location: Location) -> Access:
        if self._why_not():
            return await self._ranges(location.target)
        await self._identify()
        bucket, key, generation = self._split(location.target)
        if not key:
            raise IsADirectoryError(f"{bucket}: a bucket, not an object")
        query = {"alt": "media", **({"generation": generation} if generation else {}), **await self._payer()}
        path = f"/download/storage/v1/b/{_quote(bucket)}/o/{_quote(key)}"
        headers, renew_after = await self._tokens.headers()
        media = f"{self._endpoint()}{path}?{urllib.parse.urlencode(query)}"
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
            path = f"/storage/v1/b/{_quote(bucket)}/o"
            query = {"delimiter": "/", "prefix": prefix, "fields": _LISTED, **await self._payer()}
        else:
            path = "/storage/v1/b"
            query = {"project": await self._project(location.target), "fields": "items(name),nextPageToken"}
        query["maxResults"] = _PAGE
        pages = Pages(f"Google Cloud Storage at {redact(self._endpoint())}", location.target)
        while True:
            page = await self._page(path, query, location)
            items = page.get("items", [])
            if not bucket:
                found = [Entry(f"{location.target}{item['name']}/", None) for item in items]
            else:
                below = (item for item in items if len(item["name"]) > len(prefix))
                found = [_entry(location.target, item, len(prefix)) for item in below]
                found += [Entry(location.target + folder[len(prefix) :], None) for folder in page.get("prefixes", [])]
            for entry in sorted(found, key=lambda entry: entry.url):
                yield entry
            if not page.get("nextPageToken"):
                return
            pages.turn(str(page["nextPageToken"]))
            query["pageToken"] = page["nextPageToken"]

    async def describe(self, location: Location) -> Description:
        await self._identify()
        why = self._why_not()
        return Description("Google Cloud Storage", redact(self._endpoint()), self._identity.who, not why, why)

    def streamed(self, request: Request) -> Stream:
        return self._http.streamed(request)

    def classify(self, outcome: Answer | BaseException, location: Location) -> Fault:
        if isinstance(outcome, RefusedAnswer):
            outcome = outcome.answer
        if isinstance(outcome, Answer):
            outcome = self._secrets.of_answer(outcome)
        generation = self._split(location.target)[2]
        fault = explain(outcome, self._identity, generation=generation, renewable=self._tokens.refreshable)
        if fault.verdict is Verdict.EXPIRED:
            self._tokens.refuse()
        if isinstance(outcome, OSError) and "Google" not in fault.reason:  # nobody has answered
            fault = with_proxy(fault, outcome, self._endpoint())
            fault = with_place(fault, f"Google Cloud Storage at {redact(self._endpoint())}", _PLACE)
        return self._secrets.of_fault(fault)

    def renew(self, location: Location) -> None:
        now = time.monotonic()
        if now - self._renewed_at >= _RENEWED_EVERY_S:
            self._renewed_at = now
            self._identified = False

    def checksum(self, fields: Mapping[str, str]) -> Checksum | None:
        return google(fields)

    async def remote_checksum(self, location: Location) -> Checksum | None:
        await self._identify()
        if self._only_gcsfs():
            return None
        bucket, key, generation = self._split(location.target)
        which = {"generation": generation} if generation else {}
        query = {"fields": "crc32c,md5Hash,contentEncoding", **which, **await self._payer()}
        return google_object(await self._ask(f"/storage/v1/b/{_quote(bucket)}/o/{_quote(key)}", query))

    async def close(self) -> None:
        await self._http.close()
        if self._filesystems is not None:
            await self._filesystems.close()

    def _endpoint(self) -> str:
        given = self._options.get("endpoint_url") or emulator()
        universe = variable("GOOGLE_CLOUD_UNIVERSE_DOMAIN") or "googleapis.com"
        return str(given or f"https://storage.{universe}").rstrip("/")

    def _why_not(self) -> str:
        """Return why gcsfs reads in our place; "" where it does not."""
        if not self._direct:
            return "WDS_DIRECT=0"
        if proxy_for(self._endpoint()) is not None:
            return "a proxy is in the way"
        return self._only_gcsfs()

    def _only_gcsfs(self) -> str:
        """Return why only gcsfs may read; "" where the engine may."""
        if self._options.get("session_kwargs"):
            return "session_kwargs= are for gcsfs's own client"
        certificate = (variable("GOOGLE_API_USE_CLIENT_CERTIFICATE") or "").lower() == "true"
        return "client certificates are presented by gcsfs" if certificate else ""

    def _split(self, url: str) -> tuple[str, str, str]:
        """Bucket, key and generation, as gcsfs reads them: "#" and "?" belong to the key where no number follows."""
        bucket, _, key = url.partition("://")[2].partition("/")
        found = _GENERATION.search(key) if self._options.get("version_aware", True) else None
        if found is None:
            return bucket, key, ""
        return bucket, key[: found.start()], found[1] or found[2]

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
        project = pays if isinstance(pays, str) else await self._own_project()
        if not project:
            raise ConfigError("requester_pays=True: name the project that is billed, requester_pays='PROJECT'")
        return {"userProject": project}

    async def _project(self, url: str) -> str:
        if not (project := await self._own_project()):
            raise UrlError(
                f"{redact(url)}: buckets are listed by project: set GOOGLE_CLOUD_PROJECT, or name a bucket, gs://BUCKET/"
            )
        return project

    async def _own_project(self) -> str:
        if self._identity.project or self._identity.name != "metadata server":
            return self._identity.project
        return str(await self._call(metadata_project))

    async def _ranges(self, url: str) -> Access:
        if not self._split(url)[1]:
            raise IsADirectoryError(f"{self._split(url)[0]}: a bucket, not an object")
        filesystems = await self._gcsfs(url)

        async def find() -> tuple[Any, str]:
            await self._tokens.headers()
            return await filesystems.find(url)

        ranges = await CheckedRanges.of(MediaGet(find), pinned_by, sum(self._http.timeouts_s))
        if ranges is None:
            raise Contradiction("asked for the first byte, the store answered with the whole object")
        return ranges

    async def _gcsfs(self, url: str) -> Filesystems:
        await self._identify()
        await self._tokens.headers()
        if self._filesystems is None:
            # gcsfs gets a token that is always fresh, because it would refresh on the loop, the environment's proxy,
            # which its session does not look for, and our patience: its own is without end.
            session = {"trust_env": True, **(self._options.get("session_kwargs") or {})}
            own = {"token": self._tokens.bearer, "session_kwargs": session}
            given = {"requests_timeout": self._http.timeout(), **self._options, **own}
            if self._options.get("requester_pays"):
                given["requester_pays"] = (await self._payer())["userProject"]
            self._filesystems = Filesystems(self._call, given)
        _without_retries((await self._filesystems.find(url))[0])
        return self._filesystems

    async def _page(self, path: str, query: dict[str, str], location: Location) -> dict[str, Any]:
        """Return one page of a listing, with retries. Raise `RefusedAnswer`, or the network's exception."""
        return await retry.ask(
            lambda: self._ask(path, query), lambda exn: self.classify(exn, location), transfer_config().retry
        )

    async def _ask(self, path: str, query: dict[str, str]) -> dict[str, Any]:
        session = await self._http.session()
        proof, _ = await self._tokens.headers()
        headers = dict((*PLAIN_HEADERS, *proof))
        async with session.get(self._endpoint() + path, params=query, headers=headers) as response:
            if response.status != 200:
                raise RefusedAnswer(await answer_of(response))
            page = json.loads(await response.read())
            return page if isinstance(page, dict) else {}


def _without_retries(filesystem: Any) -> None:
    """Let gcsfs try once: the engine tries again itself, and knows better tokens. gcsfs would repeat a refused one for
    half a minute, and log it."""
    once = getattr(type(filesystem)._request, "__wrapped__", None)
    if once is not None:
        filesystem._request = functools.partial(once, filesystem)


def _quote(name: str) -> str:
    return urllib.parse.quote(name, safe="")


def _entry(url: str, item: dict[str, Any], skipped: int) -> Entry:
    modified = None
    if "updated" in item:
        modified = datetime.datetime.fromisoformat(item["updated"]).timestamp()
    return Entry(url + item["name"][skipped:], int(item.get("size", 0)), modified)


def pinned_by(fields: Mapping[str, str], total: int | None) -> str:
    """See `checked.Identify`. The generation counts too: an emulator may give no ETag."""
    generation = fields.get("x-goog-generation", "")
    return f"{version_of(fields, total)}{f', generation {generation}' if generation else ''}"


class MediaGet:
    """A `checked.RangeGet` of one object; raises `RefusedAnswer`, or what aiohttp does. ``find`` gives gcsfs's
    filesystem, with credentials that hold now, and the path in it. Its session is asked, and not its methods, which
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
            yield answer, response.content.iter_any()
        finally:
            response.close()
