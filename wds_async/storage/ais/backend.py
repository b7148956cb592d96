"""AIStore, and our own service that speaks like it: requests that its proxy redirects to the target that holds the
object, by HTTP alone, or (the service) over a Unix socket, where files that it has whole are read directly (`handed`).

The redirect (301) is never remembered: targets come and go and signatures lapse, so each part and each attempt asks the
proxy anew. The token goes to the proxy only. URLs and settings are in `urls`; ``storage_options`` are
``endpoint``, ``token``, ``verify``, ``ca_file``, ``certificate`` and ``key``. Time limits are the engine's own, not
``AIS_CONNECT_TIMEOUT`` and ``AIS_READ_TIMEOUT``.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wds_async.config import proxy_for, transfer_config
from wds_async.redact import redact
from wds_async.storage import retry
from wds_async.storage.ais.handed import FileRequests
from wds_async.storage.ais.plans import Announcer
from wds_async.storage.ais.urls import NOBODY, AisObject, Cluster, cluster_for, has_own_store, read_token
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
)
from wds_async.storage.checksums import aistore
from wds_async.storage.http.backend import HttpBackend, HttpStream
from wds_async.storage.http.errors import explain_exception, explain_status, retry_after_s, with_proxy
from wds_async.storage.http.messages import PLAIN_HEADERS, answer_of, redirected, version_of
from wds_async.storage.options import NO_OPTIONS, Options
from wds_async.storage.preload import import_client
from wds_async.storage.secrets import Secrets

if TYPE_CHECKING:
    import aiohttp

__all__ = ["AisBackend", "explain_answer", "explain_service"]

_NO_RECURSION, _NAME_AND_SIZE = 1 << 11, 1 << 5
_IS_FOLDER = 1 << 8
_BUSY = frozenset({409, 423})
_OURS = "wds-async/"
_HANDED_WITHIN_S = 5.0
_BUCKET = re.compile(r"(?:ais|aws|s3|gcp|gs|azure|az|oci)://(?:[@#][\w@#-]*/)?[\w.-]+(/)?")


def explain_answer(answer: Answer, identity: str, endpoint: str) -> Fault:
    """Return what an answer of AIStore means, with its own message. ``identity`` is in words and no secret."""
    said = _message(answer)
    words = f"AIStore at {endpoint} answered {answer.status}{f' ({said})' if said else ''} to {identity}"
    fault = replace(explain_status(answer), reason=words)
    if answer.status == 401:
        return replace(fault, advice=_TOKEN_ADVICE)
    if answer.status == 403:
        return replace(
            fault,
            advice="Ask for the permission to read this bucket, or give another token (AIS_AUTHN_TOKEN).",
        )
    if answer.status == 404:
        return replace(fault, advice=_missing_advice(said))
    if answer.status in _BUSY:  # another client's request has the cluster fetch it from its cloud
        advice = "The object is being fetched or written; try later."
        return Fault(Verdict.TRANSIENT, words, advice, retry_after_s(answer.fields))
    if answer.status == 507:
        return replace(fault, advice="The cluster has no room left: free some, or let it evict (ais storage cleanup).")
    return fault


def explain_service(exn: BaseException, fault: Fault, endpoint: str, elsewhere: bool) -> Fault:
    """Return what an exception on the way to our own service means: ``fault``, and whether the connection is refused.
    ``elsewhere``: its shard can be read without a service."""
    cause = getattr(exn, "os_error", None) or exn
    reason, nobody = fault.reason, isinstance(cause, FileNotFoundError | ConnectionRefusedError | PermissionError)
    if nobody:
        why = "permission denied" if isinstance(cause, PermissionError) else "nobody listens there"
        reason = f"no connection to the service at {endpoint}: {why}"
    option = f"--socket {endpoint.removeprefix('unix:')}" if endpoint.startswith("unix:") else "--port …"
    advice = (
        f"Is `wds-async serve {option}` running on this host, and is AIS_ENDPOINT its address as it is seen from here?"
    )
    more = " WDS_AIS_FALLBACK=1 reads the bucket itself when it is not." if elsewhere else ""
    return replace(fault, reason=reason, advice=advice + more, connection_refused=nobody)


_TOKEN_ADVICE = (
    "Log in (ais auth login) and set AIS_AUTHN_TOKEN, or AIS_AUTHN_TOKEN_FILE to the file that it writes; "
    'or pass storage_options={"ais": {"token": …}}.'
)


def _missing_advice(said: str) -> str:
    if "etl" in said.lower():
        return "Start that ETL, or correct ?etl_name= in the URL."
    if "archived file" in said:
        return "Correct ?archpath= in the URL."
    found = _BUCKET.search(said)
    if found is not None and found[1] is None:
        return "There is no such bucket in this cluster: check its name, provider and namespace (ais ls)."
    return "Check the object's name (ais ls lists its bucket)."


def _message(answer: Answer) -> str:
    """Return AIStore's own message: JSON in the body, or after HEAD in a header."""
    text = answer.excerpt.decode("utf-8", "replace") or answer.fields.get("hdr-error", "")
    try:
        said = json.loads(text)["message"]
    except (ValueError, KeyError, TypeError):
        found = re.search(r'"message"\s*:\s*"((?:[^"\\]|\\.)*)', text)  # cut off by the length of the excerpt
        said = found[1] if found else re.sub(r"<[^>]*>", " ", text)
    said = " ".join(str(said).split())[:300]
    return redact(said) if said.isprintable() else ""


