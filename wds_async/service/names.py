"""Conversion of a request's path, as it came over the wire, into the URL of the object.

A name is cut into its parts and then percent-decoded, once: every byte that a store allows in a key can be used.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field

from wds_async import environment
from wds_async.redact import redact
from wds_async.service.config import ServiceConfig
from wds_async.service.refusals import Refusal
from wds_async.storage.ais.urls import PROVIDERS
from wds_async.storage.stores import usual_scheme
from wds_async.urls import links, scheme

__all__ = ["NAME_LIMIT_BYTES", "PARAMETERS", "SCHEMES", "ObjectName", "bucket_of", "name_of", "name_of_url", "url_of"]

NAME_LIMIT_BYTES = 4096
"""Longest name of an object, and longest URL, decoded. S3 and Google allow 1,024 bytes."""
_PROVIDERS = {
    "ais": "ais", "aws": "aws", "s3": "aws", "gcp": "gcp", "gs": "gcp", "gcs": "gcp", "azure": "azure", "az": "azure",
    "oci": "oci", "oc": "oci", "ht": "ht", "http": "ht", "https": "ht",
}  # fmt: skip
"""Names of providers as clients write them, and AIStore's."""
PARAMETERS = ("archpath", "archregx", "archmode", "archmime", "etl_name", "etl_args", "etl_pipeline", "latest-ver")
"""AIStore's parameters of an object."""
SCHEMES = {provider: name for name, provider in PROVIDERS.items()}
"""Beginnings of the URLs of providers."""
_SHORT = {"gs": "gcp", "az": "azure", "ais": "ais"}
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_BUCKET = re.compile(r"[A-Za-z0-9_$][A-Za-z0-9._$-]{0,254}")
_NAMESPACE = re.compile(r"@?([\w-]*)(?:#([\w-]*))?", re.ASCII)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/]")
"""URLs that begin with their scheme, so that parsers cannot differ about that."""
_ONCE = ("provider", "namespace", "original_url", "versionId")


@dataclass(frozen=True, slots=True)
class ObjectName:
    """The object that a request names: its ``url`` before rewriting, and its parts. ``bucket`` and ``object`` are ""
    for ``api`` "url"; ``object`` is "" for a bucket. ``params``: AIStore's (``archpath``, ``etl_name``, …)."""

    url: str
    provider: str
    bucket: str
    object: str
    api: str
    """``ais`` (``/v1/objects``), ``short`` (``/gs/…``), ``s3`` or ``url``."""
    params: Mapping[str, str] = field(default_factory=dict)


def name_of(path: str, query: str, config: ServiceConfig) -> ObjectName:
    """Return the object at ``path``; path and query as they came (percent-encoded, without ``?``). Refusal (400) for a
    malformed name, 404 for an unknown path or bucket, 414 for a name that is too long."""
    api, rest = _api(path)
    if api == "url":
        url = _decoded(rest)
        if query and "?" in url:
            raise _malformed("/url: escape the whole URL, with its query (%3F for ?)")
        if _CONTROL.search(query) or not query.isascii():
            raise _malformed("/url: the query holds characters that no URL has")
        return _foreign(f"{url}?{query}" if query else url)  # a query that was not escaped belongs to it
    parameters = _parameters(query)
    provider, rest = _provider(api, rest, parameters)
    if provider == "ht":
        if not parameters.get("original_url"):
            raise _malformed("provider=ht needs original_url=")
        return _foreign(parameters["original_url"])
    raw_bucket, _, raw_object = rest.partition("/")
    name = _decoded(raw_object)
    if not name:
        raise _malformed(f"{path[:200]!r} names no object; write /v1/objects/BUCKET/OBJECT")
    return _object(api, provider, _bucket(_decoded(raw_bucket)), name, parameters, config)


def name_of_url(url: str, config: ServiceConfig) -> ObjectName:
    """Return the name of a plan's URL, authorized as a request for it would be."""
    provider = PROVIDERS.get(usual_scheme(scheme(url)))
    if provider is None:
        return _foreign(_checked(url))
    bucket, _, name = url.partition("://")[2].partition("/")
    if not name:
        raise _malformed(f"{_checked(url)[:200]!r} names no object")
    return _object("short", provider, _bucket(bucket), _checked(name), {}, config)


def bucket_of(path: str, query: str, config: ServiceConfig) -> ObjectName:
    """Return the bucket at ``path`` (``/v1/buckets/B``, ``/s3/B``, ``/gs/B``) for its listing: ``url`` ends with "/".
    Refusals as of `name_of`."""
    if path.startswith("/v1/buckets/"):
        api, rest = "ais", path.removeprefix("/v1/buckets/")
    else:
        api, rest = _api(path)
    if api == "url":
        raise _malformed("/url names objects, and has no buckets")
    parameters = _parameters(query)
    provider, rest = _provider(api, rest, parameters)
    raw_bucket, _, more = rest.partition("/")
    if more or provider == "ht":
        raise _malformed(f"{path[:200]!r} names no bucket")
    return _object(api, provider, _bucket(_decoded(raw_bucket)), "", parameters, config)


def url_of(folder: str, name: str) -> str:
    """Return the URL of ``name`` in ``folder``, a URL that ends with "/", escaped if URLs of that kind are."""
    quoted = scheme(folder) in ("http", "https", "file")
    return folder + (urllib.parse.quote(name, safe="/~") if quoted else name)


def _api(path: str) -> tuple[str, str]:
    for prefix, api in (("/v1/objects/", "ais"), ("/s3/", "s3"), ("/url/", "url")):
        if path.startswith(prefix):
            return api, path.removeprefix(prefix)
    for name in _SHORT:
        if path.startswith(f"/{name}/"):
            return "short", path[1:]
    if path.startswith("/v1/ml/"):
        words = "GetBatch (/v1/ml/moss) is AIStore's own; ask for the objects one by one, or for members by archpath="
        raise Refusal(501, words, "not-here")
    raise Refusal(404, "there is nothing at this path; objects are at /v1/objects/BUCKET/OBJECT?provider=", "path")


