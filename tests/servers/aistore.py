"""AIStore's protocol: a proxy that redirects and targets that serve, as a client sees them.

Statuses, headers, the forms of errors and of listings are those of AIStore 5; `tests/clouds/test_aistore_double.py`
holds it against AIStore's own client. Nothing is stored on disk, and every target can serve every object.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import re
import ssl
import tarfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import xxhash
from aiohttp import web

__all__ = ["AisDouble", "Scripted", "Seen"]

_ALIASES = {"gs": "gcp", "s3": "aws", "az": "azure"}
_NO_RECURSION, _NO_DIRS, _IS_DIR = 1 << 11, 1 << 13, 1 << 8
_PIECE = 64 << 10


@dataclass(frozen=True, slots=True)
class Seen:
    """One request: at which node (``proxy``, ``t0``, ``t1``), and what it asked for."""

    node: str
    method: str
    path: str
    """As it was sent: percent-encoded, without the query."""
    query: dict[str, str]
    range: str
    authorization: str


@dataclass(slots=True)
class Scripted:
    """What the next ``times`` requests with ``method`` at ``node`` get instead: a status, or a body that ends after
    ``cut_at`` bytes."""

    node: str
    method: str = "GET"
    times: int = 1
    status: int = 0
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    cut_at: int = -1
    then: Callable[[], None] | None = None
    """Called, on the server's loop, when a body has been cut."""


@dataclass(slots=True)
class _Object:
    data: bytes
    version: int


class _Refused(Exception):
    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers or {}


