"""Requests under way: how many there are, and how many each client and each tenant has."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wds_async import environment
from wds_async.config import transfer_config
from wds_async.errors import WdsError
from wds_async.observe.cost_limit import ServiceCostLimit
from wds_async.observe.metrics import Labels, origin_rows, version
from wds_async.observe.prices import PriceTable
from wds_async.redact import redact
from wds_async.service import logs, sockets
from wds_async.service.allowlist import Allowed
from wds_async.service.app import Router
from wds_async.service.archives import Archives
from wds_async.service.auth import Access
from wds_async.service.cache.cache import ChunkCache
from wds_async.service.cache.origin import Client
from wds_async.service.config import ServiceConfig, cache_limit, kept_free, reloaded
from wds_async.service.control import serve_control
from wds_async.service.http_server import ClientConnections
from wds_async.service.limits import CostLimitedOrigin, FairScheduler, RateLimit, SpentFile
from wds_async.service.listing import Listings
from wds_async.service.metrics import Meters, Observed
from wds_async.service.prefetch import PrefetchPlans
from wds_async.service.refusals import Refusal
from wds_async.service.send_fd import ReadOnlyFolder
from wds_async.service.sockets import (
    CannotServe,
    bear_exhaustion,
    listen_at,
    listen_at_path,
    raise_descriptor_limit,
)
from wds_async.transfer.ranges import RangeFetcher
from wds_async.transfer.rate_limits import OriginLimits
from wds_async.transfer.threads import BlockingThreads
from wds_async.transfer.traffic import Traffic

__all__ = ["InFlightRequests", "Service", "run", "service_snapshot"]


class InFlightRequests:
    """At most ``limit`` requests of one client at a time, and ``tenant_limit`` (None: any number) of all clients of one
    tenant; all belong to one loop."""

    def __init__(self, limit: int, tenant_limit: int | None = None) -> None:
        self.limit = limit
        self.tenant_limit = tenant_limit
        self._of: Counter[Client] = Counter()
        self._of_tenant: Counter[str] = Counter()
        self._total = 0

    def __len__(self) -> int:
        return self._total

    @property
    def clients(self) -> int:
        """How many have a request under way."""
        return len(self._of)

    @contextmanager
    def one(self, client: Client) -> Iterator[None]:
        """A request from its beginning to its end. Refusal (429) where its client or tenant has as many as it may."""
        if self._of[client] >= self.limit:
            words = f"you have {self.limit} requests under way, as many as one client may (client_requests)"
            raise Refusal(429, words, "client-requests", retry_after_s=1)
        if self.tenant_limit is not None and self._of_tenant[client.tenant] >= self.tenant_limit:
            words = f"{self.tenant_limit} requests of your tenant are under way, as many as one may (tenant_requests)"
            raise Refusal(429, words, "tenant-requests", retry_after_s=1)
        self._count(client, 1)
        try:
            yield
        finally:
            self._count(client, -1)

    def _count(self, client: Client, more: int) -> None:
        self._total += more
        self._of[client] += more
        self._of_tenant[client.tenant] += more
        if not self._of[client]:
            del self._of[client]
        if not self._of_tenant[client.tenant]:
            del self._of_tenant[client.tenant]


_PLANS = 100


def service_snapshot(service: Observed, tenant: str | None = None) -> dict[str, Any]:
    """Return the figures of ``service`` as of now, as plain data without secrets. ``tenant``: only what that tenant has
    caused and holds, and neither origins nor the cost, which are not counted by tenant; None: all."""
    meters = service.meters
    document = {
        "kind": "service",
        "name": socket.gethostname(),
        "version": version(),
        "time": time.time(),
        "uptime_s": meters.uptime_s,
        "ready": bool(service.ready),
        "counters": _counters(service) if tenant is None else _counters_of(service, tenant),
        "gauges": _gauges(service) if tenant is None else _gauges_of(service, tenant),
        "slowest": [{"url": slow.url, "seconds": slow.seconds, "bytes": slow.bytes} for slow in meters.slowest(tenant)],
        "errors": [{"time": one.time, "url": one.url, "error": one.error} for one in meters.last_errors(tenant)],
        "plans": service.plans.as_list(tenant)[:_PLANS],
    }
    if tenant is not None:
        return document | {"tenant": tenant}
    spending = service.spending
    cost = {"dollars": spending.dollars().as_list(), "limit": spending.limit, "spent": spending.spent().as_list()}
    return document | {"origins": origin_rows(service.traffic, Labels(), spending), "cost": cost}


def _counters(service: Observed) -> dict[str, float]:
    meters, origins = service.meters, list(service.traffic.origins.values())
    stats = service.cache.statistics()
    return {
        "client_bytes": meters.client_bytes,
        "client_requests": meters.requests,
        "origin_bytes": sum(origin.bytes for origin in origins),
        "origin_requests": sum(origin.requests for origin in origins),
        "origin_retries": sum(origin.retries for origin in origins),
        "hedges": sum(origin.hedges for origin in origins),
        "hit_bytes": stats.hit_bytes,
        "miss_bytes": stats.miss_bytes,
        "ahead_bytes": stats.ahead_bytes,
        "evictions": stats.evictions,
        "errors": meters.failures,
        "refusals": meters.refusals,
    }


def _gauges(service: Observed) -> dict[str, float]:
    stats = service.cache.statistics()
    return {
        "clients": service.meters.clients,
        "connections": sum(origin.connections for origin in list(service.traffic.origins.values())),
        "window_bytes": service.fetcher.held_bytes,
        "window_limit_bytes": service.config.memory_bytes,
        "cache_bytes": stats.bytes,
        "cache_limit_bytes": stats.limit_bytes,
        "entries": stats.entries,
    }


def _counters_of(service: Observed, tenant: str) -> dict[str, float]:
    counts = service.meters.of_tenant(tenant)
    hit_bytes, miss_bytes, ahead_bytes = service.cache.statistics().by_tenant.get(tenant, (0, 0, 0))
    return {
        "client_bytes": counts.bytes,
        "client_requests": counts.requests,
        "hit_bytes": hit_bytes,
        "miss_bytes": miss_bytes,
        "ahead_bytes": ahead_bytes,
        "errors": counts.failures,
        "refusals": counts.refusals,
    }


def _gauges_of(service: Observed, tenant: str) -> dict[str, float]:
    cache = service.cache
    return {
        "cache_bytes": cache.held_by_tenant().get(tenant, 0),
        "cache_limit_bytes": int(cache.statistics().limit_bytes * cache.quotas.get(tenant, 1.0)),
    }


logger = logging.getLogger("wds_async")
_TEND_EVERY_S = 5.0
_DISK_ANSWERS_S = 4.0
_VANISHED_S = 15.0
_WRITERS, _MEMORY_PER_WRITER_BYTES = 4, 8 << 20  # so that writes which hang leave three quarters of the memory


class Service:
    """Everything that one ``wds-async serve`` is. Make it, ``await start()``, and ``await stop()``; all on one loop
    (asyncio's own: uvloop is no faster here)."""

    def __init__(self, config: ServiceConfig, **transfer: Any) -> None:
        """``transfer`` are fields of `TransferConfig`. ConfigError for what cannot be."""
        self.config = config
        self.meters, self.traffic = Meters(), Traffic()
        self.access = Access(config)
        self.in_flight = InFlightRequests(config.client_requests)
        self.pace = RateLimit(config.client_bytes_per_s, config.tenant_bytes_per_s)
        self.archives = Archives()
        prices = PriceTable.load(config.prices or None)
        self.spending = ServiceCostLimit(
            self.traffic,
            prices,
            region=config.region,
            limit=config.cost_limit,
            per_day=config.cost_limit_per == "day",
        )
        self._spent: SpentFile | None = None
        self.failed = asyncio.Event()
        """Set when it cannot go on: `failure` says why."""
        self.failure = ""
        self._vanished_at: float | None = None
        self.draining = False
        self.read_only: ReadOnlyFolder | None = None
        """Where files are opened that are handed over, if that is not the cache's own folder."""
        self._transfer = transfer
        self._why_not_ready = "starting"
        self._listening: list[asyncio.Server] = []
        self._ends = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """The cache first, then the sockets, then readiness. CannotServe where that cannot be."""
        async with contextlib.AsyncExitStack() as ends:
            await self._start(ends)
            self._ends = ends.pop_all()
        self._why_not_ready = ""

    async def _start(self, ends: contextlib.AsyncExitStack) -> None:
        config = self.config
        threads = BlockingThreads(asyncio.get_running_loop())
        ends.callback(threads.stop)
        self.call = threads.call
        self.allowed = Allowed(config, call=self.call)
        transfer = transfer_config(**{"connections": config.connections, **self._transfer})
        limits = OriginLimits(
            config.connections, config.origin_connections, config.bytes_per_s, config.origin_bytes_per_s
        )
        self.fetcher = RangeFetcher(
            transfer, memory_bytes=config.memory_bytes, traffic=self.traffic, limits=limits, guard=self.allowed
        )
        ends.push_async_callback(self.fetcher.close)
        origin = CostLimitedOrigin(self.fetcher, self.spending)
        self.scheduler = FairScheduler(config.connections)
        folder = await self.call(_folder, config)
        if folder is not None:
            self._folder = await self.call(os.stat, folder)
        self.cache = ChunkCache(
            folder,
            0 if folder is None else cache_limit(config),
            origin,
            call=self.call,
            scheduler=self.scheduler,
            **_freshness(config),
            keep_free_bytes=0 if folder is None else kept_free(config),
            quotas={quota.tenant: quota.share for quota in config.quotas},
            writers=max(1, min(_WRITERS, config.memory_bytes // _MEMORY_PER_WRITER_BYTES)),
        )
        ends.push_async_callback(self.cache.close)
        await self.cache.start()
        if self.cache.folder is not None and self.cache.opened:
            self._spent = await self.call(SpentFile, self.cache.folder)
            ends.callback(self._spent.close)
            await self.call(self._spent.load, self.spending)
            ends.push_async_callback(self._save_spent)
            try:
                await ends.enter_async_context(serve_control(self.cache.folder, self.cache, self.snapshot))
            except OSError as exn:
                logger.warning("no control socket in %s: %s; `wds-async cache` cannot reach this service", folder, exn)
        if config.hand_from:
            self.read_only = ReadOnlyFolder(config.hand_from, config.folder)
            ends.callback(self.read_only.close)
        self.listings = Listings(origin, check=self.allowed.check)
        self.plans = PrefetchPlans(self.cache, config, self.allowed)
        ends.push_async_callback(self.plans.close)
        await self.plans.start()
        ends.callback(self.access.left_out)
        await self._listen(ends)
        tending = asyncio.create_task(self._tend(), name="tend")
        ends.callback(tending.cancel)

    async def stop(self, at_once: asyncio.Event | None = None) -> bool:
        """Not ready any more; then no new connections; then what is under way ends, or is cut off after ``grace_s``
        (or when ``at_once`` is set). Whether all of it ended by itself."""
        at_once = at_once or asyncio.Event()
        self.draining, self._why_not_ready = True, "draining"
        await _unless(at_once, asyncio.sleep(self.config.drain_s))
        self._stop_listening()
        self.clients.drain()
        left = len(self.in_flight)
        if left:
            logger.info("%d requests under way: they have %g s", left, self.config.grace_s)
        ended = bool(await _unless(at_once, self.clients.gone(self.config.grace_s)))
        if not ended:
            logger.warning("%d requests were cut off", len(self.in_flight))
        await self._ends.aclose()
        return ended

    def reload(self, new: ServiceConfig) -> list[str]:
        """Use ``new`` from now on, without ending a connection: what may be read, tokens, certificates, prices, limits
        of clients, quotas, freshness. Return the names of settings that are others and cannot change while it runs.
        ConfigError (and nothing has changed) for a configuration that cannot be used."""
        config, fixed = reloaded(self.config, new)
        allowed, access = Allowed(config), Access(config)
        pace = RateLimit(config.client_bytes_per_s, config.tenant_bytes_per_s)
        prices = PriceTable.load(config.prices or None)
        before, self.config = self.config, config
        self.allowed.take_over(allowed)
        self.access.take_over(access)
        self.plans.configure(config)
        self.in_flight.limit, self.pace = config.client_requests, pace
        self.in_flight.tenant_limit = self._most_of_tenant(config)
        self.clients.tls = access.tls()
        self.clients.header_s, self.clients.send_s = config.header_timeout_s, config.send_timeout_s
        per_day = config.cost_limit_per == "day"
        self.spending.configure(prices, region=config.region, limit=config.cost_limit, per_day=per_day)
        self.cache.configure(**_freshness(config))
        if config.quotas != before.quotas:
            self.cache.set_quotas({quota.tenant: quota.share for quota in config.quotas})
        return fixed

    async def _listen(self, ends: contextlib.AsyncExitStack) -> None:
        config = self.config
        front = Router(self)
        clients = self._most_clients()
        self.clients = ClientConnections(
            front,
            front.malformed,
            self.meters,
            clients=clients,
            of_address=config.address_connections or max(1, clients // 2),
            header_s=config.header_timeout_s,
            send_s=config.send_timeout_s,
            tls=self.access.tls(),
            left=self.plans.left,
            warns_of_root=self.read_only is None,
        )
        ends.callback(self.clients.close)
        self.in_flight.tenant_limit = self._most_of_tenant(config)
        self._listening = [await listen_at(self.clients.listener(), config.host, config.port)]
        ends.callback(self._stop_listening)
        if config.socket:
            self._listening.append(await listen_at_path(self.clients.listener(local=True), config.socket))
        if _asks_itself(self.addresses):
            raise CannotServe(
                "AIS_ENDPOINT names this very service, which would ask itself: it is for the service's clients"
            )
        for server in self._listening:
            await server.start_serving()

    def _most_clients(self) -> int:
        """Connections that there are descriptors for: two each, and half of all are the cache's and for origins."""
        most, descriptors = self.config.clients, raise_descriptor_limit()
        if descriptors and descriptors // 4 < most:
            logger.warning("%d descriptors (ulimit -n) are for %d clients at most", descriptors, descriptors // 4)
            return descriptors // 4
        return most

    def _most_of_tenant(self, config: ServiceConfig) -> int | None:
        """Return how many requests of one tenant may be under way. A request keeps a connection busy, and idle ones
        give way, so this leaves connections to other tenants."""
        if config.tenant_requests is not None:
            return config.tenant_requests
        return max(1, self.clients.limit // 2) if config.tokens or config.client_ca else None

    def _stop_listening(self) -> None:
        for server in self._listening:
            server.close()
        if len(self._listening) > 1:  # the second is ours at the Unix socket
            with contextlib.suppress(OSError):
                os.unlink(self.config.socket)
        self._listening = []

    async def _tend(self) -> None:
        """Every few seconds: look whether the disk still answers, and for renewed certificates; tell the manager."""
        every = min(_TEND_EVERY_S, sockets.watchdog_s() or _TEND_EVERY_S)
        while True:
            await asyncio.sleep(every)
            sockets.notify("WATCHDOG=1")
            self.access.renew()
            why, vanished = await self._disk()
            self._judge_folder(why, vanished)
            if not why:
                await self._save_spent()
            if not self.draining and why != self._why_not_ready:
                logger.log(logging.WARNING if why else logging.INFO, "%s", why or "the cache's folder is back: ready")
                self._why_not_ready = why

    def _judge_folder(self, why: str, vanished: bool) -> None:
        """Write nothing where the folder has vanished: its path may lead to another disk now. End where it does not
        come back."""
        now = asyncio.get_running_loop().time()
        self.cache.fetching.disk.vanished = vanished
        if not vanished:
            self._vanished_at = None
            return
        if self._vanished_at is None:
            self._vanished_at = now
        if now - self._vanished_at >= _VANISHED_S and not self.failure:
            self.failure = f"{why}. It has not come back within {_VANISHED_S:g} s"
            self.failed.set()

    async def _save_spent(self) -> None:
        if self._spent is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DISK_ANSWERS_S):
                    await self.call(self._spent.save, self.spending.state())

    async def _disk(self) -> tuple[str, bool]:
        """Why the cache's folder is out of reach, "" where it is not; and whether it is not there any more."""
        if not self.config.folder:
            return "", False
        try:
            async with asyncio.timeout(_DISK_ANSWERS_S):
                found = await self.call(os.stat, self.config.folder)
        except TimeoutError:
            return f"the cache's folder {self.config.folder} does not answer", False
        except (FileNotFoundError, NotADirectoryError):
            return f"the cache's folder {self.config.folder} has vanished", True
        except OSError as exn:
            return f"the cache's folder {self.config.folder} is out of reach: {exn.strerror}", False
        if not os.path.samestat(found, self._folder):
            return f"the cache's folder {self.config.folder} was replaced by another: restart the service", True
        return "", False

    # -- what it is asked -------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether it may be given requests."""
        return not self._why_not_ready

    def why_not_ready(self) -> str:
        """In words; "" where it is."""
        return self._why_not_ready

    def snapshot(self, tenant: str | None = None) -> dict[str, Any]:
        """Return ``/v1/stats`` as a client of ``tenant`` sees it; None: all of it."""
        return service_snapshot(self, tenant)

    def pace_of(self, client: Client) -> Any:
        """What waits until so many bytes may go to ``client``; None where nothing limits that."""
        if not self.pace.limited:
            return None
        return lambda count: self.pace.take(client, count)

    @property
    def addresses(self) -> list[str]:
        """Where it listens: ``http://127.0.0.1:51080``, ``unix:/run/wds.sock``."""
        scheme = "https" if self.config.certificate else "http"
        found = []
        for server in self._listening:
            for one in server.sockets:
                name = one.getsockname()
                host = f"[{name[0]}]" if isinstance(name, tuple) and ":" in name[0] else name[0]
                found.append(f"{scheme}://{host}:{name[1]}" if isinstance(name, tuple) else f"unix:{name}")
        return found

    def told(self) -> list[str]:
        """Lines for who starts it: where it listens, what it caches, what may be read."""
        config, found = self.config, [f"listening at {', '.join(self.addresses)}"]
        if config.folder:
            held = self.cache.statistics()
            gib = 1 << 30
            size = f"{held.bytes / gib:.1f} of {held.limit_bytes / gib:.1f} GiB, {held.entries} objects"
            found.append(f"caching in {config.folder}: {size}")
        else:
            found.append("no folder: nothing is kept, everything is passed through")
        names = [redact(prefix) for prefix in config.allow]
        names += [f"ais://{name}/ ({redact(url)})" for name, url in config.buckets]
        everything = "the clouds' stores, all that this machine's credentials may (no allow: only from this machine)"
        found.append(f"what may be read: {', '.join(names if config.allow else [everything, *names])}")
        return found


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

    def told(name: str) -> None:
        logger.info("%s: %s", name, "ending at once" if end.is_set() else "draining")
        (at_once if end.is_set() else end).set()

    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, told, one.name)
    bear_exhaustion(loop)
    await service.start()
    for line in service.told():
        logger.info("%s", line)
    sockets.notify("READY=1")
    reloading = asyncio.create_task(_reload_at(hangup, service, load), name="reload")
    await _unless(service.failed, end.wait())
    reloading.cancel()
    if service.failure:
        end.set()  # a signal from now on ends it at once
        logger.error("%s: draining, then ending", service.failure)
    sockets.notify("STOPPING=1")
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
    """Whether ``AIS_ENDPOINT``, which this process would read stores by, leads to one of ``addresses``."""
    endpoint = environment.value("AIS_ENDPOINT").strip().rstrip("/")
    parts = urllib.parse.urlsplit(endpoint)
    here = {"localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname()}
    ports = {address.rpartition(":")[2] for address in addresses if not address.startswith("unix:")}
    return endpoint in addresses or (parts.hostname in here and str(parts.port) in ports)


def _freshness(config: ServiceConfig) -> dict[str, Any]:
    """Return the settings that `ChunkCache.configure` takes."""
    names = ("freshness_s", "stale_while_revalidate_s", "stale_if_error_s", "revalidate_timeout_s", "scrub_bytes_per_s")
    return {name: getattr(config, name) for name in names}


def _folder(config: ServiceConfig) -> Path | None:
    """The cache's folder, made where it is not there; None where there is none."""
    if not config.folder:
        return None
    folder = Path(config.folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exn:
        raise CannotServe(f"the cache's folder {folder}: {exn.strerror or exn}; --folder names another") from exn
    return folder


async def _unless(event: asyncio.Event, waiting: Any) -> Any:
    """What ``waiting`` gives; None, and it is cancelled, where ``event`` is set before."""
    task, stop = asyncio.ensure_future(waiting), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, stop):
            one.cancel()
