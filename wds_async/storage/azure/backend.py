"""Azure Blob Storage: requests with a signature or a token of our own, listings by Azure's own client.

``az://``, ``abfs(s)://`` and, where credentials for the account are known, ``https://account.blob.core.windows.net``;
without them that last is a web server like any other.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from typing import Any

from wds_async.config import proxy_for
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
    Backend,
    Call,
    Checksum,
    Description,
    Entry,
    Fault,
    Location,
    Pages,
    RefusedAnswer,
    Request,
    Stream,
    Verdict,
    error_for,
)
from wds_async.storage.checksums import azure
from wds_async.storage.http.backend import HttpBackend
from wds_async.storage.http.errors import with_place, with_proxy
from wds_async.storage.http.messages import PLAIN_HEADERS
from wds_async.storage.options import NO_OPTIONS, Options

__all__ = ["AzureBackend"]

_PLACE = "The endpoint follows AZURE_STORAGE_ACCOUNT_NAME or AZURE_STORAGE_CONNECTION_STRING."
_NO_SUCH_HOST = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


class AzureBackend(Backend):
    """Azure Blob Storage. ``options`` are adlfs's; what it would give DefaultAzureCredential is given to that."""

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
        self._timeouts_s = connect_timeout_s, stall_timeout_s
        self._options = options
        self._direct = direct
        self._http: HttpBackend | None = None
        self._authorities: dict[Account, AccountAccess] = {}
        # By the account that a URL names: reading the environment for each of many small shards would cost more than
        # asking for them.
        self._known: dict[tuple[bool, str], tuple[AccountAccess, bool]] = {}
        self._resolved: dict[str, asyncio.Future[None]] = {}

    async def access(self, location: Location) -> Access:
        if self._is_plain(location.target):
            return await self._web().access(location)
        blob, authority = self._of(location.target)
        if not blob.name:
            raise UrlError(
                f"{redact(location.target)} names a container, not a blob: write a folder's URL with a final slash"
            )
        if not self._direct or proxy_for(authority.account.endpoint) is not None:
            return await self._web().by_aiohttp(functools.partial(_request, authority, blob))
        await self._resolve(authority.account, location.target)
        return await _request(authority, blob)

    def streamed(self, request: Request) -> Stream:
        return self._web().streamed(request)

    async def entries(self, location: Location) -> AsyncIterator[Entry]:
        blob, authority = self._of(location.target)
        try:
            service = await authority.service()
            if not blob.container:
                async for container in service.list_containers():
                    yield Entry(f"{location.target}{container.name}/", None)
                return
            client = service.get_container_client(blob.container)
            base = _base(location.target, blob)
            found = client.walk_blobs(name_starts_with=blob.name or None, delimiter="/").by_page()
            pages = Pages(f"Azure at {redact(authority.account.endpoint)}", location.target)
            async for page in found:
                async for item in page:
                    yield _entry(base, item, location.target)
                if found.continuation_token:
                    pages.turn(str(found.continuation_token))
        except Exception as exn:
            if (answer := answer_of(exn)) is not None:
                raise RefusedAnswer(answer) from None
            raise

    async def describe(self, location: Location) -> Description:
        if self._is_plain(location.target):
            return await self._web().describe(location)
        blob, authority = self._of(location.target)
        endpoint = authority.account.endpoint
        await authority.grant(blob)
        why = "WDS_DIRECT=0" if not self._direct else "a proxy is in the way" if proxy_for(endpoint) else ""
        return Description("Azure Blob Storage", redact(endpoint), authority.identity, not why, why)

    def classify(self, outcome: Answer | BaseException, location: Location) -> Fault:
        if isinstance(outcome, RefusedAnswer):
            outcome = outcome.answer
        elif isinstance(outcome, BaseException) and (answer := answer_of(outcome)) is not None:
            outcome = answer
        if self._is_plain(location.target) and not (isinstance(outcome, Answer) and code_of(outcome)):
            return self._web().classify(outcome, location)
        blob, authority = self._of(location.target)
        if isinstance(outcome, Answer):
            outcome = authority.secrets.of_answer(outcome)
            lost = unauthenticated(outcome)
            renewed = lost and authority.lapsed(blob, surely=out_of_time(outcome))
            return explain_answer(outcome, identity=authority.identity, kind=authority.kind, renewed=renewed)
        fault = explain_client(outcome, identity=authority.identity)
        fault = authority.secrets.of_fault(fault)
        fault = with_proxy(fault, outcome, authority.account.endpoint)
        return with_place(fault, f"Azure at {redact(authority.account.endpoint)}", _PLACE)

    def renew(self, location: Location) -> None:
        if self._is_plain(location.target):
            self._web().renew(location)
        else:
            blob, authority = self._of(location.target)
            authority.lapsed(blob, surely=False)

    def checksum(self, fields: Mapping[str, str]) -> Checksum | None:
        return azure(fields)

    async def remote_checksum(self, location: Location) -> Checksum | None:
        if self._is_plain(location.target):
            return await self._web().remote_checksum(location)
        blob, authority = self._of(location.target)
        return azure(await self._web().head(await _request(authority, blob)))

    async def close(self) -> None:
        authorities, self._authorities = self._authorities, {}
        self._known.clear()
        for authority in authorities.values():
            await authority.close()
        if self._http is not None:
            await self._http.close()

    def _web(self) -> HttpBackend:
        """For what is read without credentials of ours. Options with a name of adlfs's are not for it."""
        if self._http is None:
            given = NO_OPTIONS if len(without_ours(self._options)) < len(self._options) else self._options
            connect_s, stall_s = self._timeouts_s
            self._http = HttpBackend(
                given, call=self._call, direct=self._direct, connect_timeout_s=connect_s, stall_timeout_s=stall_s
            )
        return self._http

    def _is_plain(self, url: str) -> bool:
        return _is_https(url) and self._find(url, parse(url))[1]

    def _of(self, url: str) -> tuple[Blob, AccountAccess]:
        blob = parse(url)
        return blob, self._find(url, blob)[0]

    def _find(self, url: str, blob: Blob) -> tuple[AccountAccess, bool]:
        """Return the access to the account of ``blob``, and whether it is read like any web server."""
        key = _is_https(url), blob.endpoint
        if key not in self._known:
            plain = _is_https(url) and not has_credentials(url, self._options)
            account = (
                Account(blob.account, blob.endpoint, "anonymous") if plain else account_of(url, blob, self._options)
            )
            authority = self._authorities.setdefault(account, AccountAccess(self._call, account))
            self._known[key] = authority, plain
        return self._known[key]

    async def _resolve(self, account: Account, url: str) -> None:
        """A mistyped account has no address, which is no passing fault: say so at once."""
        host = urllib.parse.urlsplit(account.endpoint).hostname or ""
        if ".blob." not in host:
            return
        if host not in self._resolved:
            self._resolved[host] = asyncio.ensure_future(self._call(socket.getaddrinfo, host, 443))
        try:
            await asyncio.shield(self._resolved[host])
        except socket.gaierror as exn:
            self._resolved.pop(host, None)
            if exn.errno in _NO_SUCH_HOST:
                reason = f"there is no storage account {account.name}: {host} does not resolve"
                advice = "Check AZURE_STORAGE_ACCOUNT_NAME (account_name=), or the URL."
                raise error_for(Fault(Verdict.MISSING, reason, advice), redact(url), 0, 1) from exn
            raise


