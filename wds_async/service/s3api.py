"""The reading side of S3's API below ``/s3``, path style: buckets, listings, objects, errors as XML.

Signatures of clients are not checked; where tokens are required, the access key's id is the token."""

from __future__ import annotations

import base64
import datetime
import re
import urllib.parse
from collections.abc import Iterable, Mapping

from wds_async.service.buckets import allowed_buckets, check_bucket
from wds_async.service.context import Context
from wds_async.service.http_server import HttpRequest, HttpResponse
from wds_async.service.listing import ListEntry, ListPage
from wds_async.service.names import ObjectName, url_of
from wds_async.service.refusals import Refusal, xml_text

__all__ = ["answer_bucket", "answer_buckets", "check_query"]

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_MOST = 1000
# Questions about a bucket that have a sub-resource's name. What is not known here must not be taken for a listing.
_LISTING = frozenset({"list-type", "prefix", "delimiter", "continuation-token", "start-after", "max-keys",
                      "encoding-type", "marker", "fetch-owner", "x-id"})  # fmt: skip
_SUBRESOURCES = frozenset({
    "acl", "annotation", "attributes", "cors", "delete", "encryption", "legal-hold", "lifecycle", "logging",
    "notification", "object-lock", "partNumber", "policy", "renameObject", "replication", "requestPayment", "restore",
    "retention", "select", "select-type", "tagging", "torrent", "uploadId", "uploads", "versioning", "versions",
    "website",
})  # fmt: skip
"""Parameters by which a request of S3 is about something else than the bytes of an object, or writes."""
_SIGNATURE = re.compile(r"X-Amz-|AWSAccessKeyId|Signature|Expires", re.IGNORECASE)


def check_query(names: Iterable[str]) -> None:
    """Raise Refusal (501) if one of the parameters ``names`` selects a sub-resource: an object must not be taken for
    its tags, nor the whole for a part. Others (signatures, ``x-id``, ``response-…``) are ignored, as S3 does."""
    if unknown := sorted(_SUBRESOURCES.intersection(names)):
        words = f"?{unknown[0]} is not answered here: objects are read whole, in ranges and by version, and listed"
        raise Refusal(501, words, "not-here")


async def answer_buckets(context: Context) -> HttpResponse:
    """Answer ``GET /s3``: the buckets that the configuration names."""
    names = sorted({name for provider, name in allowed_buckets(context) if provider in ("aws", "ais")})
    since = _date(0.0)
    rows = "".join(f"<Bucket><Name>{xml_text(n)}</Name><CreationDate>{since}</CreationDate></Bucket>" for n in names)
    owner = "<Owner><ID>wds-async</ID></Owner>"
    return _document("ListAllMyBucketsResult", f"{owner}<Buckets>{rows}</Buckets>")


async def answer_bucket(context: Context, request: HttpRequest, named: ObjectName) -> HttpResponse:
    """Answer ``HEAD /s3/B``, ``GET /s3/B?location`` and ListObjects, in both of its versions."""
    parameters = {name: value for name, value in request.query.items() if not _SIGNATURE.match(name)}
    if request.method == "HEAD" or "location" in parameters:
        await check_bucket(context, named)
        region = f"<LocationConstraint xmlns={_NAMESPACE!r}></LocationConstraint>".replace("'", '"')
        return _xml_response(region) if request.method == "GET" else HttpResponse()
    if unknown := sorted(set(parameters) - _LISTING):
        raise Refusal(501, f"?{unknown[0][:40]} of a bucket is not answered here; objects and listings are", "not-here")
    prefix, delimiter = parameters.get("prefix", ""), parameters.get("delimiter", "")
    if delimiter not in ("", "/"):
        raise Refusal(501, 'the only delimiter here is "/"', "not-here")
    await context.allowed.check(url_of(named.url, prefix))
    limit = parameters.get("max-keys", "")
    if limit and not re.fullmatch(r"[0-9]{1,9}", limit, re.ASCII):
        raise Refusal(400, f"max-keys={limit[:40]!r} is no number", "name", code="InvalidArgument")
    most, page = min(_MOST, int(limit or _MOST)), ListPage((), False)
    if most:
        page = await context.listings.page(named.url, prefix, _after(parameters), most, one_level=bool(delimiter))
    return _listed(named.bucket, parameters, page, most)


def _after(parameters: Mapping[str, str]) -> str:
    """Return the name behind which a page begins. A continuation token is that name, so no state is kept."""
    if token := parameters.get("continuation-token"):
        try:
            return base64.b64decode(token.encode("ascii"), b"-_", validate=True).decode()
        except ValueError:
            raise Refusal(400, "this continuation token was not given here", "name", code="InvalidArgument") from None
    return parameters.get("start-after" if parameters.get("list-type") == "2" else "marker", "")


def _listed(bucket: str, parameters: Mapping[str, str], page: ListPage, most: int) -> HttpResponse:
    encoded = parameters.get("encoding-type") == "url"

    def name(text: str) -> str:
        return xml_text(urllib.parse.quote(text, safe="/") if encoded else text)

    last = page.lines[-1].name if page.more else ""
    optional = [("Delimiter", name(parameters.get("delimiter", ""))), ("EncodingType", "url" if encoded else "")]
    if parameters.get("list-type") == "2":
        tags = [("KeyCount", str(len(page.lines)))]
        optional += [(tag, xml_text(parameters.get(key, ""))) for tag, key in _ECHOED]
        optional.append(("NextContinuationToken", base64.urlsafe_b64encode(last.encode()).decode()))
    else:
        tags = [("Marker", name(parameters.get("marker", "")))]
        optional.append(("NextMarker", name(last)))
    tags += [("Name", xml_text(bucket)), ("Prefix", name(parameters.get("prefix", ""))), ("MaxKeys", str(most))]
    tags.append(("IsTruncated", "true" if page.more else "false"))
    tags += [(tag, text) for tag, text in optional if text]
    rows = [_row(line, name(line.name)) for line in page.lines]
    return _document("ListBucketResult", _tags(tags) + "".join(rows))


_ECHOED = (("ContinuationToken", "continuation-token"), ("StartAfter", "start-after"))


def _row(line: ListEntry, name: str) -> str:
    if line.folder:
        return f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>"
    inner = (("Key", name), ("LastModified", _date(line.modified or 0.0)), ("Size", str(line.size or 0)))
    return f"<Contents>{_tags((*inner, ('StorageClass', 'STANDARD')))}</Contents>"


def _tags(pairs: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<{tag}>{text}</{tag}>" for tag, text in pairs)


def _document(root: str, inner: str) -> HttpResponse:
    return _xml_response(f'<{root} xmlns="{_NAMESPACE}">{inner}</{root}>')


def _xml_response(text: str) -> HttpResponse:
    return HttpResponse(body=f'<?xml version="1.0" encoding="UTF-8"?>\n{text}', content_type="application/xml")


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
