"""Safe lines for a terminal: control characters in data are shown as escapes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import click

__all__ = ["Repeats", "line", "say"]

# Colours (SGR) are ours, and harmless where they are not; every other escape and control character moves the cursor,
# sets the title, writes the clipboard, or looks like another line.
_OBEYED = re.compile(r"\x1b(?!\[[0-9;]*m)|[\x00-\x1a\x1c-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def line(text: str, *, keep: str = "") -> str:
    r"""Return ``text`` with control characters as escapes (``\x1b``, ``\n``), except those in ``keep``."""

    def escaped(match: re.Match[str]) -> str:
        return match[0] if match[0] in keep else match[0].encode("unicode_escape").decode("ascii")

    return _OBEYED.sub(escaped, text)


# What differs between errors of one kind: paths, URLs, offsets, times, numbers of requests; a status is kept.
_PARTICULAR = re.compile(r"\S*/\S*|\b(?!\d{3}\b)[\w-]*\d[\w.-]*")
_NAMED_AT_MOST = 3


class Repeats:
    """Counter of errors that differ only in names and numbers; the first of each kind is shown."""

    def __init__(self) -> None:
        self._kinds: dict[str, list[str]] = {}

    def seen(self, error: str, shard: str) -> bool:
        """Return whether an error like it came before; count ``shard`` for it."""
        shards = self._kinds.setdefault(_PARTICULAR.sub("#", error), [])
        shards.append(shard)
        return len(shards) > 1

    def lines(self) -> Iterator[str]:
        """Yield a line for each kind that came again: how many times, and the first shards."""
        for first, *others in self._kinds.values():
            if others:
                named = ", ".join(others[:_NAMED_AT_MOST])
                rest = len(others) - _NAMED_AT_MOST
                more = f" and {rest:,} more" if rest > 0 else ""
                yield f"{len(others):,} with the same error as {first}: {named}{more} (--verbose shows each)"


def say(text: str, **how: Any) -> None:
    """Print one line (`click.echo`'s arguments), by `line`."""
    click.echo(line(text), **how)
