"""The Hugging Face hub: places, answers and tokens. The hub explains errors in ``X-Error-Code`` and
``X-Error-Message``, and hides private repositories behind 401 and 404."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import time
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from wds_async import packages
from wds_async.environment import variable
from wds_async.errors import ConfigError, UrlError
from wds_async.redact import redact
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
from wds_async.storage.checksums import hugging_face
from wds_async.storage.cloud import CloudBackend
from wds_async.storage.fsspec_config import fsspec_configuration
from wds_async.storage.http.auth import ANONYMOUS, Identity, checked_header
from wds_async.storage.http.errors import explain_status
from wds_async.storage.http.messages import PLAIN_HEADERS, answer_of, redirected
from wds_async.storage.hub import SPEC
from wds_async.storage.options import NO_OPTIONS, Options, check_names
from wds_async.storage.preload import client_imports
from wds_async.storage.secrets import Secrets, Writer

__all__ = ["HubPlace", "HuggingFaceBackend", "explain_hub_answer", "hub_place", "origin_of", "writer"]

# RateLimit: "api";r=0;t=55  (seconds until the window is over)
_RESET = re.compile(r";\s*t\s*=\s*(\d{1,6})")


@dataclass(frozen=True, slots=True)
class HubPlace:
    """A file or folder ``path`` of ``repo`` ("owner/name") at ``revision``; ``folder`` is the kind of repository
    (``datasets``, ``models``, ``spaces``, ``kernels``), or ``buckets``, which have no revisions."""

    folder: str
    repo: str
    revision: str
    path: str

    @property
    def page(self) -> str:
        """Its page, below the endpoint."""
        return self.repo if self.folder == "models" else f"{self.folder}/{self.repo}"

    @property
    def name(self) -> str:
        """Name of the store, for messages."""
        return f"the {self.folder[:-1]} {self.repo}"

    def resolve_url(self, endpoint: str) -> str:
        """Return the URL of the file."""
        revision = f"{urllib.parse.quote(self.revision, safe='')}/" if self.revision else ""
        return f"{endpoint}/{self.page}/resolve/{revision}{urllib.parse.quote(self.path)}"

    def tree_url(self, endpoint: str) -> str:
        """Return the URL that lists the folder."""
        folder = self.path.strip("/")
        names = [urllib.parse.quote(name, safe="") for name in (self.revision, folder) if name]
        return "/".join([f"{endpoint}/api/{self.folder}/{self.repo}/tree", *names]) + "?recursive=false&expand=false"


def explain_hub_answer(
    answer: Answer, place: HubPlace, endpoint: str, identity: Identity, *, renewed: bool = False
) -> Fault:
    """Explain an answer of the hub (or its CDN) for ``place`` to ``identity``; ``renewed``: a refused token is being
    looked up again."""
    fault, status, code = explain_status(answer), answer.status, answer.fields.get("x-error-code", "")
    message = " ".join(answer.fields.get("x-error-message", "").split())[:200]
    message = f" ({message})" if message and message.isprintable() else ""
    revision = f" at revision {place.revision!r}" if place.revision else ""
    missing = f"the hub shows no {place.folder[:-1]} {place.repo}"
    terms = f"Accept its terms at {endpoint}/{place.page}, "
    anonymous = identity is ANONYMOUS

    def because(verdict: Verdict, reason: str, advice: str) -> Fault:
        return Fault(verdict, f"{reason}{message}; asked with {identity.name}", advice)

    if code == "RevisionNotFound":
        reason = f"on the hub {place.name} has no revision {place.revision!r}"
        return because(Verdict.MISSING, reason, "Check what follows the @.")
    if code == "EntryNotFound":
        reason = f"on the hub {place.name} has no file {place.path!r}{revision}"
        return because(Verdict.MISSING, reason, "Check the path.")
    if code == "GatedRepo":
        advice = terms + ("then set HF_TOKEN." if anonymous else "with the account that the token belongs to.")
        return because(Verdict.DENIED, f"on the hub {place.name} is gated", advice)
    if status == 401 and anonymous and not renewed:
        advice = "Check the name; where it is private or gated, set HF_TOKEN (or `hf auth login`)."
        return because(Verdict.DENIED, f"{missing} (401)", advice)
    if status == 401:
        verdict = Verdict.EXPIRED if renewed else Verdict.DENIED
        return because(verdict, "the hub refused the token (401)", f"Renew {identity.name}, or check the name.")
    if code == "RepoNotFound":
        return because(Verdict.MISSING, missing, f"Check the name, and that {identity.name} may read it.")
    if status == 403:
        return because(Verdict.DENIED, fault.reason, f"Check that {identity.name} may read {place.name}.")
    if status == 429:
        reset = _RESET.search(answer.fields.get("ratelimit", ""))
        wait_s = float(reset[1]) if fault.retry_after_s is None and reset else fault.retry_after_s
        advice = f"The hub limits the rate of requests{'; set HF_TOKEN for a higher limit' if anonymous else ''}."
        return replace(fault, advice=advice, retry_after_s=wait_s)
    return replace(fault, reason=fault.reason + message)


_ENDPOINT = "https://huggingface.co"
_FOLDERS = SPEC.repositories
# Revisions that hold a slash and are written as they are; others escape it: @my%2Fbranch.
_SPECIAL_REVISION = re.compile(r"refs/(?:convert/[\w.-]+|pr/\d+)(?=/|$)")
_ACCEPTED = ("token", "endpoint", "revision")
# Other options of HfFileSystem, without a meaning here.
_MEANINGLESS = (
    "asynchronous", "block_size", "expand_info", "listings_expiry_time", "live_follow", "loop", "max_workers",
    "skip_instance_cache", "use_listings_cache",
)  # fmt: skip
_TRUE = frozenset({"1", "on", "yes", "true"})
_LOOKED_UP_AGAIN_S = 60.0


def hub_place(url: str, revision: str | None = None) -> HubPlace:
    """Return the place that an ``hf://`` URL names. ``revision`` is that of URLs without one (default ``main``);
    UrlError for a URL of another form, and for two revisions."""
    folder, _, rest = url.partition("://")[2].partition("/")
    if folder not in _FOLDERS:
        folder, rest = "models", url.partition("://")[2]
    repo, at, tail = rest.partition("@") if "@" in "/".join(rest.split("/")[:2]) else (rest, "", "")
    if at:
        special = _SPECIAL_REVISION.match(tail)
        named, path = (special[0], tail[special.end() + 1 :]) if special else tail.partition("/")[::2]
        named = urllib.parse.unquote(named)
    else:
        names = rest.split("/", 2)
        repo, named, path = "/".join(names[:2]), "", names[2] if len(names) > 2 else ""
    good = all(repo.split("/")) and repo.count("/") <= 1 and (at or "/" in repo) and bool(named) == bool(at)
    if not good or (folder == "buckets" and at):
        raise UrlError(
            f"{redact(url)}: not a place of the hub; write hf://datasets/OWNER/NAME/PATH, hf://OWNER/NAME/PATH for a "
            "model, hf://spaces/… or hf://buckets/OWNER/NAME/PATH; a revision goes behind the NAME: NAME@main"
        )
    if named and revision and named != revision:
        raise UrlError(f"{redact(url)}: names revision {named!r}, and storage_options {revision!r}")
    return HubPlace(folder, repo, "" if folder == "buckets" else named or revision or "main", path)


class HuggingFaceBackend(CloudBackend):
    """The hub. ``options``: ``token`` (False: none), ``endpoint``, ``revision``; ConfigError for others."""

    store = "the Hugging Face hub"
    endpoint_settings = "Its address is HF_ENDPOINT, where that is set."

    def __init__(self, call: Call, options: Options = NO_OPTIONS, **limits: Any) -> None:
        check_names("hf", options, (*_ACCEPTED, *_MEANINGLESS))
        super().__init__(call, options, **limits)
        self._settings: dict[str, Any] = dict(options)
        self._prepared = False
        self._identity: Identity | None = None
        self._renewable = False
        self._looked_up_at = 0.0
        self._renewed_at = -_LOOKED_UP_AGAIN_S

    async def access(self, location: Location) -> Access:
        place = await self._place(location.target)
        if not place.path or place.path.endswith("/"):
            raise UrlError(f"{redact(location.target)}: names no file; {_folder_advice(place)}")
        return await self._http.read_by(await self._request(place.resolve_url(self._endpoint())))

    async def entries(self, location: Location) -> AsyncIterator[Entry]:
        """Yield the entries of a folder of a repository or bucket, in the hub's order, as many at once as it gives (a
        thousand).
        """
        place = await self._place(location.target)
        folder = place.path.strip("/")
        beneath = f"{folder}/" if folder else ""
        seen: set[str] = set()
        request: Request | None = await self._request(place.tree_url(self._endpoint()))
        pages = Pages(f"the Hugging Face hub at {redact(self._endpoint())}", location.target)
        while request is not None:
            pages.turn(request.url)
            page, request = await self._page(request)
            for item in page:
                name = str(item.get("path", ""))
                # A bucket's listing goes by the beginning of names, so "logs" also gives "logs-2/…".
                below, slash, _ = name.removeprefix(beneath).partition("/")
                if not name.startswith(beneath) or not below or below in seen:
                    continue
                seen.add(below)
                if slash or item.get("type") == "directory":
                    yield Entry(f"{location.target}{below}/", None)
                else:
                    yield Entry(location.target + below, int(item["size"]), _modified(item))

    async def describe(self, location: Location) -> Description:
        await self._place(location.target)
        endpoint, identity = self._endpoint(), await self._login()
        why = self._http.why_not(endpoint)
        return Description(self.store, redact(endpoint), identity.described, not why, why)

    def _explain(self, outcome: Answer | BaseException, url: str) -> Fault:
        endpoint = self._endpoint()
        if not isinstance(outcome, Answer):
            return self._at_endpoint(self._http.explain(outcome), outcome, endpoint)
        place = hub_place(url, self._settings.get("revision"))
        identity = self._identity or ANONYMOUS
        renewed = outcome.status == 401 and self._forget_token()
        return explain_hub_answer(outcome, place, redact(endpoint), identity, renewed=renewed)

    def renew(self, location: Location) -> None:
        self._forget_token()

    def checksum(self, fields: Mapping[str, str]) -> Checksum | None:
        return hugging_face(fields) or self._http.checksum(fields)

    async def remote_checksum(self, location: Location) -> Checksum | None:
        """Return the checksum in the hub's redirect to the file."""
        place = await self._place(location.target)
        request = await self._request(place.resolve_url(self._endpoint()))
        return hugging_face(await self._http.head(request, enough=lambda fields: "x-linked-etag" in fields))

    def _endpoint(self) -> str:
        named = self._settings.get("endpoint") or variable("HF_ENDPOINT") or _ENDPOINT
        parts = urllib.parse.urlsplit(str(named))
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ConfigError(f"HF_ENDPOINT or endpoint={redact(str(named))!r}: write https://host")
        return str(named).rstrip("/")

    async def _place(self, url: str) -> HubPlace:
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            if (variable(name) or "").lower() in _TRUE:
                raise ConfigError(
                    f"{redact(url)}: {name} is set, so the hub may not be asked; unset it, or read a copy"
                )
        if not self._prepared:
            configured = await self._call(fsspec_configuration, "hf")
            accepted = {name: value for name, value in configured.items() if name in _ACCEPTED}
            self._settings, self._prepared = {**accepted, **self._settings}, True
        return hub_place(url, self._settings.get("revision"))

    async def _request(self, url: str) -> Request:
        return Request(url, (*PLAIN_HEADERS, *(await self._login()).headers))

    async def _login(self) -> Identity:
        if self._identity is None:
            self._identity, self._renewable = await self._call(_look_up, self._settings.get("token"))
            self._looked_up_at = time.monotonic()
            self._secrets.add_headers(self._identity.headers)
        return self._identity

    def _forget_token(self) -> bool:
        """Return whether a refused token is worth looking up again: a login's is renewed, or written anew, while we
        read. Parts that were on their way with the old one come a little later than the first refusal."""
        now = time.monotonic()
        if now - self._renewed_at < _LOOKED_UP_AGAIN_S / 2:
            return True
        if self._identity is None or not self._renewable or now - self._looked_up_at < _LOOKED_UP_AGAIN_S:
            return False
        self._identity, self._renewed_at = None, now
        return True

    async def _page(self, request: Request) -> tuple[list[dict[str, Any]], Request | None]:
        response, _ = await self._http.get(request)
        with contextlib.closing(response):
            if response.status != 200:
                raise RefusedAnswer(await answer_of(response))
            page = json.loads(await response.read())
            following = [str(link["url"]) for rel, link in response.links.items() if rel == "next"]
        return page, replace(redirected(request, following[0]), hops=()) if following else None


