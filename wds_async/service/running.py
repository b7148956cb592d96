"""The life of a service: sockets, start, readiness, reload, draining, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import urllib.parse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from wds_async import environment
from wds_async.background import BlockingThreads
from wds_async.config import transfer_config
from wds_async.errors import WdsError
from wds_async.observe.cost_limit import ServiceCostLimit
from wds_async.observe.prices import PriceTable
from wds_async.redact import redact
from wds_async.service import app, logs
from wds_async.service.allowlist import Allowed
from wds_async.service.archives import Archives
from wds_async.service.auth import Access
from wds_async.service.cache.cache import ChunkCache
from wds_async.service.config import ServiceConfig, cache_limit, kept_free, reloaded
from wds_async.service.context import Context, Readiness
from wds_async.service.control import serve_control
from wds_async.service.http_server import ClientConnections
from wds_async.service.limits import FairScheduler, InFlightRequests, RateLimit, SpentFile
from wds_async.service.listing import Listings
from wds_async.service.metrics import Meters
from wds_async.service.orders import EpochOrders
from wds_async.service.peers import MEMORY_SHARE, Peers
from wds_async.service.prefetch import PrefetchPlans
from wds_async.service.send_fd import ReadOnlyFolder
from wds_async.transfer.ranges import RangeFetcher
from wds_async.transfer.rate_limits import OriginLimits
from wds_async.transfer.traffic import Traffic

__all__ = ["CannotServe", "Service", "run"]

logger = logging.getLogger("wds_async")
_BACKLOG, _LOG_EVERY_S = 1024, 10.0
_TEND_EVERY_S, _DISK_ANSWERS_S, _VANISHED_S = 5.0, 4.0, 15.0
_WRITERS, _MEMORY_PER_WRITER_BYTES = 4, 8 << 20  # so that writes which hang leave three quarters of the memory
_GIB = 1 << 30
_HEDGE_SHARE_OF_MEMBERS = 0.01
"""Of the bytes that a member of a cluster reads: all members read the store at once, and what they share is that each
byte is read once. A connection that is silent is replaced all the same."""
Factory = Callable[[], asyncio.BaseProtocol]


class CannotServe(WdsError):
    """The service cannot start: its port is taken, or its folder cannot be used."""


def notify(state: str) -> bool:
    """Send ``READY=1``, ``STOPPING=1``, ``WATCHDOG=1`` or ``STATUS=…`` to ``NOTIFY_SOCKET``; return whether a manager
    took it. Errors are ignored."""
    path = environment.variable("NOTIFY_SOCKET") or ""
    if not path.startswith(("/", "@")):
        return False
    address = "\0" + path[1:] if path.startswith("@") else path
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.setblocking(False)
        there.sendto(state.encode(), address)
        return True
    return False


def watchdog_s() -> float | None:
    """Return how often the manager wants ``WATCHDOG=1``: half of the time after which it restarts the service."""
    text = environment.variable("WATCHDOG_USEC") or ""
    return int(text) / 2e6 if text.isascii() and text.isdigit() and int(text) > 0 else None


async def listen_at(factory: Factory, host: str, port: int) -> asyncio.Server:
    """Listen for TCP. CannotServe if the address cannot be bound."""
    try:
        loop = asyncio.get_running_loop()
        return await loop.create_server(factory, host, port, backlog=_BACKLOG, start_serving=False)
    except OSError as exn:
        advice = "another process listens there: stop it, or give another --port (0: any)"
        why = advice if "address already in use" in str(exn).lower() else "--host and --port say where"
        raise CannotServe(f"cannot listen at {host} port {port}: {exn.strerror or exn}; {why}") from exn


async def listen_at_path(factory: Factory, path: str) -> asyncio.Server:
    """Listen at a Unix socket, replacing one that a dead service left. CannotServe if another process listens there,
    the path is no socket, or it cannot be made."""
    try:
        if _taken(path):
            raise CannotServe(f"cannot listen at {path}: another process does; stop it, or give another --socket")
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(factory, path, backlog=_BACKLOG, start_serving=False)
        os.chmod(path, 0o666)  # its folder restricts access: pods have users of their own
        return server
    except (OSError, ValueError) as exn:
        raise CannotServe(f"cannot listen at {path}: {exn}; --socket names a path in a folder of its own") from exn


def _taken(path: str) -> bool:
    """Return whether a process listens at ``path``. OSError if it is no socket."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(f"{path} is there, and no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


