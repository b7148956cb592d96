"""Base of the clouds' backends: their explanations hide secrets and name the endpoint, and where the engine cannot send
a request itself, checked ranges of another client take its place."""

from __future__ import annotations

from wds_async.config import proxy_for
from wds_async.redact import redact
from wds_async.storage.base import (
    Access,
    Answer,
    Backend,
    Call,
    Contradiction,
    Fault,
    Location,
    RefusedAnswer,
    Request,
    Stream,
)
from wds_async.storage.checked import CheckedRanges, Identify, RangeGet
from wds_async.storage.http.backend import HttpBackend
from wds_async.storage.http.errors import with_place, with_proxy
from wds_async.storage.options import NO_OPTIONS, Options
from wds_async.storage.secrets import Secrets

__all__ = ["CloudBackend"]


class CloudBackend(Backend):
    """Backend of a store that is read with credentials. ``call`` runs a blocking function on a thread; ``direct``:
    whether requests are the engine's own; ``web_options`` are for reading as from a web server."""

    store = ""
    """Its name, for people."""
    endpoint_settings = ""
    """The settings that its endpoint follows, as a sentence."""

    def __init__(
        self,
        call: Call,
        options: Options = NO_OPTIONS,
        *,
        direct: bool = True,
        connect_timeout_s: float = 5.0,
        stall_timeout_s: float = 30.0,
        web_options: Options = NO_OPTIONS,
    ) -> None:
        self._call, self._options, self._direct = call, options, direct
        self._timeouts_s = connect_timeout_s, stall_timeout_s
        self._http = HttpBackend(
            web_options, call=call, direct=direct, connect_timeout_s=connect_timeout_s, stall_timeout_s=stall_timeout_s
        )
        self._secrets = Secrets()

    def streamed(self, request: Request) -> Stream:
        return self._http.streamed(request)

    def classify(self, outcome: Answer | BaseException, location: Location) -> Fault:
        if isinstance(outcome, RefusedAnswer):
            outcome = outcome.answer
        if isinstance(outcome, Answer):
            outcome = self._secrets.of_answer(outcome)
        return self._secrets.of_fault(self._explain(outcome, location.target))

    async def close(self) -> None:
        await self._http.close()

    def _explain(self, outcome: Answer | BaseException, url: str) -> Fault:
        """Explain an answer, which is free of secrets, or an exception."""
        raise NotImplementedError

    def _at_endpoint(self, fault: Fault, exn: BaseException, endpoint: str) -> Fault:
        """Return ``fault`` of the network with the proxy or the ``endpoint`` that was not reached, and its settings."""
        if not endpoint:
            return fault
        return with_place(
            with_proxy(fault, exn, endpoint), f"{self.store} at {redact(endpoint)}", self.endpoint_settings
        )

    def _why_indirect(self, endpoint: str) -> str:
        """Return why the engine sends no requests to ``endpoint`` itself; "" where it does."""
        if not self._direct:
            return "WDS_DIRECT=0"
        return "a proxy is in the way" if proxy_for(endpoint) is not None else ""

    async def _checked(self, get: RangeGet, identify: Identify) -> Access:
        """Return the object that ``get`` reads. Such a client has no reading in order to fall back to."""
        ranges = await CheckedRanges.of(get, identify, sum(self._timeouts_s))
        if ranges is None:
            raise Contradiction("asked for the first byte, the store answered with the whole object")
        return ranges
