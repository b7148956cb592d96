"""One line for each request that was refused; not so many that a flood of them fills a disk."""

from __future__ import annotations

import logging
import time
import urllib.parse
from collections.abc import Callable

from wds_async.redact import redact
from wds_async.service.refusals import Refusal

__all__ = ["Audit", "shown"]

logger = logging.getLogger("wds_async.audit")

LINES_AT_ONCE = 100
LINES_PER_S = 10.0
"""More are counted, and the next line says how many were left out: 10 lines of 1 KB a second are 0.9 GB a day."""

_PATH_AT_MOST = 400
_DECODINGS = 2  # /url/ escapes a URL whose own path and query are escaped


class Audit:
    """Writes to the logger ``wds_async.audit``. ``clock``: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = float(LINES_AT_ONCE)
        self._at = clock()
        self.left_out = 0
        """Refusals without a line since the last one."""

    def refused(self, refusal: Refusal, *, peer: str, client: str = "", method: str = "", path: str = "") -> None:
        """A line for ``refusal``. The record has all of it as ``audit``, a mapping, for logs of JSON."""
        now = self._clock()
        self._left = min(LINES_AT_ONCE, self._left + (now - self._at) * LINES_PER_S)
        self._at = now
        if self._left < 1:
            self.left_out += 1
            return
        self._left -= 1
        said = {
            "peer": _plain(peer),
            "client": _plain(client),
            "method": _plain(method)[:16],
            "path": shown(path),
            "status": refusal.status,
            "reason": refusal.reason,
            "left_out": self.left_out,
        }
        self.left_out = 0
        words = " ".join(f"{name}={value}" for name, value in said.items() if value != "" and name != "left_out")
        more = f" ({said['left_out']} refusals before it were left out)" if said["left_out"] else ""
        logger.warning("refused %s: %s%s", words, redact(refusal.message), more, extra={"audit": said})

    def close(self) -> None:
        """Say how many were left out since the last line."""
        if self.left_out:
            left_out = {"left_out": self.left_out}
            logger.warning("refused: %d more that were left out", self.left_out, extra={"audit": left_out})
            self.left_out = 0


def shown(path: str) -> str:
    """A request's path (and query) for people: as it came, or where it holds a secret or a control character, escaped
    or not, decoded and with that hidden. Cut where it is long."""
    spellings = [path[: 4 * _PATH_AT_MOST]]
    for _ in range(_DECODINGS):
        spellings.append(urllib.parse.unquote(spellings[-1]).replace(" ", "%20"))  # a space would end a password
    secret = any(redact(text) != text for text in spellings)
    text = _plain(redact(spellings[-1]) if secret else spellings[0])
    return text[:_PATH_AT_MOST] + ("…" if len(text) > _PATH_AT_MOST else "")


def _plain(text: str) -> str:
    """One word, which nobody can make look like several."""
    return redact(text).replace(" ", "%20")
