"""Lines for a terminal: what data bring with them may be read there, but not obeyed."""

from __future__ import annotations

import re
from typing import Any

import click

__all__ = ["line", "say"]

# Colours (SGR) are ours, and harmless where they are not; every other escape and control character moves the cursor,
# sets the title, writes the clipboard, or looks like another line.
_OBEYED = re.compile(r"\x1b(?!\[[0-9;]*m)|[\x00-\x1a\x1c-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def line(text: str, *, keep: str = "") -> str:
    r"""``text`` with each character that a terminal would obey as an escape (``\x1b``, ``\n``); ``keep`` are left."""
    return _OBEYED.sub(lambda found: found[0] if found[0] in keep else _escaped(found[0]), text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def say(text: str, **how: Any) -> None:
    """Print one line (`click.echo`'s arguments), by `line`."""
    click.echo(line(text), **how)
