"""AIStore, and our own service with its protocol: requests that its proxy redirects to the target that holds the
object, by HTTP alone, or (the service) over a Unix socket, where files that it has whole are read directly (`handed`).

The redirect (301) is never remembered: targets come and go and signatures lapse, so each part and each attempt goes
through the proxy. The token goes to the proxy only. URLs and settings are in `urls`. Time limits are the engine's own,
not ``AIS_CONNECT_TIMEOUT`` and ``AIS_READ_TIMEOUT``.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import urllib.parse
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import IO, Any

from wds_async.config import transfer_config
from wds_async.errors import UrlError
from wds_async.redact import redact
from wds_async.storage import retry
from wds_async.storage.ais.batches import BatchRequests
from wds_async.storage.ais.handed import FileRequests
from wds_async.storage.ais.plans import Announcer
from wds_async.storage.ais.urls import ANONYMOUS, AisObject, Cluster, cluster_for, has_own_store, read_token
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
    RedirectLoop,
    RefusedAnswer,
    Request,
    Verdict,
)
from wds_async.storage.checksums import aistore
from wds_async.storage.cloud import CloudBackend
from wds_async.storage.http.errors import explain_exception, explain_status, retry_after_s, with_proxy
from wds_async.storage.http.messages import PLAIN_HEADERS, answer_of, version_of
from wds_async.storage.http.puts import ONLY_NEW, PUT_REDIRECTS, created, send_put
from wds_async.storage.options import NO_OPTIONS, Options

__all__ = ["WRITE_HEADERS", "AisBackend", "explain_answer", "explain_service", "put_by_target", "writable_url"]

_NO_RECURSION, _NAME_AND_SIZE = 1 << 11, 1 << 5
_IS_FOLDER = 1 << 8
_OURS = "wds-async/"
_HANDED_WITHIN_S = 5.0
_BUCKET = re.compile(r"(?:ais|aws|s3|gcp|gs|azure|az|oci)://(?:[@#][\w@#-]*/)?[\w.-]+(/)?")
_TOKEN_ADVICE = (
    "Log in (ais auth login) and set AIS_AUTHN_TOKEN, or AIS_AUTHN_TOKEN_FILE to the file that it writes; "
    'or pass storage_options={"ais": {"token": …}}.'
)


def explain_answer(answer: Answer, identity: str, endpoint: str) -> Fault:
    """Explain an answer of AIStore, with its own message. ``identity`` is in words and no secret."""
    message = _message(answer)
    words = f"AIStore at {endpoint} answered {answer.status}{f' ({message})' if message else ''} to {identity}"
    if answer.status in (409, 423):  # another client's request has the cluster fetch it from its cloud
        advice = "The object is being fetched or written; try later."
        return Fault(Verdict.TRANSIENT, words, advice, retry_after_s(answer.fields))
    fault = replace(explain_status(answer), reason=words)
    advice = {
        401: _TOKEN_ADVICE,
        403: "Ask for the permission to read this bucket, or give another token (AIS_AUTHN_TOKEN).",
        404: _missing_advice(message),
        507: "The cluster has no room left: free some, or let it evict (ais storage cleanup).",
    }.get(answer.status, fault.advice)
    return replace(fault, advice=advice)


def _missing_advice(message: str) -> str:
    if "etl" in message.lower():
        return "Start that ETL, or correct ?etl_name= in the URL."
    if "archived file" in message:
        return "Correct ?archpath= in the URL."
    bucket = _BUCKET.search(message)
    if bucket is not None and bucket[1] is None:
        return "There is no such bucket in this cluster: check its name, provider and namespace (ais ls)."
    return "Check the object's name (ais ls lists its bucket)."


def _message(answer: Answer) -> str:
    """Return AIStore's own message: JSON in the body, or after HEAD in a header."""
    text = answer.excerpt.decode("utf-8", "replace") or answer.fields.get("hdr-error", "")
    try:
        message = json.loads(text)["message"]
    except (ValueError, KeyError, TypeError):
        match = re.search(r'"message"\s*:\s*"((?:[^"\\]|\\.)*)', text)  # cut off by the length of the excerpt
        message = match[1] if match else re.sub(r"<[^>]*>", " ", text)
    message = " ".join(str(message).split())[:300]
    return redact(message) if message.isprintable() else ""