def _provider(api: str, rest: str, parameters: Mapping[str, str]) -> tuple[str, str]:
    """Return AIStore's name of the provider, and the rest of the path."""
    if api == "s3":
        return "aws", rest
    if api == "short":
        name, _, rest = rest.partition("/")
        return _SHORT[name], rest
    name = parameters.get("provider") or "ais"
    if name.lower() not in _PROVIDERS:
        raise Refusal(400, f"provider {name[:40]!r} is none; there are ais, aws, gcp, azure, oci and ht", "provider")
    return _PROVIDERS[name.lower()], rest


def _object(
    api: str, provider: str, bucket: str, name: str, parameters: Mapping[str, str], config: ServiceConfig
) -> ObjectName:
    params = {key: value for key, value in parameters.items() if key in PARAMETERS}
    folder = _folder(api, provider, bucket, parameters.get("namespace", ""), config)
    url = url_of(folder, name)
    version = parameters.get("versionId") if api == "s3" and name else None
    if version == "":
        raise Refusal(400, "versionId= is empty", "name", code="InvalidArgument")
    if version is not None and url.startswith("s3://"):
        url = f"{url}?versionId={version}"
    elif version not in (None, "null"):  # "null" names the only version that other stores have
        words = "?versionId= of a bucket that is not in S3 is not answered here; leave it out to read the object"
        raise Refusal(501, words, "not-here")
    return ObjectName(url, provider, bucket, name, api, params)


def _folder(api: str, provider: str, bucket: str, namespace: str, config: ServiceConfig) -> str:
    """Return the URL that a bucket stands for, with "/" at its end."""
    match = _NAMESPACE.fullmatch(namespace)
    if match is None:
        raise _malformed(f"namespace {namespace[:80]!r} is none; write @uuid#name")
    space = f"@{match[1]}#{match[2] or ''}" if match[1] or match[2] else ""
    if provider == "ais" or api == "s3":
        own = dict(config.buckets).get(f"{space}/{bucket}" if space else bucket)
        if own is not None:
            return own if own.endswith("/") else own + "/"
    if provider != "ais":
        if space:
            raise _malformed(f"namespace {space!r}: only ais:// buckets have one here")
        return f"{SCHEMES[provider]}://{bucket}/"
    if not environment.value("AIS_ENDPOINT"):
        raise Refusal(404, f"bucket ais://{bucket} does not exist; this service's own are in its `buckets`", "bucket")
    return f"ais://{space}/{bucket}/" if space else f"ais://{bucket}/"


def _foreign(url: str) -> ObjectName:
    """Return the name of a URL from a client. URLs that serve only attacks are refused whatever is allowed."""
    if len(url.encode()) > NAME_LIMIT_BYTES:
        raise Refusal(414, f"a URL of more than {NAME_LIMIT_BYTES} bytes", "name")
    kind = scheme(url)
    if kind in ("", "-", "file", "pipe") or len(links(url)) > 1 or not _URL.match(url):
        raise _malformed("/url takes whole URLs of one store, such as https%3A%2F%2Fhost%2Fpath")
    if kind in ("http", "https"):
        try:
            parts = urllib.parse.urlsplit(url)
            valid = bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid:
            raise _malformed("/url: a malformed URL; write https://host[:port]/path")
        if "@" in parts.netloc:
            raise _malformed("/url: a URL with a user or password; credentials are the service's own")
        if "\\" in url or re.search(r"[\s%]", parts.netloc) or not parts.netloc.isascii():
            raise _malformed("/url: this URL would be read in two ways; escape what is not plain in it")
    return ObjectName(url, "ht", "", "", "url")


def _malformed(why: str) -> Refusal:
    return Refusal(400, why, "name")


def _bucket(name: str) -> str:
    """Return ``name`` if a bucket can have it."""
    if not _BUCKET.fullmatch(name) or ".." in name:
        shown = redact(f"s3://{name}").removeprefix("s3://")  # as s3://KEY:SECRET@bucket is written by some
        raise _malformed(f"{shown[:80]!r} is no bucket's name")
    return name


def _decoded(raw: str) -> str:
    """Return ``raw`` percent-decoded once, as UTF-8."""
    if _BAD_ESCAPE.search(raw):
        raise _malformed("a % that escapes nothing; write %25 for it")
    raw_bytes = urllib.parse.unquote_to_bytes(raw.encode("utf-8", "surrogateescape"))
    return _checked(raw_bytes.decode("utf-8", "surrogateescape"))


def _checked(text: str) -> str:
    """Return ``text`` if a store can have such a name."""
    try:
        size = len(text.encode())
    except UnicodeError:
        raise _malformed("a name that is not UTF-8") from None
    if size > NAME_LIMIT_BYTES:
        raise Refusal(414, f"a name of more than {NAME_LIMIT_BYTES} bytes", "name")
    if _CONTROL.search(text):
        raise _malformed("a name with control characters")
    return text


def _parameters(query: str) -> dict[str, str]:
    try:
        pairs = urllib.parse.parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=64)
    except ValueError:
        raise _malformed("a query that does not parse") from None
    parameters = dict(pairs)
    for name in _ONCE:
        if sum(key == name for key, _ in pairs) > 1:
            raise _malformed(f"{name}= is given twice")
    if any(_CONTROL.search(value) for name, value in pairs if name in (*_ONCE, *PARAMETERS)):
        raise _malformed("a query with control characters")
    return parameters
