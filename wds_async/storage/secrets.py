"""Secrets that were sent, hidden in answers, errors and logs: some servers repeat what they were sent."""

from __future__ import annotations

import functools
import importlib.util
import logging
import pkgutil
import re
import urllib.parse
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from wds_async.redact import redact
from wds_async.storage.base import Answer, Fault

__all__ = ["Secrets", "Writer", "code_shown", "hide_in_logs"]

_PROOFS = re.compile(r"(?:proxy-)?authorization|cookie|.*-(?:security-token|token|customer-key)", re.IGNORECASE)
_KEPT_AT_MOST = 256
_SHORTEST = 4
_CODE = re.compile(r"[\w.-]{1,80}", re.ASCII)


def code_shown(code: str) -> str:
    """Return an error's ``code`` if it is a short word, else "": a server may put there what it was sent."""
    return code if _CODE.fullmatch(code) else ""


class Secrets:
    """The newest few hundred credentials that were sent; never shown."""

    def __init__(self, *values: Any) -> None:
        self._values: dict[str, None] = {}
        self.add(*values)

    def __repr__(self) -> str:
        return f"Secrets({len(self._values)})"

    def add(self, *values: Any) -> None:
        """Add each str among ``values``, to be hidden as it is and percent-encoded or decoded."""
        for value in values:
            if isinstance(value, str) and len(value) >= _SHORTEST:
                for form in (value, urllib.parse.quote(value, safe=""), urllib.parse.unquote(value)):
                    self._values.pop(form, None)
                    self._values[form] = None
        while len(self._values) > _KEPT_AT_MOST:
            del self._values[next(iter(self._values))]

    def add_headers(self, headers: Iterable[tuple[str, str]]) -> None:
        """Add the credentials among ``headers``, whole and what follows their last space or ``=``."""
        for name, value in headers:
            if _PROOFS.fullmatch(name):
                self.add(value, value.rpartition(" ")[2], value.rpartition("Signature=")[2])

    def add_query(self, query: str) -> None:
        """Add a signed query and its signature."""
        self.add(query, *urllib.parse.parse_qs(query).get("sig", []))

    def hidden(self, text: str) -> str:
        """Return ``text`` with ``***`` for each."""
        for value in sorted(self._values, key=len, reverse=True):
            text = text.replace(value, "***")
        return text

    def of_answer(self, answer: Answer) -> Answer:
        """Return ``answer`` without them."""
        if not self._values:
            return answer
        excerpt = self.hidden(answer.excerpt.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
        return replace(answer, fields=self.of_mapping(answer.fields), excerpt=excerpt)

    def of_mapping(self, fields: Mapping[str, str]) -> dict[str, str]:
        """Return ``fields`` without them."""
        return {name: self.hidden(value) for name, value in fields.items()}

    def of_fault(self, fault: Fault) -> Fault:
        """Return ``fault`` without them."""
        return replace(fault, reason=self.hidden(fault.reason), advice=self.hidden(fault.advice))


@dataclass(frozen=True, slots=True)
class Writer:
    """The identity (in words) that writes to a store, the ``secrets`` that it sent, and ``details`` for the store's
    explanation of errors."""

    identity: str = "the credentials that write"
    secrets: Secrets = field(default_factory=Secrets)
    details: Mapping[str, str] = field(default_factory=dict)


# -- log lines of the clouds' clients -----------------------------------------------------------------------------

_NAME = (
    r"(?:proxy-)?authorization|(?:set-)?cookie|signature|[\w-]*-(?:security-token|token|customer-key)"
    r"|(?:aws_?)?secret_?access_?key|(?:aws_)?session_?token|\w*_token|accesstoken|webidentitytoken|token|client_secret|private_key"
)
# 'Authorization': b'…' of a dict or JSON; x-amz-security-token:… to the end of its line; <SecretAccessKey>…</.
_QUOTED_FIELD = re.compile(rf"""((['"])(?:{_NAME})\2\s*:\s*b?)(['"]).*?\3""", re.IGNORECASE)
_BARE_FIELD = re.compile(rf"^((?:{_NAME}):\s*)\S.*", re.IGNORECASE | re.MULTILINE)
_ELEMENT = re.compile(rf"<({_NAME})>[^<]*<", re.IGNORECASE)


class _LogRedaction(logging.Filter):
    """A filter that takes secrets out of the messages of log records and lets all of them pass."""

    def __init__(self) -> None:
        super().__init__()
        self.secrets: weakref.WeakSet[Secrets] = weakref.WeakSet()

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except Exception:  # a broken message is reported by the handler
            return True
        text = message
        for secrets in tuple(self.secrets):
            text = secrets.hidden(text)
        text = _QUOTED_FIELD.sub(r"\1\3***\3", text)
        text = _BARE_FIELD.sub(r"\1***", text)
        text = _ELEMENT.sub(r"<\1>***<", text)
        text = "\n".join(redact(line) for line in text.split("\n"))
        if text != message:
            record.msg, record.args = text, ()
        return True


_log_redaction = _LogRedaction()


def hide_in_logs(secrets: Secrets, *packages: str) -> None:
    """Replace ``secrets``, and the values of headers and fields that prove an identity, by ``***`` in the log lines of
    ``packages`` ("botocore"), for the life of the process. Costs nothing where these loggers are off."""
    _log_redaction.secrets.add(secrets)
    for package in packages:
        for name in _module_names(package):
            logging.getLogger(name).addFilter(_log_redaction)  # once, however often


@functools.cache
def _module_names(package: str) -> tuple[str, ...]:
    """Return the names of the package and its modules: a filter does not apply to loggers below."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        spec = None
    return () if spec is None else (package, *_below(package, spec.submodule_search_locations or ()))


def _below(package: str, folders: Iterable[str]) -> Iterator[str]:
    for module in pkgutil.iter_modules(list(folders), package + "."):
        yield module.name
        if module.ispkg:
            yield from _below(module.name, [f"{folder}/{module.name.rpartition('.')[2]}" for folder in folders])
