"""Writing to AIStore: a PUT that its proxy redirects to the target, which also writes through to a cloud's bucket."""

from __future__ import annotations

from dataclasses import replace
from typing import IO

from wds_async.storage.ais.backend import WRITE_HEADERS, explain_answer, put_by_target, writable_url
from wds_async.storage.ais.urls import ANONYMOUS, AisObject, cluster_for, read_token
from wds_async.storage.base import Answer, Fault, Location, Request
from wds_async.storage.http.errors import explain_exception
from wds_async.storage.options import NO_OPTIONS
from wds_async.storage.secrets import Secrets
from wds_async.storage.upload import HttpSink

__all__ = ["AisSink"]


class AisSink(HttpSink):
    """One object; it is gathered in a temporary file and sent at ``commit``, tried again like a read. The options
    are those of reading (`urls.OPTIONS`). UrlError for a URL that names no object. Proxies of the environment are not
    used."""

    def __init__(self, location: Location) -> None:
        self._cluster = cluster_for(location.target, location.options)
        target = writable_url(AisObject.of(location.target), self._cluster, location.shown)
        super().__init__(replace(location, target=target, options=NO_OPTIONS))
        self._request = Request(target, WRITE_HEADERS, tls=self._cluster.tls)
        self._identity = ANONYMOUS
        self._secrets = Secrets()

    def _classify(self, outcome: Answer | BaseException) -> Fault:
        if isinstance(outcome, Answer):
            return explain_answer(self._secrets.of_answer(outcome), self._identity, self._cluster.endpoint)
        return replace(
            explain_exception(outcome), advice=f"Is AIStore's proxy at {self._cluster.endpoint} (AIS_ENDPOINT)?"
        )

    def _put(self, file: IO[bytes], timeout_s: float) -> Answer:
        token, _, self._identity = read_token(self._cluster.token)
        self._secrets.add(token)
        return put_by_target(self._request, token, file, self.offset, timeout_s)
