"""The state of a running service as its routes see it, and one request with its outcome."""

from __future__ import annotations

from dataclasses import dataclass, field

from wds_async.observe.cost_limit import ServiceCostLimit
from wds_async.service.allowlist import Allowed
from wds_async.service.archives import Archives
from wds_async.service.auth import Access
from wds_async.service.cache.cache import ChunkCache
from wds_async.service.cache.origin import NO_CLIENT, Client
from wds_async.service.config import ServiceConfig
from wds_async.service.http_server import HttpRequest
from wds_async.service.limits import InFlightRequests, RateLimit
from wds_async.service.listing import Listings
from wds_async.service.metrics import Meters
from wds_async.service.names import ObjectName
from wds_async.service.orders import EpochOrders
from wds_async.service.peers import Peers
from wds_async.service.prefetch import PrefetchPlans
from wds_async.service.send_fd import ReadOnlyFolder
from wds_async.storage.base import Call
from wds_async.transfer.ranges import RangeFetcher
from wds_async.transfer.traffic import Traffic

__all__ = ["Context", "Exchange", "Readiness"]


@dataclass(slots=True)
class Readiness:
    """Readiness of the service: ``why_not`` is "" if it takes requests; ``draining``: it is about to end."""

    why_not: str = "starting"
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Context:
    """The parts of one service. A reload of the configuration replaces this value; requests in flight keep theirs.
    ``call`` runs a blocking function on a thread. ``read_only``: the folder by which files are handed over, if that is
    not the cache's own. ``peers``: the other services of the cluster. ``names``: objects by path and
    query; parsing a name costs half of a warm request."""

    config: ServiceConfig
    readiness: Readiness
    meters: Meters
    traffic: Traffic
    cost_limit: ServiceCostLimit
    access: Access
    allowed: Allowed
    in_flight: InFlightRequests
    rate_limit: RateLimit
    fetcher: RangeFetcher
    cache: ChunkCache
    archives: Archives
    listings: Listings
    plans: PrefetchPlans
    orders: EpochOrders
    call: Call
    read_only: ReadOnlyFolder | None = None
    peers: Peers | None = None
    peer_rate: RateLimit = field(default_factory=RateLimit)
    names: dict[tuple[str, str], ObjectName] = field(default_factory=dict)


@dataclass(slots=True)
class Exchange:
    """A request, its client, and the outcome. ``first_byte_at`` is the loop's time (0.0: none yet), ``sent`` counts
    the bytes of the body. ``api`` is the label that it is counted by."""

    request: HttpRequest
    api: str
    client: Client = NO_CLIENT
    named: ObjectName | None = None
    first_byte_at: float = 0.0
    sent: int = 0

    @property
    def url(self) -> str:
        """URL of the requested object; "" if the request is for none."""
        return "" if self.named is None else self.named.url

    @property
    def peer(self) -> str:
        """The client's address; "" for the Unix socket."""
        return "" if self.request.connection.local else self.request.connection.address