class _Client(HttpBackend):
    """aiohttp for what the engine does not request itself. Unlike `get`, it takes a body along to another origin."""

    path = ""
    """Of the Unix socket that it asks at, where it does."""

    async def session(self) -> aiohttp.ClientSession:
        if self.path and self._session is None:
            await self._call(import_client, "aiohttp")
        if self.path and self._session is None:
            import aiohttp  # noqa: PLC0415 (loaded by now)

            self._session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(self.path), timeout=self.timeout())
        return await super().session()

    def _proxy(self, url: str) -> tuple[str | None, dict[str, str]]:
        return (None, {}) if self.path else super()._proxy(url)

    async def ask(self, request: Request, body: Any) -> bytes:
        """Return the answer to a GET with ``body``, as JSON. RefusedAnswer from 400 on."""
        while True:
            response = await self.send(request, {}, body)
            try:
                answer = await answer_of(response)
                if answer.status >= 400:
                    raise RefusedAnswer(answer)
                if answer.status < 300:
                    return await response.read()
            finally:
                response.release()
            request = redirected(request, answer.fields.get("location", ""))


def _identity(fields: Mapping[str, str], size: int | None) -> str:
    """Return the version of an object, with AIStore's own: AIStore gives an ETag only where a cloud gave one. A
    checksum is no part of it, because a bucket may be set to give that of the range."""
    version = fields.get("ais-version", "")
    return f"{version_of(fields, size)}{f', version {version}' if version else ''}"


