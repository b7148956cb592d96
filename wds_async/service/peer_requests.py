"""Answers to other services of the cluster: one chunk of an object, from the cache or the store, never from a third
service."""

from __future__ import annotations

import asyncio
import contextlib
import re
import urllib.parse
from collections.abc import AsyncIterator, Mapping

from wds_async.service.cache.cache import CachedObject
from wds_async.service.cache.index import CHUNK_BYTES, key_of
from wds_async.service.cache.origin import Client, ForwardedFetch, Urgency
from wds_async.service.context import Context, Exchange
from wds_async.service.http_server import HttpResponse
from wds_async.service.names import NAME_LIMIT_BYTES, ObjectName
from wds_async.service.objects import BodyPart, Pace, send_parts
from wds_async.service.peers import PEER_PATH, pack_facts
from wds_async.service.refusals import Refusal
from wds_async.urls import scheme

__all__ = ["answer"]

_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})", re.ASCII)
_SIGNS_PER_TIMEOUT = 4
_URGENCIES = {str(int(urgency)): urgency for urgency in Urgency}


async def answer(context: Context, exchange: Exchange, path: str) -> HttpResponse:
    """Send a chunk to another member. Refusal (421) for one that this member neither owns nor has, and for one that it
    is requesting from a member itself; 409 if the object has another version here."""
    peers, request = context.peers, exchange.request
    if peers is None:
        raise Refusal(404, "this service has no peers", "path")
    named = exchange.named = await _named(context, path)
    start, stop = _range(request.headers.get("range", ""))
    key, number = key_of(named.url), start // CHUNK_BYTES
    context.orders.heard(named.url)
    client = Client(exchange.client.tenant, exchange.client.name, node=True)
    urgency = _URGENCIES.get(request.headers.get("wds-urgency", ""), Urgency.DEMAND)
    async with _signs(context, exchange):
        with await _opened(context, named.url, key, number, client, request.headers) as held:
            size = held.size
            if size is None or not held.facts.ranged or not held.facts.version:
                raise Refusal(409, "the object can be read in order only, or has no version", "peer")
            if start >= size:
                raise Refusal(416, f"the object has {size} bytes", "range")
            stop = min(stop, size)
            fields = {
                "Content-Type": "application/octet-stream",
                "Content-Range": f"bytes {start}-{stop - 1}/{size}",
                "Wds-Facts": pack_facts(held.facts),
                "Age": str(round(held.age_s)),
            }
            if (crc := held.crc(number)) is not None and stop - start == min(CHUNK_BYTES, size - start):
                fields["Wds-Crc32c"] = str(crc)
            try:
                return await send_parts(
                    context,
                    exchange,
                    held,
                    fields,
                    [BodyPart(start, stop)],
                    status=206,
                    urgency=urgency,
                    pace=_pace(context, exchange.client),
                )
            except ForwardedFetch as exn:
                raise Refusal(421, str(exn), "peer") from None
            finally:
                peers.stats.sent_bytes += exchange.sent


async def _named(context: Context, path: str) -> ObjectName:
    """Return the object at ``path``, which may be read: by `allow`, or as one of the service's own buckets."""
    raw = path.removeprefix(PEER_PATH).encode("utf-8", "surrogateescape")
    url = urllib.parse.unquote_to_bytes(raw).decode("utf-8", "surrogateescape")
    if len(url.encode("utf-8", "surrogateescape")) > NAME_LIMIT_BYTES:
        raise Refusal(414, f"a URL of more than {NAME_LIMIT_BYTES} bytes", "name")
    if "://" not in url or scheme(url) in ("", "-", "file", "pipe"):
        raise Refusal(400, "/v1/peer takes the URL of an object in a store", "name")
    own = [folder if folder.endswith("/") else folder + "/" for _, folder in context.config.buckets]
    web = scheme(url) in ("http", "https") and not url.startswith(tuple(own))
    named = ObjectName(url, "", "", "", "url" if web else "short")
    if not context.allowed.known(named):
        await context.allowed.admit(named)
    return named


def _range(text: str) -> tuple[int, int]:
    """Return the bytes of a request: one chunk, or less at its beginning."""
    match = _RANGE.fullmatch(text)
    start, stop = (int(match[1]), int(match[2]) + 1) if match else (0, 0)
    if not start < stop <= start + CHUNK_BYTES or start % CHUNK_BYTES:
        raise Refusal(
            400, f"/v1/peer takes one chunk of {CHUNK_BYTES} bytes: Range: bytes=0-{CHUNK_BYTES - 1}", "range"
        )
    return start, stop


async def _opened(
    context: Context, url: str, key: str, number: int, client: Client, headers: Mapping[str, str]
) -> CachedObject:
    """Open the object for another member, in the version that it wants. Refusal (421, 409) as of `answer`."""
    assert context.peers is not None
    cache, version = context.cache, urllib.parse.unquote(headers.get("wds-version", ""))
    present = cache.peek(url, client=client)
    if present is not None and present.has(number) and version in ("", present.facts.version):
        return present
    if present is not None:
        present.release()
    if not context.peers.accepts(key, number) or not cache.fetching.disk.usable:
        raise Refusal(421, "this chunk belongs to another member", "peer")
    for insist in (False, True):  # a copy here may be the older one
        held = await cache.open(url, client=client, start=number * CHUNK_BYTES, insist=insist)
        if version in ("", held.facts.version):
            return held
        held.release()
    raise Refusal(409, "the object has another version here", "peer")


@contextlib.asynccontextmanager
async def _signs(context: Context, exchange: Exchange) -> AsyncIterator[None]:
    """Send interim answers (102) until the first byte can be sent, so that the other member goes on waiting."""
    connection, every_s = exchange.request.connection, context.config.peer_timeout_s / _SIGNS_PER_TIMEOUT

    async def send() -> None:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            while not exchange.first_byte_at:
                await asyncio.sleep(every_s)
                if not exchange.first_byte_at:
                    connection.write(b"HTTP/1.1 102 Processing\r\n\r\n")

    task = asyncio.create_task(send(), name="signs")
    try:
        yield
    finally:
        task.cancel()


def _pace(context: Context, client: Client) -> Pace | None:
    """Return what waits until so many bytes may go to another member: by its limits, and by those of all of them."""
    own, of_all = context.rate_limit.of(client), context.peer_rate.of(Client("peers", client.name))
    if own is None or of_all is None:
        return own or of_all

    async def both(count: int) -> None:
        await own(count)
        await of_all(count)

    return both