def bear_exhaustion(loop: asyncio.AbstractEventLoop) -> None:
    """Log now and then that there are no descriptors for connections. asyncio itself would log a traceback for each
    place of the backlog, each second."""
    logged_at = float("-inf")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal logged_at
        exn = context.get("exception")
        if isinstance(exn, OSError) and "accept()" in context.get("message", ""):
            if loop.time() - logged_at >= _LOG_EVERY_S:
                logged_at = loop.time()
                logger.error("no connection can be taken: %s; tried again each second (see ulimit -n)", exn.strerror)
        elif not (isinstance(exn, ValueError) and "_start_serving" in context.get("message", "")):
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


def raise_descriptor_limit() -> int:
    """Raise this process's limit of descriptors to the maximum and return it (0 if unknown)."""
    try:
        import resource  # noqa: PLC0415 (POSIX only)
    except ImportError:
        return 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft


class Service:
    """One ``wds-async serve``: ``await start()``, then ``await stop()``, on one loop (asyncio's
    own: uvloop is no faster here). Routes get its `context`."""

    context: Context
    """Set by `start`."""
    clients: ClientConnections

    def __init__(self, config: ServiceConfig, **transfer: Any) -> None:
        """Set up the service. ``transfer`` are fields of `TransferConfig`. ConfigError for settings that cannot be
        used.
        """
        self._config, self._transfer = config, transfer
        self._access = Access(config)
        self._prices = PriceTable.load(config.prices or None)
        self.readiness = Readiness()
        self.failed = asyncio.Event()
        """Set when the service cannot go on; `failure` tells why."""
        self.failure = ""
        self._vanished_at: float | None = None
        self._folder_stat: os.stat_result | None = None
        self._spent: SpentFile | None = None
        self._listening: list[asyncio.Server] = []
        self._ends = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Open the cache, then listen, then be ready. CannotServe if that fails."""
        async with contextlib.AsyncExitStack() as ends:
            await self._start(ends)
            self._ends = ends.pop_all()
        self.readiness.why_not = ""

    async def _start(self, ends: contextlib.AsyncExitStack) -> None:
        self.context = context = await self._parts(ends)
        folder = context.cache.folder
        if folder is not None and context.cache.opened:
            self._spent = await context.call(SpentFile, folder)
            ends.callback(self._spent.close)
            await context.call(self._spent.load, context.cost_limit)
            ends.push_async_callback(self._save_spent)
            try:
                await ends.enter_async_context(serve_control(folder, lambda: self.context))
            except OSError as exn:
                logger.warning("no control socket in %s: %s; `wds-async cache` cannot reach this service", folder, exn)
        ends.push_async_callback(context.plans.close)
        await context.plans.start()
        ends.push_async_callback(context.orders.close)
        await context.orders.start()
        ends.callback(context.access.audit.close)
        await self._listen(ends)
        tending = asyncio.create_task(self._tend(), name="tend")
        ends.callback(tending.cancel)

    async def _parts(self, ends: contextlib.AsyncExitStack) -> Context:
        config, traffic, threads = self._config, Traffic(), BlockingThreads(asyncio.get_running_loop())
        ends.callback(threads.stop)
        call, peers = threads.call, await self._peers(threads, ends)
        cost_limit = ServiceCostLimit(traffic, self._prices, **_cost_limit(config))
        allowed = Allowed(config, call=call)
        hedges = {"hedge_share": _HEDGE_SHARE_OF_MEMBERS, "hedge_start_bytes": 0} if peers else {}
        fetcher = RangeFetcher(
            transfer_config(**{"connections": config.connections, **hedges, **self._transfer}),
            memory_bytes=config.memory_bytes - (config.memory_bytes // MEMORY_SHARE if peers else 0),
            traffic=traffic,
            limits=OriginLimits(
                config.connections, config.origin_connections, config.bytes_per_s, config.origin_bytes_per_s
            ),
            guard=allowed,
            before_request=cost_limit.check,
        )
        ends.push_async_callback(fetcher.close)
        folder = await call(_folder, config)
        if folder is not None:
            self._folder_stat = await call(os.stat, folder)
        cache = ChunkCache(
            folder,
            0 if folder is None else cache_limit(config),
            fetcher,
            call=call,
            scheduler=FairScheduler(config.connections),
            **_freshness(config),
            keep_free_bytes=0 if folder is None else kept_free(config),
            quotas=dict(config.quotas),
            writers=max(1, min(_WRITERS, config.memory_bytes // _MEMORY_PER_WRITER_BYTES)),
            nodes=peers,
        )
        ends.push_async_callback(cache.close)
        await cache.start()
        read_only = ReadOnlyFolder(config.hand_from, config.folder) if config.hand_from else None
        if read_only is not None:
            ends.callback(read_only.close)
        return Context(
            config=config,
            readiness=self.readiness,
            meters=Meters(),
            traffic=traffic,
            cost_limit=cost_limit,
            access=self._access,
            allowed=allowed,
            in_flight=InFlightRequests(config.client_requests),
            rate_limit=RateLimit(config.client_bytes_per_s, config.tenant_bytes_per_s),
            fetcher=fetcher,
            cache=cache,
            archives=Archives(),
            listings=Listings(fetcher.entries, check=allowed.check),
            plans=PrefetchPlans(cache, config, allowed),
            orders=EpochOrders(cache, config, allowed, call, peers),
            call=call,
            read_only=read_only,
            peers=peers,
            peer_rate=RateLimit(None, config.peer_bytes_per_s),
        )

    async def _peers(self, threads: BlockingThreads, ends: contextlib.AsyncExitStack) -> Peers | None:
        """Return the other services of the cluster; None if none are configured."""
        if not self._config.peers:
            return None
        peers = Peers(self._config, threads, self._config.memory_bytes // MEMORY_SHARE)
        ends.push_async_callback(peers.close)
        await peers.start()
        return peers

    async def stop(self, at_once: asyncio.Event | None = None) -> bool:
        """Stop being ready, then listening; let requests end within ``grace_s`` (or until ``at_once`` is set) and cut
        off the rest. Return whether all of them ended by themselves."""
        at_once = at_once or asyncio.Event()
        config, in_flight = self.context.config, self.context.in_flight
        self.readiness.draining, self.readiness.why_not = True, "draining"
        await _unless(at_once, asyncio.sleep(config.drain_s))
        self._stop_listening()
        self.clients.drain()
        if len(in_flight):
            logger.info("%d requests in flight: they have %g s", len(in_flight), config.grace_s)
        ended = bool(await _unless(at_once, self.clients.gone(config.grace_s)))
        if not ended:
            logger.warning("%d requests were cut off", len(in_flight))
        await self._ends.aclose()
        return ended

    def reload(self, new: ServiceConfig) -> list[str]:
        """Use ``new`` from now on, without ending a connection: what may be read, tokens, certificates, prices, limits
        of clients, quotas, freshness. Return the names of settings that differ and cannot change while it runs.
        ConfigError (and nothing has changed) for a configuration that cannot be used."""
        context = self.context
        config, fixed = reloaded(context.config, new)
        allowed, access = Allowed(config), Access(config)
        rate_limit = RateLimit(config.client_bytes_per_s, config.tenant_bytes_per_s)
        prices = PriceTable.load(config.prices or None)
        context.allowed.take_over(allowed)
        context.access.take_over(access)
        context.plans.configure(config)
        context.in_flight.limit, context.in_flight.tenant_limit = config.client_requests, self._most_of_tenant(config)
        self.clients.tls = access.tls()
        self.clients.header_s, self.clients.send_s = config.header_timeout_s, config.send_timeout_s
        context.cost_limit.configure(prices, **_cost_limit(config))
        context.cache.configure(**_freshness(config))
        if config.quotas != context.config.quotas:
            context.cache.set_quotas(dict(config.quotas))
        self.context = replace(context, config=config, rate_limit=rate_limit, names={})
        return fixed

    async def _listen(self, ends: contextlib.AsyncExitStack) -> None:
        context, config = self.context, self.context.config
        limit = self._most_clients()
        self.clients = ClientConnections(
            lambda request: app.serve(self.context, request),
            lambda connection, status, why: app.malformed(self.context, connection, status, why),
            context.meters,
            clients=limit,
            of_address=config.address_connections or max(1, limit // 2),
            header_s=config.header_timeout_s,
            send_s=config.send_timeout_s,
            tls=context.access.tls(),
            left=context.plans.left,
            warns_of_root=context.read_only is None,
        )
        ends.callback(self.clients.close)
        context.in_flight.tenant_limit = self._most_of_tenant(config)
        self._listening = [await listen_at(self.clients.listener(), config.host, config.port)]
        ends.callback(self._stop_listening)
        if config.socket:
            self._listening.append(await listen_at_path(self.clients.listener(local=True), config.socket))
        if _asks_itself(self.addresses):
            words = "AIS_ENDPOINT names this very service, which would ask itself: it is for the service's clients"
            raise CannotServe(words)
        for server in self._listening:
            await server.start_serving()

    def _most_clients(self) -> int:
        """Return the number of connections that there are descriptors for: two each, and half of all are the cache's
        and the origins'."""
        most, descriptors = self.context.config.clients, raise_descriptor_limit()
        if descriptors and descriptors // 4 < most:
            logger.warning("%d descriptors (ulimit -n) are for %d clients at most", descriptors, descriptors // 4)
            return descriptors // 4
        return most

    def _most_of_tenant(self, config: ServiceConfig) -> int | None:
        """Return the limit of requests of one tenant. A request keeps a connection busy, and idle ones give way, so
        this leaves connections to other tenants."""
        if config.tenant_requests is not None:
            return config.tenant_requests
        return max(1, self.clients.limit // 2) if config.tokens or config.client_ca else None

    def _stop_listening(self) -> None:
        for server in self._listening:
            server.close()
        if len(self._listening) > 1:  # the second is ours at the Unix socket
            with contextlib.suppress(OSError):
                os.unlink(self.context.config.socket)
        self._listening = []

    async def _tend(self) -> None:
        """Check the disk and renewed certificates every few seconds, and notify the service manager."""
        every = min(_TEND_EVERY_S, watchdog_s() or _TEND_EVERY_S)
        while True:
            await asyncio.sleep(every)
            notify("WATCHDOG=1")
            self.context.access.renew()
            why = await self._disk()
            if not why:
                await self._save_spent()
            if not self.readiness.draining and why != self.readiness.why_not:
                logger.log(logging.WARNING if why else logging.INFO, "%s", why or "the cache's folder is back: ready")
                self.readiness.why_not = why

    async def _disk(self) -> str:
        """Return why the cache's folder is unreachable ("" if it is not). Nothing is written while it has vanished: its
        path may lead to another disk then. If it does not come back, the service ends."""
        path, vanished, why = self.context.config.folder, False, ""
        if not path:
            return ""
        try:
            async with asyncio.timeout(_DISK_ANSWERS_S):
                status = await self.context.call(os.stat, path)
            if self._folder_stat is not None and not os.path.samestat(status, self._folder_stat):
                vanished, why = True, f"the cache's folder {path} was replaced by another: restart the service"
        except TimeoutError:
            why = f"the cache's folder {path} does not answer"
        except (FileNotFoundError, NotADirectoryError):
            vanished, why = True, f"the cache's folder {path} has vanished"
        except OSError as exn:
            why = f"the cache's folder {path} is out of reach: {exn.strerror}"
        now = asyncio.get_running_loop().time()
        self.context.cache.fetching.disk.set_vanished(vanished)
        self._vanished_at = (self._vanished_at or now) if vanished else None
        if self._vanished_at is not None and now - self._vanished_at >= _VANISHED_S and not self.failure:
            self.failure = f"{why}. It has not come back within {_VANISHED_S:g} s"
            self.failed.set()
        return why

    async def _save_spent(self) -> None:
        if self._spent is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DISK_ANSWERS_S):
                    await self.context.call(self._spent.save, self.context.cost_limit.state())

    @property
    def addresses(self) -> list[str]:
        """Addresses at which it listens: ``http://127.0.0.1:51080``, ``unix:/run/wds.sock``."""
        scheme = "https" if self.context.config.certificate else "http"
        addresses = []
        for name in (one.getsockname() for server in self._listening for one in server.sockets):
            if isinstance(name, tuple):
                host = f"[{name[0]}]" if ":" in name[0] else name[0]
                addresses.append(f"{scheme}://{host}:{name[1]}")
            else:
                addresses.append(f"unix:{name}")
        return addresses

    def summary(self) -> list[str]:
        """Return lines for the log: where the service listens, what it caches, what may be read."""
        config, caching = self.context.config, "no folder: nothing is kept, everything is passed through"
        if config.folder:
            held = self.context.cache.statistics()
            size = f"{held.bytes / _GIB:.1f} of {held.limit_bytes / _GIB:.1f} GiB, {held.entries} objects"
            caching = f"caching in {config.folder}: {size}"
        everything = "the clouds' stores, all that this machine's credentials may (no allow: only from this machine)"
        names = [redact(prefix) for prefix in config.allow] or [everything]
        names += [f"ais://{name}/ ({redact(url)})" for name, url in config.buckets]
        return [f"listening at {', '.join(self.addresses)}", caching, f"what may be read: {', '.join(names)}"]


async def run(load: Callable[[], ServiceConfig]) -> int:
    """Serve what ``load`` returns until SIGTERM or SIGINT, then drain; a second signal ends at once. SIGHUP calls
    ``load`` again (`Service.reload`); before the start is complete, as soon as it is. Return the exit code: 0, also
    where requests had to be cut off; 1 where it could not go on, because the cache's folder has vanished. ConfigError
    and CannotServe where it cannot begin."""
    loop = asyncio.get_running_loop()
    end, at_once, hangup = asyncio.Event(), asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, hangup.set)  # before anything else: its default would end the process
    config = load()
    logs.configure(config.log, file=config.log_file, level=config.log_level)
    service = Service(config)

    def handle(name: str) -> None:
        logger.info("%s: %s", name, "ending at once" if end.is_set() else "draining")
        (at_once if end.is_set() else end).set()

    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, handle, one.name)
    bear_exhaustion(loop)
    await service.start()
    for line in service.summary():
        logger.info("%s", line)
    notify("READY=1")
    reloading = asyncio.create_task(_reload_at(hangup, service, load), name="reload")
    await _unless(service.failed, end.wait())
    reloading.cancel()
    if service.failure:
        end.set()  # a signal from now on ends it at once
        logger.error("%s: draining, then ending", service.failure)
    notify("STOPPING=1")
    await service.stop(at_once)
    logger.info("ended")
    return 1 if service.failure else 0


