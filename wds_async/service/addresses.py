"""Which addresses the service may connect to. A name says nothing of where it leads, so the address itself is judged,
each time before a connection is made to it: a name that resolves to something else a moment later gains nothing.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

__all__ = ["Addresses", "is_literal", "kind_of_address"]

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "169.254.169.254",  # Amazon, Google, Microsoft, Oracle and others
        "169.254.169.253",  # Amazon's name service
        "169.254.169.123",  # Amazon's clock
        "169.254.170.2",  # credentials of Amazon's containers
        "169.254.170.23",  # and of its Kubernetes pods
        "100.100.100.200",  # Alibaba
        "168.63.129.16",  # Azure's wire server
        "192.0.0.192",  # Oracle
        "fd00:ec2::254",
        "fd00:ec2::253",
        "fd00:ec2::23",
        "fd20:ce::254",  # Google
        "fe80::a9fe:a9fe",
    )
)
_NAT64 = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))
_COMPATIBLE = ipaddress.ip_network("::/96")
_SHARED = ipaddress.ip_network("100.64.0.0/10")


def is_literal(host: str) -> bool:
    """Whether a host says by itself where it is: an address, or ``localhost``."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True


def kind_of_address(text: str) -> str:
    """``"public"``, ``"private"`` (private, shared, loopback or link-local), or ``"never"``: that of a metadata server,
    and what no origin has (multicast, reserved, no address at all). IPv6 that holds an IPv4 address is judged by it."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return "never"
    kinds = {_kind(one) for one in _led_to(address)}
    return next((kind for kind in ("never", "private") if kind in kinds), "public")


def _kind(address: _Address) -> str:
    if address in _METADATA or address.is_multicast:
        return "never"
    if address.is_unspecified or address.is_loopback or address.is_link_local:
        return "private"
    if address.version == 4 and address.is_reserved:  # broadcast among it
        return "never"
    if address.is_private or (address.version == 4 and address in _SHARED):
        return "private"
    if address.version == 6 and address.is_site_local:
        return "private"
    return "never" if address.is_reserved else "public"


def _led_to(address: _Address) -> list[_Address]:
    """What an address stands for: an IPv6 one that is mapped, compatible or translated (NAT64) for its IPv4 one alone;
    6to4 and Teredo for themselves and those that they hold."""
    if isinstance(address, ipaddress.IPv4Address) or address in _METADATA:
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if any(address in net for net in _NAT64) or (address in _COMPATIBLE and int(address) > 0xFFFF):
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    held = [address.sixtofour, *(address.teredo or ())]
    return [address, *(one for one in held if one is not None)]


class Addresses:
    """Judges where connections may go. ``named``: the hosts of web servers that clients may read; what they resolve to
    must be public, unless the host says itself where it is, or ``private`` allows more. Any other host is one that the
    operator set (a store's endpoint, a proxy): only ``"never"`` is refused for it."""

    def __init__(self, named: Iterable[str], *, private: bool = False) -> None:
        self._named = frozenset(host.lower().rstrip(".") for host in named)
        self._private = private

    def why_not(self, host: str, address: str) -> str:
        """Why no connection may go to ``address``, one of ``host``'s; "" where it may."""
        kind = kind_of_address(address)
        if kind == "never":
            return f"{address} is no address of a store (metadata servers are never asked)"
        if kind == "public" or self._private or is_literal(host) or host.lower().rstrip(".") not in self._named:
            return ""
        return f"{host} is at {address}, a private address; the service's setting `private` would allow it"