def explain_service(exn: BaseException, fault: Fault, endpoint: str, elsewhere: bool) -> Fault:
    """Return ``fault`` of an exception on the way to our own service in its terms. ``elsewhere``: its shard can be read
    without a service."""
    cause = getattr(exn, "os_error", None) or exn
    reason, refused = fault.reason, isinstance(cause, FileNotFoundError | ConnectionRefusedError | PermissionError)
    if refused:
        why = "permission denied" if isinstance(cause, PermissionError) else "nothing listens there"
        reason = f"no connection to the service at {endpoint}: {why}"
    option = f"--socket {endpoint.removeprefix('unix:')}" if endpoint.startswith("unix:") else "--port …"
    advice = (
        f"Is `wds-async serve {option}` running on this host, and is AIS_ENDPOINT its address as it is seen from here?"
    )
    more = " WDS_AIS_FALLBACK=1 reads the bucket itself when it is not." if elsewhere else ""
    return replace(fault, reason=reason, advice=advice + more, connection_refused=refused)


def _pinned_by(fields: Mapping[str, str], size: int | None) -> str:
    """Return the version of an object, with AIStore's own: AIStore gives an ETag only where a cloud gave one. A
    checksum is no part of it, because a bucket may be set to give that of the range."""
    version = fields.get("ais-version", "")
    return f"{version_of(fields, size)}{f', version {version}' if version else ''}"


WRITE_HEADERS = (*PLAIN_HEADERS[:1], ("Content-Type", "application/octet-stream"))
"""Headers of every PUT."""


def writable_url(place: AisObject, cluster: Cluster, shown: str) -> str:
    """Return the URL that is PUT to write an object. Raise UrlError where it cannot be written."""
    if not place.name or place.name.endswith("/") or place.query:
        raise UrlError(f"{shown}: names no object to write; write ais://bucket/object")
    if cluster.socket:
        raise UrlError(f"{shown}: the service at {cluster.endpoint} only reads; write to the store itself")
    return place.object_url(cluster.base)


def put_by_target(
    request: Request, token: str, body: IO[bytes], size: int, timeout_s: float, more: Mapping[str, str] = {}
) -> Answer:
    """Send the body to the target that the proxy names, and the token to the proxy only. The proxy gets an empty
    body, as from AIStore's own client: a front end may read the body that a length promises before it answers. Raise
    OSError or `RedirectLoop`. Blocks."""
    proof = {"Connection": "close", **({"Authorization": f"Bearer {token}"} if token else {})}
    answer = send_put(request, None, 0, timeout_s, more={**proof, **more}, proxied=False)
    if answer.status not in PUT_REDIRECTS or "location" not in answer.fields:
        # A single node may have taken the object itself, without a body: that is no success.
        return answer if answer.status >= 300 else Answer(502, {}, b"the proxy did not redirect the upload")
    target = urllib.parse.urljoin(request.url, answer.fields["location"])
    body.seek(0)
    answer = send_put(replace(request, url=target), body, size, timeout_s, more=more, proxied=False)
    if answer.status in PUT_REDIRECTS:
        raise RedirectLoop("a target of AIStore redirected the upload again")
    return answer