async def _request(authority: AccountAccess, blob: Blob) -> Request:
    """Return the GET of ``blob``, with a grant that holds now."""
    grant = await authority.grant(blob)
    version = [urllib.parse.urlencode([blob.version])] if blob.version else []
    query = "&".join([*version, *([grant.query] if grant.query else [])])
    path = f"{urllib.parse.quote(blob.container, safe='$')}/{urllib.parse.quote(blob.name, safe='/~')}"
    address = f"{authority.account.endpoint}/{path}{f'?{query}' if query else ''}"
    return Request(address, (*PLAIN_HEADERS, *grant.headers), keeps_redirect=False, renew_after=grant.renew_after)


def _entry(base: str, item: Any, url: str) -> Entry:
    name = str(item.name)
    if name.endswith("/"):
        return Entry(base + _quoted(name, url), None)
    modified = item.last_modified.timestamp() if item.last_modified else None
    return Entry(base + _quoted(name, url), item.size, modified)


def _is_https(url: str) -> bool:
    return url[:6].lower() == "https:"


def _base(url: str, blob: Blob) -> str:
    """``url`` up to its container's slash."""
    if _is_https(url):
        parts = urllib.parse.urlsplit(url)
        return f"{parts.scheme}://{parts.netloc}/{urllib.parse.quote(blob.container, safe='$')}/"
    return url[: len(url) - len(blob.name)]


def _quoted(name: str, url: str) -> str:
    """Return a blob's name as it stands in a URL like ``url``."""
    return urllib.parse.quote(name, safe="/~") if _is_https(url) else name