def _folder_advice(place: HubPlace) -> str:
    if place.path:
        return "a folder is listed, and a file read"
    name = place.repo.partition("/")[0]
    return f"a dataset without an owner is written with its revision: hf://{place.folder}/{name}@main/PATH"


def _modified(item: dict[str, Any]) -> float | None:
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return datetime.datetime.fromisoformat(item.get("mtime") or (item.get("lastCommit") or {})["date"]).timestamp()
    return None


def _look_up(token: Any) -> tuple[Identity, bool]:
    """Return the identity, and whether it may change: of ``storage_options``, ``HF_TOKEN``, or the login. Blocks."""
    if token is False:
        return ANONYMOUS, False
    if isinstance(token, str):
        return _bearer("the token of storage_options", token), False
    if token not in (None, True):
        raise ConfigError("storage_options for hf: token is a str, or False for none")
    identity, renewable = _environments_token()
    if token is True and identity is ANONYMOUS:
        raise ConfigError("storage_options for hf: token=True, and there is none: set HF_TOKEN, or `hf auth login`")
    return identity, renewable


def _environments_token() -> tuple[Identity, bool]:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if not variable("HF_OIDC_RESOURCE") and (token := (variable(name) or "").strip()):
            return _bearer(f"the token of {name}", token), False
    path = _login_file()
    if not os.path.exists(path) and not variable("HF_OIDC_RESOURCE") and packages.loaded("google.colab") is None:
        return ANONYMOUS, False  # nothing for huggingface_hub to find, so it is not imported (100 ms)
    token = _hub_packages_token() or _read(path)
    return (_bearer("the token of `hf auth login`", token), True) if token else (ANONYMOUS, False)


