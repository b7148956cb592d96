"""Azure Blob Storage: requests with a signature or a token of our own, listings by Azure's own client.

``az://``, ``abfs(s)://`` and, where credentials for the account are known, ``https://account.blob.core.windows.net``;
without them that last is a web server like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from typing import Any

from wds_async.errors import UrlError
from wds_async.redact import redact
from wds_async.storage.azure.account import (
    Account,
    AccountAccess,
    Blob,
    account_of,
    has_credentials,
    parse,
    without_ours,
)
from wds_async.storage.azure.errors import (
    answer_of,
    code_of,
    explain_answer,
    explain_client,
    out_of_time,
    unauthenticated,
)
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
    error_for,
)
from wds_async.storage.checksums import azure
from wds_async.storage.cloud import CloudBackend
from wds_async.storage.http.messages import PLAIN_HEADERS
from wds_async.storage.options import NO_OPTIONS, Options

__all__ = ["AzureBackend"]

_NO_SUCH_HOST = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


class AzureBackend(CloudBackend):
    """Azure Blob Storage. ``options`` are adlfs's; all others go to DefaultAzureCredential."""

    store = "Azure Blob Storage"
    endpoint_settings = "The endpoint follows AZURE_STORAGE_ACCOUNT_NAME or AZURE_STORAGE_CONNECTION_STRING."

    def __init__(self, call: Call, options: Options = NO_OPTIONS, **limits: Any) -> None:
        own = len(without_ours(options)) < len(options)  # options with a name of adlfs's are not for a web server
        super().__init__(call, options, web_options=NO_OPTIONS if own else options, **limits)
        self._accesses: dict[Account, AccountAccess] = {}
        # By the account that a URL names, each with whether it is read like any web server: reading the environment for
        # each of many small shards would cost more than requesting them.
        self._by_endpoint: dict[tuple[bool, str], tuple[AccountAccess, bool]] = {}
        self._resolved: dict[str, asyncio.Future[None]] = {}

    async def access(self, location: Location) -> Access:
        blob, access, plain = self._of(location.target)
        if plain:
            return await self._http.access(location)
        if not blob.name:
            raise UrlError(
                f"{redact(location.target)} names a container, not a blob: write a folder's URL with a final slash"
            )
        if self._why_indirect(access.account.endpoint):
            return await self._http.by_aiohttp(functools.partial(_request, access, blob))
        await self._resolve(access.account, location.target)
        return await _request(access, blob)

    async def entries(self, location: Location) -> AsyncIterator[Entry]:
        blob, access, _ = self._of(location.target)
        try:
            service = await access.service()
            if not blob.container:
                async for container in service.list_containers():
                    yield Entry(f"{location.target}{container.name}/", None)
                return
            client = service.get_container_client(blob.container)
            listing = client.walk_blobs(name_starts_with=blob.name or None, delimiter="/").by_page()
            pages = Pages(f"Azure at {redact(access.account.endpoint)}", location.target)
            async for page in listing:
                async for item in page:
                    yield _entry(location.target, blob, item)
                if listing.continuation_token:
                    pages.turn(str(listing.continuation_token))
        except Exception as exn:
            if (answer := answer_of(exn)) is not None:
                raise RefusedAnswer(answer) from None
            raise

    async def describe(self, location: Location) -> Description:
        blob, access, plain = self._of(location.target)
        if plain:
            return await self._http.describe(location)
        await access.grant(blob)
        why = self._why_indirect(access.account.endpoint)
        return Description(self.store, redact(access.account.endpoint), access.identity, not why, why)

    def renew(self, location: Location) -> None:
        blob, access, plain = self._of(location.target)
        if plain:
            self._http.renew(location)
        else:
            access.lapsed(blob, surely=False)

    def checksum(self, fields: Mapping[str, str]) -> Checksum | None:
        return azure(fields)

    async def remote_checksum(self, location: Location) -> Checksum | None:
        blob, access, plain = self._of(location.target)
        if plain:
            return await self._http.remote_checksum(location)
        return azure(await self._http.head(await _request(access, blob)))

    async def create(self, location: Location, data: bytes) -> bool:
        blob, access, plain = self._of(location.target)
        if plain:
            return await self._http.create(location, data)
        client = await _client_of(blob, access, location)
        await self._resolve(access.account, location.target)
        # aiohttp repeats a PUT by itself where the connection breaks, so what is there may be our own blob.
        metadata = {"wds_async_writer": os.urandom(16).hex()}
        try:
            await client.upload_blob(data, overwrite=False, metadata=metadata)
        except Exception as exn:
            answer = answer_of(exn)
            if answer is None:
                raise
            if code_of(answer) not in ("BlobAlreadyExists", "ConditionNotMet"):
                raise RefusedAnswer(answer) from None
            with contextlib.suppress(Exception):  # it cannot be looked at
                return bool((await client.get_blob_properties()).metadata == metadata)
            return False
        return True

    async def remove(self, location: Location) -> None:
        blob, access, plain = self._of(location.target)
        if plain:
            await self._http.remove(location)
            return
        client = await _client_of(blob, access, location)
        try:
            await client.delete_blob(delete_snapshots="include")
        except Exception as exn:
            answer = answer_of(exn)
            if answer is None:
                raise
            if code_of(answer) != "BlobNotFound":
                raise RefusedAnswer(answer) from None

    async def certainly_creates(self, location: Location) -> bool:
        return True

    async def close(self) -> None:
        self._by_endpoint.clear()
        while self._accesses:
            await self._accesses.popitem()[1].close()
        await super().close()

    def _explain(self, outcome: Answer | BaseException, url: str) -> Fault:
        if isinstance(outcome, BaseException) and (answer := answer_of(outcome)) is not None:
            outcome = self._secrets.of_answer(answer)
        blob, access, plain = self._of(url)
        if plain and not (isinstance(outcome, Answer) and code_of(outcome)):
            return self._http.explain(outcome, url)
        if isinstance(outcome, Answer):
            renewed = unauthenticated(outcome) and access.lapsed(blob, surely=out_of_time(outcome))
            return explain_answer(outcome, identity=access.identity, kind=access.kind, renewed=renewed)
        return self._at_endpoint(explain_client(outcome, identity=access.identity), outcome, access.account.endpoint)

    def _of(self, url: str) -> tuple[Blob, AccountAccess, bool]:
        """Return the blob of ``url``, the access to its account, and whether it is read like any web server."""
        blob = parse(url)
        key = _is_https(url), blob.endpoint
        if key not in self._by_endpoint:
            plain = _is_https(url) and not has_credentials(url, self._options)
            account = (
                Account(blob.account, blob.endpoint, "anonymous") if plain else account_of(url, blob, self._options)
            )
            access = self._accesses.setdefault(account, AccountAccess(self._call, account, self._secrets))
            self._by_endpoint[key] = access, plain
        return blob, *self._by_endpoint[key]

    async def _resolve(self, account: Account, url: str) -> None:
        """Raise ShardNotFound for a mistyped account: its host has no address, which does not pass by itself."""
        host = urllib.parse.urlsplit(account.endpoint).hostname or ""
        if ".blob." not in host:
            return
        if host not in self._resolved:
            self._resolved[host] = asyncio.ensure_future(self._call(socket.getaddrinfo, host, 443))
        try:
            await asyncio.shield(self._resolved[host])
        except socket.gaierror as exn:
            self._resolved.pop(host, None)
            if exn.errno not in _NO_SUCH_HOST:
                raise
            reason = f"there is no storage account {account.name}: {host} does not resolve"
            advice = "Check AZURE_STORAGE_ACCOUNT_NAME (account_name=), or the URL."
            raise error_for(Fault(Verdict.MISSING, reason, advice), redact(url), 0, 1) from exn