class AisBackend(Backend):
    """One cluster. ``options``: see `urls.OPTIONS`. ConfigError for the first URL where they cannot be used."""

    def __init__(
        self,
        call: Call,
        options: Options = NO_OPTIONS,
        *,
        direct: bool = True,
        connect_timeout_s: float = 5.0,
        stall_timeout_s: float = 30.0,
    ) -> None:
        self._options = options
        self._known: Cluster | None = None
        self._call, self._direct = call, direct
        self._client = _Client(call=call, connect_timeout_s=connect_timeout_s, stall_timeout_s=stall_timeout_s)
        self._identity, self._token_file = NOBODY, ""
        self._secrets = Secrets()
        self._announcer = Announcer(self._client.send)
        self._hands: FileRequests | None = None

    async def access(self, location: Location) -> Access:
        place = self._place(location.target)
        request = await self._request(place.object_url(self._cluster.base))
        if place.in_order:
            return self.streamed(request)
        self._announcer.begun(location.target)
        self._announcer.tell(request)
        if self._why_not() == "":
            file = None if self._hands is None else await self._call(self._hands.ask, request, _identity)
            return request if file is None else file

        async def same() -> Request:
            return request

        return await self._client.by_aiohttp(same, _identity)

    def streamed(self, request: Request) -> Stream:
        return HttpStream(self._client, request)

    async def entries(self, location: Location) -> AsyncIterator[Entry]:
        """One folder, a page at a time; transient faults are tried again. RefusedAnswer, or what aiohttp raises."""
        place = self._place(location.target)
        request = await self._request(place.bucket_url(self._cluster.base))
        base = location.target.removesuffix(place.name)
        wanted: dict[str, Any] = {
            "prefix": place.name,
            "props": "name,size",
            "flags": str(_NO_RECURSION | _NAME_AND_SIZE),
            "pagesize": 0,
            "uuid": "",
            "continuation_token": "",
        }
        folder: str | None = None
        pages = Pages(f"AIStore at {self._cluster.endpoint}", location.target)
        while True:
            page = await self._page(request, wanted, location)
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
            wanted["continuation_token"], wanted["uuid"] = page.get("continuation_token"), page.get("uuid")
            if not wanted["continuation_token"]:
                return
            pages.turn(str(wanted["continuation_token"]))

    async def _page(self, request: Request, wanted: dict[str, Any], location: Location) -> dict[str, Any]:
        """Return one page of a listing, with retries. A token that has lapsed ends it: ``request`` holds that one."""
        message = {"action": "list", "name": "", "value": wanted}
        policy = transfer_config().retry
        page = await retry.ask(
            lambda: self._client.ask(request, message),
            lambda exn: self.classify(exn, location),
            policy,
            retries=retry.Retries(policy, renewals=0),
        )
        return json.loads(page)  # type: ignore[no-any-return]

    async def describe(self, location: Location) -> Description:
        place = self._place(location.target)
        await self._token()
        why = self._why_not()
        if place.in_order:
            why = "an archive's member, or what an ETL makes, has no ranges"
        store = "wds-async's service" if self._cluster.socket else "AIStore"
        return Description(store, self._cluster.endpoint, self._identity, not why, why)

    def classify(self, outcome: Answer | BaseException, location: Location) -> Fault:
        if isinstance(outcome, RefusedAnswer):
            outcome = outcome.answer
        if isinstance(outcome, Answer):
            outcome = self._secrets.of_answer(outcome)
            fault = explain_answer(outcome, self._identity, self._cluster.endpoint)
            if outcome.status == 401 and self._token_file:  # somebody may have logged in again since it was read
                return replace(fault, verdict=Verdict.EXPIRED)
            return fault
        fault = explain_exception(outcome)
        if (by_proxy := with_proxy(fault, outcome, self._cluster.endpoint)) is not fault:
            return by_proxy
        if fault.verdict in (Verdict.FATAL, Verdict.CHANGED):
            if "certificate" in fault.reason:  # which authority signs a cluster's is said to AIStore's own clients so
                return replace(
                    fault, advice="Set AIS_CLIENT_CA to the authority that signed the cluster's certificates."
                )
            return fault
        if self._announcer.client:
            return explain_service(outcome, fault, self._cluster.endpoint, has_own_store(location.target))
        reached = f"Is AIStore's proxy at {self._cluster.endpoint} (AIS_ENDPOINT), and can its targets be reached?"
        more = (
            " WDS_AIS_FALLBACK=1 reads the bucket itself when they cannot."
            if not location.target.startswith("ais:")
            else ""
        )
        return replace(fault, advice=reached + more)

    def checksum(self, fields: Mapping[str, str]) -> Checksum | None:
        # The head of each shard's first answer passes here: by it our own service is known, whatever its address.
        if not self._announcer.client and fields.get("server", "").startswith(_OURS):
            self._greet()
        return aistore(fields)

    def expect(self, location: Location) -> None:
        self._announcer.expect((location.target,))

    async def remote_checksum(self, location: Location) -> Checksum | None:
        place = self._place(location.target)
        if place.in_order:  # what is made of an object has no checksum
            return None
        return aistore(await self._client.head(await self._request(place.object_url(self._cluster.base))))

    async def close(self) -> None:
        await self._announcer.close()
        if self._hands is not None:
            self._hands.close()
        await self._client.close()

    @property
    def _cluster(self) -> Cluster:
        return self._known or self._meet(Cluster.of(self._options))

    def _place(self, url: str) -> AisObject:
        """Return the object that ``url`` names, and choose the cluster with the first one."""
        if self._known is None:
            self._meet(cluster_for(url, self._options))
        return AisObject.of(url)

    def _meet(self, cluster: Cluster) -> Cluster:
        self._known, self._client.path = cluster, cluster.socket
        if cluster.socket:  # only our own service listens at one
            self._greet()
            if self._direct:
                self._hands = FileRequests(cluster.socket, _HANDED_WITHIN_S)
        return cluster

    def _greet(self) -> None:
        """Name ourselves to the service from now on, and send it plans."""
        if not self._why_not():
            self._announcer.greet()

    def _why_not(self) -> str:
        """Return why the engine does not send the requests itself; "" where it does."""
        if not self._direct:
            return "WDS_DIRECT=0"
        proxy = None if self._cluster.socket else proxy_for(self._cluster.endpoint)
        return "" if proxy is None else "a proxy is in the way"

    async def _token(self) -> str:
        token: str
        token, self._token_file, self._identity = await self._call(read_token, self._cluster.token)
        self._secrets.add(token)
        return token

    async def _request(self, url: str) -> Request:
        token = await self._token()
        mine = (("Authorization", f"Bearer {token}"),) if token else ()
        named = (("Wds-Client", self._announcer.client),) if self._announcer.client else ()
        headers, cluster = (*PLAIN_HEADERS, *mine, *named), self._cluster
        return Request(url, headers, keeps_redirect=False, tls=cluster.tls, socket=cluster.socket)
