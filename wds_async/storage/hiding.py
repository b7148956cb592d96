"""Secrets that were sent, and texts without them: some servers repeat in an error what they were sent."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from wds_async.storage.base import Answer, Fault

__all__ = ["Secrets", "code_shown"]

_PROOFS = re.compile(r"(?:proxy-)?authorization|cookie|.*-(?:security-token|token|customer-key)", re.IGNORECASE)
_KEPT_AT_MOST = 256
_SHORTEST = 4
_CODE = re.compile(r"[\w.-]{1,80}", re.ASCII)


def code_shown(code: str) -> str:
    """An error's ``code`` where it is one: a short word. "" for anything else, which a server may have made of what it
    was sent."""
    return code if _CODE.fullmatch(code) else ""


class Secrets:
    """The newest few hundred values that prove who asks. Nothing shows them."""

    def __init__(self, *values: Any) -> None:
        self._values: dict[str, None] = {}
        self.add(*values)

    def __repr__(self) -> str:
        return f"Secrets({len(self._values)})"

    def add(self, *values: Any) -> None:
        """Each a str (others are passed over), to be hidden as it is and as it stands in a URL."""
        for value in values:
            if isinstance(value, str) and len(value) >= _SHORTEST:
                for form in (value, urllib.parse.quote(value, safe=""), urllib.parse.unquote(value)):
                    self._values.pop(form, None)
                    self._values[form] = None
        while len(self._values) > _KEPT_AT_MOST:
            del self._values[next(iter(self._values))]

    def add_headers(self, headers: Iterable[tuple[str, str]]) -> None:
        """The headers among ``headers`` that prove something, whole and by what follows their last space or ``=``."""
        for name, value in headers:
            if _PROOFS.fullmatch(name):
                self.add(value, value.rpartition(" ")[2], value.rpartition("Signature=")[2])

    def add_query(self, query: str) -> None:
        """A query that is signed, whole and by its signature."""
        self.add(query, *urllib.parse.parse_qs(query).get("sig", []))

    def hidden(self, text: str) -> str:
        """``text`` with ``***`` for each."""
        for value in sorted(self._values, key=len, reverse=True):
            text = text.replace(value, "***")
        return text

    def of_answer(self, answer: Answer) -> Answer:
        """``answer`` without them, before anybody cuts pieces out of it."""
        if not self._values:
            return answer
        excerpt = self.hidden(answer.excerpt.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
        return replace(answer, fields=self.of_mapping(answer.fields), excerpt=excerpt)

    def of_mapping(self, fields: Mapping[str, str]) -> dict[str, str]:
        """``fields`` without them."""
        return {name: self.hidden(value) for name, value in fields.items()}

    def of_fault(self, fault: Fault) -> Fault:
        """``fault`` without them."""
        return replace(fault, reason=self.hidden(fault.reason), advice=self.hidden(fault.advice))
