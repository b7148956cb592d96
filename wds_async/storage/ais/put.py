"""Writing to AIStore: a PUT that its proxy redirects to the target, which also writes through to a cloud's bucket."""

from __future__ import annotations

import urllib.parse
from dataclasses import replace
from typing import IO

from wds_async.errors import UrlError
from wds_async.storage.ais.backend import explain_answer
from wds_async.storage.ais.urls import ANONYMOUS, AisObject, cluster_for, read_token
from wds_async.storage.base import Answer, Fault, Location, RedirectLoop, Request
from wds_async.storage.http.errors import explain_exception
from wds_async.storage.http.messages import PLAIN_HEADERS
from wds_async.storage.options import NO_OPTIONS
from wds_async.storage.secrets import Secrets
from wds_async.storage.upload import PUT_REDIRECTS, HttpSink, send_put

__all__ = ["AisSink"]

_HEADERS = (*PLAIN_HEADERS[:1], ("Content-Type", "application/octet-stream"))


class AisSink(HttpSink):
    """One object; it is gathered in a temporary file and sent at ``commit``, tried again like a read. The options
    are those of reading (`urls.OPTIONS`). UrlError for a URL that names no object. Proxies of the environment are not
    used."""

    def __init__(self, location: Location) -> None:
        self._cluster = cluster_for(location.target, location.options)
        place = AisObject.of(location.target)
        if not place.name or place.name.endswith("/") or place.query:
            raise UrlError(f"{location.shown}: names no object to write; write ais://bucket/object")
        if self._cluster.socket:
            raise UrlError(
                f"{location.shown}: the service at {self._cluster.endpoint} only reads; write to the store itself"
            )
        target = place.object_url(self._cluster.base)
        super().__init__(replace(location, target=target, options=NO_OPTIONS))
        self._request = Request(target, _HEADERS, tls=self._cluster.tls)
        self._identity = ANONYMOUS
        self._secrets = Secrets()

    def _classify(self, outcome: Answer | BaseException) -> Fault:
        if isinstance(outcome, Answer):
            return explain_answer(self._secrets.of_answer(outcome), self._identity, self._cluster.endpoint)
        return replace(
            explain_exception(outcome), advice=f"Is AIStore's proxy at {self._cluster.endpoint} (AIS_ENDPOINT)?"
        )

    def _put(self, file: IO[bytes], timeout_s: float) -> Answer:
        """Send the body to the target that the proxy names, and the token to the proxy only. The proxy gets an empty
        body, as from AIStore's own client: a front end may read the body that a length promises before it answers."""
        token, _, self._identity = read_token(self._cluster.token)
        self._secrets.add(token)
        proof = {"Connection": "close", **({"Authorization": f"Bearer {token}"} if token else {})}
        answer = send_put(self._request, None, 0, timeout_s, more=proof, proxied=False)
        if answer.status not in PUT_REDIRECTS or "location" not in answer.fields:
            # A single node may have taken the object itself, without a body: that is no success.
            return answer if answer.status >= 300 else Answer(502, {}, b"the proxy did not redirect the upload")
        target = urllib.parse.urljoin(self._request.url, answer.fields["location"])
        answer = send_put(replace(self._request, url=target), file, self.offset, timeout_s, proxied=False)
        if answer.status in PUT_REDIRECTS:
            raise RedirectLoop(f"a target of AIStore at {self._cluster.endpoint} redirected the upload again")
        return answer