async def _client_of(blob: Blob, access: AccountAccess, location: Location) -> Any:
    """Return Azure's client of a blob that is written or removed. UrlError where none is named."""
    if not blob.name:
        raise UrlError(f"{redact(location.target)} names a container, not a blob")
    return (await access.service()).get_blob_client(blob.container, blob.name)


async def _request(access: AccountAccess, blob: Blob) -> Request:
    """Return the GET of ``blob``, with a grant that holds now."""
    grant = await access.grant(blob)
    version = urllib.parse.urlencode([blob.version]) if blob.version else ""
    query = "&".join(filter(None, (version, grant.query)))
    path = f"{urllib.parse.quote(blob.container, safe='$')}/{urllib.parse.quote(blob.name, safe='/~')}"
    address = f"{access.account.endpoint}/{path}{f'?{query}' if query else ''}"
    return Request(address, (*PLAIN_HEADERS, *grant.headers), keeps_redirect=False, renew_after=grant.renew_after)


def _entry(url: str, folder: Blob, item: Any) -> Entry:
    """Return an item of the listing of ``folder`` at ``url``; a name is quoted where that is."""
    base, name = url[: len(url) - len(folder.name)], str(item.name)
    if _is_https(url):
        parts = urllib.parse.urlsplit(url)
        base = f"{parts.scheme}://{parts.netloc}/{urllib.parse.quote(folder.container, safe='$')}/"
        name = urllib.parse.quote(name, safe="/~")
    if name.endswith("/"):
        return Entry(base + name, None)
    version = f'etag "{etag}"' if (etag := str(item.etag or "").strip('"')) else ""  # a listing has it without quotes
    return Entry(base + name, item.size, item.last_modified.timestamp() if item.last_modified else None, version)


def _is_https(url: str) -> bool:
    return url[:6].lower() == "https:"