class AisDouble:
    """One proxy and ``targets`` targets; use it as a context manager.

    ``token``: the bearer token that the proxy wants. ``signs``: redirects carry a signature, without which targets
    refuse; `lapse` makes all that were given out invalid. ``page``: the most entries of one page of a listing.
    Buckets of clouds exist when something was `put` there, as ``provider/bucket`` or ``provider/@uuid#name/bucket``.
    """

    def __init__(
        self,
        targets: int = 2,
        *,
        token: str = "",
        signs: bool = False,
        page: int = 1000,
        tls: ssl.SSLContext | None = None,
        recursive_only: bool = False,
    ) -> None:
        self.token, self.signs, self.page, self._tls = token, signs, page, tls
        self.recursive_only = recursive_only
        """Ignore the flag of listings for one folder, as older clusters do."""
        self.seen: list[Seen] = []
        self.etls: dict[str, Callable[[bytes, str], bytes]] = {}
        self.redirects_to: str | None = None
        """Where the proxy sends everything, in place of its targets."""
        self.batch_ranges: bool | None = True
        """Whether batches may be of ranges: False sends whole objects, as AIStore 4; None: there are no batches."""
        self.batches: list[list[dict[str, Any]]] = []
        """Entries of the batches that targets were asked for."""
        self._buckets: dict[str, dict[str, _Object]] = {}
        self._nodes = ["proxy", *(f"t{i}" for i in range(targets))]
        self._ports: dict[str, int] = {}
        self._runners: dict[str, web.ServerRunner] = {}
        self._gone: set[str] = set()
        self._script: list[Scripted] = []
        self._salt = 0
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None

    # -- the test's side ----------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """The proxy's URL, as ``AIS_ENDPOINT`` has it."""
        return self.url_of("proxy")

    def url_of(self, node: str) -> str:
        """The URL of ``proxy``, ``t0``, ``t1``, …, without a final slash."""
        return f"{'https://localhost' if self._tls else 'http://127.0.0.1'}:{self._ports[node]}"

    def put(self, path: str, data: bytes) -> None:
        """``provider/bucket/name``, or ``provider/@uuid#namespace/bucket/name``."""
        provider, _, rest = path.partition("/")
        namespace = "@#"
        if rest.startswith("@"):
            namespace, _, rest = rest.partition("/")
        bucket, _, name = rest.partition("/")
        self._store(f"{provider}/{namespace}/{bucket}", name, data)

    def get(self, path: str) -> bytes | None:
        """What is stored at ``provider/bucket/name``, None for nothing."""
        provider, bucket, name = path.split("/", 2)
        found = self._buckets.get(f"{provider}/@#/{bucket}", {}).get(name)
        return found.data if found else None

    def script(self, node: str, **fields: Any) -> Scripted:
        """Let the next requests at ``node`` go wrong; see `Scripted`. ``t*`` is any target."""
        self._script.append(Scripted(node, **fields))
        return self._script[-1]

    def kill(self, node: str, *, noticed: bool = True) -> None:
        """End a node, connections and all. Until it is ``noticed`` the proxy goes on sending clients there."""
        if noticed:
            self._gone.add(node)
        asyncio.run_coroutine_threadsafe(self._kill(node), self._loop).result(10)

    def notice(self, node: str) -> None:
        """The proxy has learnt that ``node`` is gone."""
        self._gone.add(node)

    def lapse(self) -> None:
        """Every signature that was given out is worthless from now on."""
        self._salt += 1

    def at(self, node: str, method: str = "GET") -> list[Seen]:
        """The requests with ``method`` at ``node`` (``t*``: at all targets), in order."""
        return [seen for seen in self.seen if _matches(node, seen.node) and seen.method == method]

    def __enter__(self) -> AisDouble:
        self._thread = threading.Thread(target=self._run, name="aistore-double", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._thread is not None
        for node in list(self._runners):
            asyncio.run_coroutine_threadsafe(self._kill(node), self._loop).result(10)
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    # -- nodes --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _start(self) -> None:
        for node in self._nodes:
            runner = web.ServerRunner(web.Server(self._handler(node)), shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self._tls)
            await site.start()
            self._runners[node], self._ports[node] = runner, runner.addresses[0][1]

    async def _kill(self, node: str) -> None:
        runner = self._runners.pop(node, None)
        if runner is not None:
            await runner.cleanup()

    async def _end(self) -> None:
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for _ in range(5):  # transports close their sockets in a later turn of the loop
            await asyncio.sleep(0)

    def _handler(self, node: str) -> Callable[[web.BaseRequest], Any]:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            path, _, query = request.raw_path.partition("?")
            fields = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
            headers = request.headers
            self.seen.append(
                Seen(node, request.method, path, fields, headers.get("Range", ""), headers.get("Authorization", ""))
            )
            try:
                scripted = self._scripted(node, request.method)
                if scripted is not None and scripted.status:
                    raise _Refused(scripted.status, scripted.message, scripted.headers)
                if node == "proxy":
                    return await self._at_proxy(request, path, fields)
                return await self._at_target(request, path, fields, scripted)
            except _Refused as refused:
                return _error(request, node, refused)

        return handle

    def _scripted(self, node: str, method: str) -> Scripted | None:
        for scripted in self._script:
            if scripted.times > 0 and _matches(scripted.node, node) and scripted.method == method:
                scripted.times -= 1
                return scripted
        return None

    # -- the proxy ----------------------------------------------------------------------------------------

    async def _at_proxy(self, request: web.BaseRequest, path: str, query: dict[str, str]) -> web.StreamResponse:
        if path == "/v1/health":
            return web.Response()
        if self.token:
            self._authorize(request)
        if path == "/v1/daemon":
            return web.json_response(self._smap())
        parts = path.split("/", 3)
        if parts[1] in ("gs", "az", "ais", "s3") and len(parts) > 3:
            where = f"/v1/objects/{parts[2]}/{parts[3]}"
            short = {"provider": _ALIASES.get(parts[1], parts[1]), **query}
            return self._redirect(where, urllib.parse.urlencode(short), 307 if parts[1] == "s3" else None, request)
        if path.startswith("/v1/buckets/"):
            return await self._bucket(request, urllib.parse.unquote(path.removeprefix("/v1/buckets/")), query)
        if path.startswith("/v1/ml/moss") and self.batch_ranges is not None:
            if not json.loads(await request.read())["in"]:
                raise _Refused(400, "moss: empty input")
            where = f"{path}/xid/wid/{len(self._nodes) - 1}"
            return self._redirect(where, request.raw_path.partition("?")[2], 307, request)
        if path.startswith("/v1/objects/"):
            return self._redirect(path, request.raw_path.partition("?")[2], None, request)
        raise _Refused(400, f"invalid request URI {path!r}")

    def _authorize(self, request: web.BaseRequest) -> None:
        given = request.headers.get("Authorization", "")
        if not given:
            raise _Refused(401, "token required")
        if given != f"Bearer {self.token}":
            raise _Refused(401, "invalid token")

    def _redirect(self, path: str, query: str, status: int | None, request: web.BaseRequest) -> web.Response:
        alive = [node for node in self._nodes[1:] if node not in self._gone]
        if not alive:
            raise _Refused(503, "cluster has no targets")
        digest = hashlib.sha256(path.encode()).digest()
        target = alive[digest[0] % len(alive)]
        more = {"pid": "p[double]", "utm": str(time.time_ns())}
        if self.signs:
            more["sig"] = self._signature(path)
        where = f"{self.redirects_to or self.url_of(target)}{path}?{query}{'&' if query else ''}"
        return web.Response(
            status=status or (301 if request.method == "GET" else 307),
            headers={"Location": where + urllib.parse.urlencode(more)},
        )

    def _signature(self, path: str) -> str:
        return hashlib.sha256(f"{self._salt} {path}".encode()).hexdigest()[:16]

    def _smap(self) -> dict[str, Any]:
        def node(name: str, kind: str) -> dict[str, Any]:
            host, _, port = self.url_of(name).partition("://")[2].partition(":")
            net = {"node_hostname": host, "daemon_port": port, "direct_url": self.url_of(name)}
            digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
            return {"daemon_id": name, "daemon_type": kind, "public_net": net, "id_digest": digest}

        alive = [name for name in self._nodes[1:] if name not in self._gone]
        proxy = node("proxy", "proxy")
        targets = {name: node(name, "target") for name in alive}
        return {"pmap": {"proxy": proxy}, "proxy_si": proxy, "tmap": targets, "version": 1, "uuid": "double"}

    async def _bucket(self, request: web.BaseRequest, bucket: str, query: dict[str, str]) -> web.StreamResponse:
        uname = _uname(bucket, query)
        if request.method == "HEAD":
            self._objects(uname)
            return web.Response(headers={"Ais-Bucket-Props": json.dumps({"provider": uname.partition("/")[0]})})
        message = json.loads(await request.read())
        if message["action"] == "create-bck":
            if uname in self._buckets:
                raise _Refused(409, f'bucket "{_shown(uname)}" already exists')
            self._buckets[uname] = {}
            return web.Response()
        if message["action"] == "destroy-bck":
            del self._buckets[uname]
            return web.Response()
        if request.method != "GET" or message["action"] != "list":
            raise _Refused(400, f"invalid action {message['action']!r}")
        page = self._page(self._objects(uname), message["value"])
        if request.headers.get("Accept") == "application/msgpack":
            import msgpack  # few tests ask for it

            short = {"name": "n", "size": "s", "flags": "f"}
            entries = [{short[key]: value for key, value in entry.items()} for entry in page["entries"]]
            packed = {
                "UUID": page["uuid"],
                "ContinuationToken": page["continuation_token"],
                "Entries": entries,
                "Flags": 0,
            }
            return web.Response(body=msgpack.packb(packed), content_type="application/msgpack")
        for entry in page["entries"]:
            entry["size"] = str(entry["size"])
        return web.json_response(page)

    def _page(self, objects: dict[str, _Object], wanted: dict[str, Any]) -> dict[str, Any]:
        flags, prefix, after = int(wanted.get("flags") or 0), wanted.get("prefix", ""), wanted["continuation_token"]
        if after and not wanted.get("uuid"):
            raise _Refused(400, "a continuation token without its uuid")
        most = min(self.page, int(wanted.get("pagesize") or 0) or self.page)
        one_level = flags & _NO_RECURSION and not self.recursive_only
        found: dict[str, dict[str, Any]] = {}
        for name in sorted(objects):
            if not name.startswith(prefix):
                continue
            folder, slash, _ = name[len(prefix) :].partition("/")
            if one_level and slash:
                if not flags & _NO_DIRS:
                    found[prefix + folder + "/"] = {"name": prefix + folder + "/", "size": 0, "flags": _IS_DIR}
                continue
            found[name] = {"name": name, "size": len(objects[name].data), "flags": 1 << 6}
        names = [name for name in sorted(found) if name > after]
        token = names[most - 1] if len(names) > most else ""
        entries = [found[name] for name in names[:most]]
        return {"uuid": wanted.get("uuid") or "job1", "continuation_token": token, "entries": entries, "flags": 0}

    # -- targets ------------------------------------------------------------------------------------------

    async def _at_target(
        self, request: web.BaseRequest, path: str, query: dict[str, str], scripted: Scripted | None
    ) -> web.StreamResponse:
        is_batch = path.startswith("/v1/ml/moss/")
        if not path.startswith("/v1/objects/") and not is_batch:
            raise _Refused(400, f"invalid request URI {path!r}")
        if request.headers.get("Authorization"):
            raise _Refused(400, "the double's targets want no token: it is the proxy's")
        if is_batch:
            return await self._batch(request, path, query, scripted)
        if self.signs and query.get("sig") != self._signature(path):
            raise _Refused(401, "invalid or expired signature")
        bucket, _, raw = path.removeprefix("/v1/objects/").partition("/")
        uname, name = _uname(urllib.parse.unquote(bucket), query), urllib.parse.unquote(raw)
        if request.method == "PUT":
            return await self._put(request, uname, name)
        objects = self._objects(uname)
        if name not in objects:
            raise _Refused(404, f'object "{_shown(uname)}/{name}" does not exist')
        stored = objects[name]
        if request.method == "DELETE":
            del objects[name]
            return web.Response()
        headers = {
            "Ais-Checksum-Type": "xxhash2",
            "Ais-Checksum-Value": xxhash.xxh64(stored.data).hexdigest(),
            "Ais-Version": str(stored.version),
            "Ais-Present": "true",
        }
        if "etl_name" in query:
            return await self._transformed(request, stored, query)
        data = stored.data
        if query.get("archregx") or query.get("archpath"):
            if request.headers.get("Range"):
                raise _Refused(501, "range is not supported for archived content")
            if query.get("archregx"):
                return await _chunked(request, _matching(data, query["archregx"], query.get("archmode", "")))
            data = _member(data, query["archpath"], f"{_shown(uname)}/{name}")
        return await self._served(request, data, headers, scripted)

    async def _batch(
        self, request: web.BaseRequest, path: str, query: dict[str, str], scripted: Scripted | None
    ) -> web.StreamResponse:
        """Answer with a tar of what the entries name, in their order: objects, members of archives, ranges of both."""
        wanted = json.loads(await request.read())
        if wanted.get("mime") not in (None, "", ".tar") or not wanted.get("strm"):
            raise _Refused(501, "the double's batches are streamed tars")
        self.batches.append(wanted["in"])
        named = path.removeprefix("/v1/ml/moss/").split("/")[:-3]
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for entry in wanted["in"]:
                bucket = entry.get("bucket") or named[0]
                uname = _uname(bucket, {"provider": entry.get("provider") or query.get("provider", "")})
                name = entry["objname"] if wanted.get("onob") else f"{bucket}/{entry['objname']}"
                stored = self._objects(uname).get(entry["objname"])
                if stored is None and not wanted.get("coer"):
                    raise _Refused(404, f'object "{_shown(uname)}/{entry["objname"]}" does not exist')
                data = stored.data if stored is not None else b""
                if entry.get("archpath"):
                    name, data = f"{name}/{entry['archpath']}", _member(data, entry["archpath"], name)
                if stored is not None and self.batch_ranges:
                    data = _range_of(entry, data)
                info = tarfile.TarInfo(name if stored is not None else f"__404__/{name}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        return await self._served(request, out.getvalue(), {}, scripted)

    async def _served(
        self, request: web.BaseRequest, data: bytes, headers: dict[str, str], scripted: Scripted | None
    ) -> web.StreamResponse:
        start, stop, status = 0, len(data), 200
        if asked := request.headers.get("Range"):
            span = _span(asked, len(data))
            if span is None:
                raise _Refused(416, f"invalid range {asked}", {"Content-Range": f"bytes */{len(data)}"})
            (start, stop), status = span, 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        response = web.StreamResponse(status=status, headers={**headers, "Accept-Ranges": "bytes"})
        response.content_length = stop - start
        response.content_type = "application/octet-stream"
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        cut = scripted.cut_at if scripted is not None else -1
        for at in range(start, stop, _PIECE):
            piece = data[at : min(stop, at + _PIECE)]
            if 0 <= cut < at - start + len(piece):
                await response.write(piece[: cut - (at - start)])
                await asyncio.sleep(0.01)  # let it leave
                assert request.transport is not None
                request.transport.abort()
                if scripted is not None and scripted.then:
                    scripted.then()
                return response
            await response.write(piece)
        with contextlib.suppress(ConnectionError):
            await response.write_eof()
        return response

    async def _put(self, request: web.BaseRequest, uname: str, name: str) -> web.Response:
        if uname.startswith("ais/"):
            self._objects(uname)
        data = b"".join([piece async for piece in request.content.iter_any()])  # of any size
        self._store(uname, name, data)
        return web.Response(headers={"Ais-Version": str(self._buckets[uname][name].version)})

    async def _transformed(
        self, request: web.BaseRequest, stored: _Object, query: dict[str, str]
    ) -> web.StreamResponse:
        etl = self.etls.get(query["etl_name"])
        if etl is None:
            raise _Refused(404, f"etl job {query['etl_name']!r} not found")
        return await _chunked(request, etl(stored.data, query.get("etl_args", "")))

    def _objects(self, uname: str) -> dict[str, _Object]:
        if uname not in self._buckets:
            raise _Refused(404, f'bucket "{_shown(uname)}" does not exist')
        return self._buckets[uname]

    def _store(self, uname: str, name: str, data: bytes) -> None:
        objects = self._buckets.setdefault(uname, {})
        objects[name] = _Object(data, objects[name].version + 1 if name in objects else 1)


def _matches(wanted: str, node: str) -> bool:
    return node.startswith("t") if wanted == "t*" else node == wanted


def _uname(bucket: str, query: dict[str, str]) -> str:
    provider = query.get("provider") or "ais"
    provider = _ALIASES.get(provider, provider)
    if provider not in ("ais", "aws", "gcp", "azure", "oci"):
        raise _Refused(400, f"invalid backend provider {provider!r}")
    namespace = query.get("namespace") or "@#"
    if not re.fullmatch(r"@[\w-]*#[\w-]*", namespace):
        raise _Refused(400, f"invalid namespace {namespace!r}")
    return f"{provider}/{namespace}/{bucket}"


def _shown(uname: str) -> str:
    provider, namespace, bucket = uname.split("/", 2)
    where = "" if namespace == "@#" else f"{namespace}/"
    return f"{ {'aws': 's3', 'gcp': 'gs', 'azure': 'az'}.get(provider, provider) }://{where}{bucket}"


def _error(request: web.BaseRequest, node: str, refused: _Refused) -> web.Response:
    said = json.dumps(
        {
            "message": refused.message,
            "method": request.method,
            "url_path": request.path,
            "remote_addr": "",
            "caller": "",
            "node": node,
            "status": refused.status,
        }
    )
    if request.method == "HEAD":
        return web.Response(status=refused.status, headers={"Hdr-Error": said, **refused.headers})
    return web.Response(
        status=refused.status, body=said.encode(), content_type="application/json", headers=refused.headers
    )


def _range_of(entry: dict[str, Any], data: bytes) -> bytes:
    """Return the range that an entry of a batch names: all for none, and up to the end for the length -1."""
    start, length = entry.get("start", 0), entry.get("length", 0)
    if not start and not length:
        return data
    length = len(data) - start if length == -1 else length
    if start < 0 or length <= 0 or start + length > len(data):
        raise _Refused(416, f"start={start},length={length} of {len(data)}")
    return data[start : start + length]


def _span(asked: str, size: int) -> tuple[int, int] | None:
    first, _, last = asked.removeprefix("bytes=").partition("-")
    if not first:
        return (max(0, size - int(last)), size) if size else None
    start, stop = int(first), min(size, int(last) + 1 if last else size)
    return (start, stop) if start < size else None


def _members(data: bytes) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for info in archive:
            opened = archive.extractfile(info)
            if opened is not None:
                yield info, opened.read()


def _member(data: bytes, name: str, shown: str) -> bytes:
    for info, content in _members(data):
        if info.name == name:
            return content
    raise _Refused(404, f'"{shown}": archived file "{name}" does not exist')


def _matching(data: bytes, pattern: str, mode: str) -> bytes:
    tests: dict[str, Callable[[str], bool]] = {
        "wdskey": lambda name: name.partition(".")[0] == pattern,
        "prefix": lambda name: name.startswith(pattern),
        "suffix": lambda name: name.endswith(pattern),
        "substr": lambda name: pattern in name,
    }
    matches = tests.get(mode, lambda name: re.search(pattern, name) is not None)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for info, content in _members(data):
            if matches(info.name):
                archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


async def _chunked(request: web.BaseRequest, data: bytes) -> web.StreamResponse:
    response = web.StreamResponse()
    response.enable_chunked_encoding()
    await response.prepare(request)
    for at in range(0, len(data), _PIECE):
        await response.write(data[at : at + _PIECE])
    await response.write_eof()
    return response