def _hub_packages_token() -> str:
    try:
        with client_imports():
            from huggingface_hub import get_token  # noqa: PLC0415 (slow, and often not needed)
    except ImportError:
        return ""
    return get_token() or ""


def _login_file() -> str:
    home = variable("HF_HOME") or os.path.join(variable("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    path = variable("HF_TOKEN_PATH") or os.path.join(home, "token")
    return os.path.expandvars(os.path.expanduser(path))


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().replace("\r", "").replace("\n", "").strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as exn:
        why = getattr(exn, "strerror", None) or "it is not text"
        raise ConfigError(f"the hub's token file {path}: {why}; repair it, or set HF_TOKEN") from None


def _bearer(name: str, token: str) -> Identity:
    if not token.strip():
        raise ConfigError(f"{name} is empty; give False for none")
    return Identity(name, (("Authorization", f"Bearer {checked_header('Authorization', token.strip())}"),))


def origin_of(url: str, options: Mapping[str, Any]) -> str:
    """Return ``hf://`` and the repository of ``url``, without its revision."""
    parts = url.partition("://")[2].split("/")
    return "hf://" + "/".join(parts[: 3 if parts[0] in ("datasets", "spaces") else 2]).partition("@")[0]


def writer(url: str, options: Mapping[str, Any], filesystem: Any) -> Writer:
    """Return the identity and secrets that the hub's filesystem writes with."""
    identity, secrets = _look_up(options.get("token"))[0], Secrets()
    secrets.add_headers(identity.headers)
    return Writer(identity.described, secrets)
