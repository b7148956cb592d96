r"""Rewrite rules: ``regex=replacement;…``, what ``WDS_REWRITE`` holds.

A rule's expression is anchored at the start of the URL, and the first rule that matches is the only one
applied. ``\=`` and ``\;`` are a literal ``=`` and ``;``; ``\1`` and ``\g<name>`` in a replacement are groups.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from wds_async.config import settings
from wds_async.errors import UnsafeContent, UrlError
from wds_async.redact import redact

__all__ = ["Rule", "parse_rules", "rewrite", "rules_from_env"]

_HOW = r"rules are regex=replacement, separated by ';'; write \= and \; for those characters themselves"
_REFERENCE = re.compile(r"\\(?:g<(\w+)>|([0-9]{1,2})|(.))", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Rule:
    """What the start of a URL must match, and what takes the place of the part that matched."""

    pattern: re.Pattern[str]
    replacement: str


def _cut(text: str, separator: str) -> list[str]:
    """``text`` cut at each ``separator`` that is not escaped, and with its escapes taken off."""
    pieces = [""]
    for token in re.findall(r"\\.|.|\\$", text, re.DOTALL):
        if token == separator:
            pieces.append("")
        else:
            pieces[-1] += separator if token == "\\" + separator else token
    return pieces


def _rule(number: int, text: str) -> Rule:
    def wrong(why: str) -> UrlError:
        return UrlError(f"rewrite rule {number}, {redact(text)!r}: {why} ({_HOW})")

    # Only the first '=' separates, so that a replacement may hold '=' (a query) as it is.
    pattern, *rest = _cut(text, "=")
    if not rest:
        raise wrong("there is no '='")
    if not pattern.strip():
        raise wrong("the expression before '=' is empty")
    replacement = "=".join(rest)
    try:
        # A space after ';' is layout, since no URL begins with one. One that ends a replacement counts:
        # "gs://=pipe:ssh host cat ".
        compiled = re.compile(pattern.lstrip())
        compiled.sub(replacement, "")  # raises for a reference to a group that there is not
    except (re.error, IndexError) as exn:
        raise wrong(str(exn)) from exn
    return Rule(compiled, replacement)


@lru_cache(maxsize=32)
def parse_rules(text: str) -> tuple[Rule, ...]:
    """The rules in ``text``, in order; empty ones (a ``;`` at the end) are passed over.

    Raises `UrlError` with the number (from 1) and text of a rule that is malformed.
    """
    pieces = [piece for piece in _cut(text, ";") if piece.strip()]
    return tuple(_rule(number, piece) for number, piece in enumerate(pieces, 1))


def rewrite(url: str, rules: Sequence[Rule]) -> str:
    """``url`` as the first rule that matches its start makes it, or unchanged.

    Where a rule turns a URL into a ``pipe:`` command, what comes from the URL (its groups and its rest) is quoted
    for the shell, so that no name can run a command: ``gs://=pipe:gsutil cat gs://`` makes of ``gs://b/o x``
    ``pipe:gsutil cat gs://'b/o x'``.
    """
    for rule in rules:
        match = rule.pattern.match(url)
        if match is None:
            continue
        rest = url[match.end() :]
        if not rule.replacement.startswith("pipe:") or url.startswith("pipe:"):
            return match.expand(rule.replacement) + rest
        return _command(match, rule.replacement, rest)
    return url


def _command(match: re.Match[str], replacement: str, rest: str) -> str:
    """``match.expand(replacement) + rest``, with everything that the URL brings quoted where it stands."""
    command, position = "", 0
    for reference in _REFERENCE.finditer(replacement):
        name, number, other = reference.groups()
        command += replacement[position : reference.start()]
        position = reference.end()
        if other is not None:
            command += other if other == "\\" else reference.group()
        else:
            command += _quote(match.group(name or int(number)) or "", command)
    command += replacement[position:]
    return command + (_quote(rest, command) if rest else "")


def _quote(value: str, before: str) -> str:
    """``value`` so that the shell takes it literally after the text ``before``, inside or outside of quotes."""
    quote = ""
    for token in re.findall(r"\\.|['\"]", before):
        if token == quote:
            quote = ""
        elif not quote and token in ("'", '"'):
            quote = token
        elif quote == "'" and token == r"\'":  # no escapes within '…'
            quote = ""
    if quote == "'":
        return value.replace("'", "'\\''")
    if quote == '"':
        return re.sub(r"([\\\"$`])", r"\\\1", value)
    return shlex.quote(value)


def rules_from_env() -> tuple[Rule, ...]:
    """The rules of ``WDS_REWRITE`` (or ``GOPEN_REWRITE``).

    Raises `UnsafeContent` where there are some and ``WDS_SECURE=1`` forbids them, `UrlError` for a malformed one.
    """
    now = settings()
    if now.rewrite and now.secure:
        raise UnsafeContent(
            "rewrite_url: unsafe_gopen is False, cannot rewrite URLs using environment variables: WDS_SECURE=1 is "
            "set; unset WDS_REWRITE (GOPEN_REWRITE) or WDS_SECURE"
        )
    try:
        return parse_rules(now.rewrite) if now.rewrite else ()
    except UrlError as exn:
        raise UrlError(f"WDS_REWRITE (or GOPEN_REWRITE): {exn}") from None
