"""aiohttp kept to the addresses that a program's `Guard` lets pass: those that are judged are those that are used."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

from wds_async.errors import AccessDenied
from wds_async.storage.base import Guard

if TYPE_CHECKING:
    from aiohttp.abc import AbstractResolver, ResolveResult

__all__ = ["guarded_resolver", "is_address", "judge"]


def judge(guard: Guard, host: str, address: str) -> None:
    """AccessDenied where ``guard`` lets no connection of ``host`` go to ``address``."""
    if why := guard.why_not(host, address):
        raise AccessDenied(f"no connection is made: {why}")


def is_address(host: str) -> bool:
    """Whether ``host`` is an address, about which aiohttp asks no resolver; also in the short forms (``127.1``) that
    sockets take."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host.replace(".", "").isdigit()
    return True


def guarded_resolver(guard: Guard) -> AbstractResolver:
    """aiohttp's resolver, whose answers are judged. Made within a running loop."""
    from aiohttp.abc import AbstractResolver  # noqa: PLC0415 (a slow import that a direct read never needs)
    from aiohttp.resolver import ThreadedResolver  # noqa: PLC0415

    class Guarded(AbstractResolver):
        def __init__(self) -> None:
            self._resolver = ThreadedResolver()

        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
        ) -> list[ResolveResult]:
            found = await self._resolver.resolve(host, port, family)
            for one in found:
                judge(guard, host, one["host"])
            return found

        async def close(self) -> None:
            await self._resolver.close()

    return Guarded()