async def _reload_at(hangup: asyncio.Event, service: Service, load: Callable[[], ServiceConfig]) -> None:
    """Reload the configuration each time ``hangup`` is set: all of it, or nothing where a part cannot be used."""
    while True:
        await hangup.wait()
        hangup.clear()
        try:
            new = load()
            with logs.prepared(new.log, file=new.log_file, level=new.log_level) as use_log:
                fixed = service.reload(new)
                use_log()
        except (WdsError, OSError, ValueError) as exn:
            logger.error("the service goes on with what it has: %s", exn)
        except Exception:
            logger.exception("the service goes on with what it has")
        else:
            if fixed:
                logger.warning("these settings hold after a restart only: %s", ", ".join(fixed))
            logger.info("the configuration was read again")


def _asks_itself(addresses: list[str]) -> bool:
    """Return whether ``AIS_ENDPOINT``, by which this process would read stores, is one of ``addresses``."""
    endpoint = environment.value("AIS_ENDPOINT").strip().rstrip("/")
    parts = urllib.parse.urlsplit(endpoint)
    here = {"localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname()}
    ports = {address.rpartition(":")[2] for address in addresses if not address.startswith("unix:")}
    return endpoint in addresses or (parts.hostname in here and str(parts.port) in ports)


def _freshness(config: ServiceConfig) -> dict[str, Any]:
    names = ("freshness_s", "stale_while_revalidate_s", "stale_if_error_s", "revalidate_timeout_s", "scrub_bytes_per_s")
    return {name: getattr(config, name) for name in names}


def _cost_limit(config: ServiceConfig) -> dict[str, Any]:
    return {"region": config.region, "limit": config.cost_limit, "per_day": config.cost_limit_per == "day"}


def _folder(config: ServiceConfig) -> Path | None:
    """Create and return the cache's folder; None if none is configured."""
    if not config.folder:
        return None
    folder = Path(config.folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exn:
        raise CannotServe(f"the cache's folder {folder}: {exn.strerror or exn}; --folder names another") from exn
    return folder


async def _unless(event: asyncio.Event, waiting: Any) -> Any:
    """Return the result of ``waiting``; None, cancelling it, if ``event`` is set first."""
    task, stop = asyncio.ensure_future(waiting), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, stop):
            one.cancel()
