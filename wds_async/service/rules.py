"""The service's rules as the fast lane asks them: at once, by the same functions as the slow way, and without a word
where it is not to have the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wds_async.errors import WdsError
from wds_async.service.door import Pass
from wds_async.service.names import name_of
from wds_async.service.objects import SERVER, fields_of
from wds_async.service.refusals import Refusal

if TYPE_CHECKING:
    from wds_async.service.running import Service

__all__ = ["ServiceRules"]


class ServiceRules:
    """What ``service`` lets pass without waiting; see `door.Rules`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def name(self, target: str) -> Pass | None:
        """What ``target`` stands for, where the slow way has let it pass before. Nothing where clients have a pace: it
        is the slow way that keeps it."""
        service = self._service
        if service.pace.limited:
            return None
        path, _, query = target.partition("?")
        try:
            named = name_of(path, query, service.config)
        except Refusal:
            return None
        if named.params or not service.allowed.known(named):
            return None
        return Pass(named.url, named.api)

    def who(self, fields: Mapping[bytes, bytes], peer: str, *, local: bool) -> tuple[str, str] | None:
        """The client's name and tenant; None where it is not let in, or by what only the slow way looks at."""
        said = {name.decode("latin-1"): value.decode("latin-1") for name, value in fields.items()}
        try:
            who = self._service.access.who(said, peer, local=local)
        except (Refusal, WdsError):
            return None
        return who.client, who.tenant

    def peek(self, url: str, tenant: str) -> Any:
        """What the cache has of ``url``, fresh."""
        return self._service.cache.peek(url)

    def fields(self, found: Any, api: str) -> Mapping[str, str]:
        """The fields of every answer about the object."""
        return {"Server": SERVER, **fields_of(found, api)}

    def enter(self, client: str) -> bool:
        """Count a request of ``client``; False where it has as many as it may."""
        return self._service.underway.enter(client)

    def leave(self, client: str) -> None:
        """It is over."""
        self._service.underway.leave(client)

    def heard(self, client: str, url: str) -> None:
        """``client`` reads ``url`` now."""
        self._service.plans.heard(client, url)