class AisBackend(CloudBackend):
    """One cluster. ``options``: see `urls.OPTIONS`. ConfigError for the first URL where they cannot be used."""

    def __init__(self, call: Call, options: Options = NO_OPTIONS, **limits: Any) -> None:
        super().__init__(call, options, **limits)
        self._chosen: Cluster | None = None
        self._identity, self._token_file = ANONYMOUS, ""
        self._announcer = Announcer(self._http.send)
        self._files: FileRequests | None = None
        self._batches = BatchRequests(self._http)

    async def access(self, location: Location) -> Access:
        cluster, place = self._cluster(location.target), AisObject.of(location.target)
        request = await self._request(cluster, place.object_url(cluster.base))
        if place.in_order:
            return self.streamed(request)
        self._announcer.begun(location.target)
        self._announcer.tell(request)
        if not self._why_not(cluster):
            return (self._files and await self._call(self._files.ask, request, _pinned_by)) or request

        async def same() -> Request:
            return request

        return await self._http.by_aiohttp(same, _pinned_by)

    async def entries(self, location: Location) -> AsyncIterator[Entry]:
        """Yield the entries of one folder, a page at a time; transient faults are retried. RefusedAnswer, or what
        aiohttp raises.
        """
        cluster, place = self._cluster(location.target), AisObject.of(location.target)
        request = await self._request(cluster, place.bucket_url(cluster.base))
        base = location.target.removesuffix(place.name)
        query: dict[str, Any] = {
            "prefix": place.name,
            "props": "name,size",
            "flags": str(_NO_RECURSION | _NAME_AND_SIZE),
            "pagesize": 0,
            "uuid": "",
            "continuation_token": "",
        }
        folder: str | None = None
        pages = Pages(f"AIStore at {cluster.endpoint}", location.target)
        while True:
            page = await self._page(request, query, location)
            for entry in page.get("entries") or ():
                name = str(entry["name"]).removeprefix(place.name)
                first, deeper, _ = name.partition("/")
                # Older clusters list all that is below, in order: the entries of a folder come one after another.
                if deeper or int(entry.get("flags") or 0) & _IS_FOLDER:
                    if (first or deeper) and first != folder:
                        folder = first
                        yield Entry(f"{base}{place.name}{first}/", None)
                elif name:
                    yield Entry(f"{base}{place.name}{name}", int(entry.get("size") or 0))
            query["continuation_token"], query["uuid"] = page.get("continuation_token"), page.get("uuid")
            if not query["continuation_token"]:
                return
            pages.turn(str(query["continuation_token"]))

    async def _page(self, request: Request, query: dict[str, Any], location: Location) -> dict[str, Any]:
        """Return one page of a listing, with retries. A token that has lapsed ends it: ``request`` holds that one."""

        async def page() -> dict[str, Any]:
            response, _ = await self._http.get(request, {"action": "list", "name": "", "value": query})
            with contextlib.closing(response):
                if response.status >= 300:
                    raise RefusedAnswer(await answer_of(response))
                return json.loads(await response.read())  # type: ignore[no-any-return]

        policy = transfer_config().retry
        return await retry.ask(
            page, lambda exn: self.classify(exn, location), policy, retries=retry.Retries(policy, renewals=0)
        )

    async def describe(self, location: Location) -> Description:
        cluster = self._cluster(location.target)
        await self._token(cluster)
        why = self._why_not(cluster)
        if AisObject.of(location.target).in_order:
            why = "an archive's member, or what an ETL makes, has no ranges"
        store = "wds-async's service" if cluster.socket else "AIStore"
        return Description(store, cluster.endpoint, self._identity, not why, why)

    def checksum(self, fields: Mapping[str, str]) -> Checksum | None:
        # The head of each shard's first answer passes here: by it our own service is known, whatever its address.
        if self._chosen is not None and fields.get("server", "").startswith(_OURS):
            self._greet(self._chosen)
        return aistore(fields)

    def expect(self, location: Location) -> None:
        self._announcer.expect((location.target,))

    async def batch(self, wanted: Sequence[tuple[Location, int, int]]) -> Sequence[memoryview | None] | None:
        cluster = self._cluster(wanted[0][0].target)
        if not cluster.get_batch:
            return None
        ranges = [(AisObject.of(location.target), start, stop) for location, start, stop in wanted]
        if not self._batches.takes(ranges):
            return None
        return await self._batches.read(cluster, await self._request(cluster, ""), ranges)

    async def remote_checksum(self, location: Location) -> Checksum | None:
        cluster, place = self._cluster(location.target), AisObject.of(location.target)
        if place.in_order:  # what is made of an object has no checksum
            return None
        return aistore(await self._http.head(await self._request(cluster, place.object_url(cluster.base))))

    async def create(self, location: Location, data: bytes) -> bool:
        cluster, place = self._cluster(location.target), AisObject.of(location.target)
        request = Request(writable_url(place, cluster, location.shown), WRITE_HEADERS, tls=cluster.tls)
        body, stall_s = io.BytesIO(data), self._timeouts_s[1]
        answer = await self._call(
            put_by_target, request, await self._token(cluster), body, len(data), stall_s, more=ONLY_NEW
        )
        return created(answer)

    async def remove(self, location: Location) -> None:
        cluster, place = self._cluster(location.target), AisObject.of(location.target)
        if cluster.socket:
            raise UrlError(f"{location.shown}: the service at {cluster.endpoint} removes nothing")
        await self._http.delete(await self._request(cluster, place.object_url(cluster.base)), location.shown)

    async def close(self) -> None:
        await self._announcer.close()
        if self._files is not None:
            self._files.close()
        await super().close()

    def _explain(self, outcome: Answer | BaseException, url: str) -> Fault:
        endpoint = self._cluster(url).endpoint
        if isinstance(outcome, Answer):
            fault = explain_answer(outcome, self._identity, endpoint)
            renewable = outcome.status == 401 and self._token_file  # it may have been written anew
            return replace(fault, verdict=Verdict.EXPIRED) if renewable else fault
        fault = explain_exception(outcome)
        if (by_proxy := with_proxy(fault, outcome, endpoint)) is not fault:
            return by_proxy
        if fault.verdict in (Verdict.FATAL, Verdict.CHANGED):
            if "certificate" not in fault.reason:
                return fault
            return replace(fault, advice="Set AIS_CLIENT_CA to the authority that signed the cluster's certificates.")
        if self._announcer.client:
            return explain_service(outcome, fault, endpoint, has_own_store(url))
        reached = f"Is AIStore's proxy at {endpoint} (AIS_ENDPOINT), and can its targets be reached?"
        more = " WDS_AIS_FALLBACK=1 reads the bucket itself when they cannot." if not url.startswith("ais:") else ""
        return replace(fault, advice=reached + more)

    def _cluster(self, url: str) -> Cluster:
        """Return the cluster, chosen with the first URL."""
        if self._chosen is None:
            self._chosen = cluster = cluster_for(url, self._options)
            if cluster.socket:  # only our own service listens at one
                self._greet(cluster)
                self._files = FileRequests(cluster.socket, _HANDED_WITHIN_S) if self._direct else None
        return self._chosen

    def _greet(self, cluster: Cluster) -> None:
        """Name ourselves to the service from now on, and send it plans."""
        if not self._why_not(cluster):
            self._announcer.greet()

    def _why_not(self, cluster: Cluster) -> str:
        """Return why the engine does not send the requests itself; "" where it does."""
        if cluster.socket:
            return "" if self._direct else "WDS_DIRECT=0"
        return self._why_indirect(cluster.endpoint)

    async def _token(self, cluster: Cluster) -> str:
        token: str
        token, self._token_file, self._identity = await self._call(read_token, cluster.token)
        self._secrets.add(token)
        return token

    async def _request(self, cluster: Cluster, url: str) -> Request:
        token = await self._token(cluster)
        own = {"Authorization": token and f"Bearer {token}", "Wds-Client": self._announcer.client}
        headers = (*PLAIN_HEADERS, *((name, value) for name, value in own.items() if value))
        return Request(url, headers, keeps_redirect=False, tls=cluster.tls, socket=cluster.socket)
