"""What a ``pipe:`` command reads, where that can be known for certain.

WebDataset's users wrote ``pipe:curl …`` and ``pipe:gsutil cat …`` because it has no clients of its own. Here
the same objects are read natively, so such a command is worth translating; but only where the translation
reads the very same bytes. Any flag or shell syntax that is not understood ends the attempt.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Callable

__all__ = ["native_pipe"]

# One piece of a shell word without expansion of any kind: plain characters, '…', or "…".
_PIECE = re.compile(r"([\w%@+=:,./?&~\-]+)|'([^']*)'|\"([^\"$`\\]*)\"")
_OR_TRUE = re.compile(r"\s*\|\|\s*true\s*$")


def _words(command: str) -> list[str] | None:
    """The words of a command without shell syntax, None where the shell would do more than run it."""
    words: list[str] = []
    for blank_separated in re.finditer(r"(?:[^\s'\"]|'[^']*'|\"[^\"]*\")+|['\"]", command):
        text, value, position = blank_separated.group(), "", 0
        if text[0] in "~#":
            return None
        for piece in _PIECE.finditer(text):
            if piece.start() != position:
                return None
            plain, single, double = piece.groups()
            # '&' ends a command; '?' is a glob, but no file is called https://….
            if plain is not None and ("&" in plain or ("?" in plain and "://" not in text)):
                return None
            value += plain or single or double or ""
            position = piece.end()
        if position != len(text):
            return None
        words.append(value)
    return words


def _options(words: list[str], harmless: frozenset[str], valued: frozenset[str]) -> list[str] | None:
    """The operands among ``words``; None if there is an option that is neither in ``harmless`` (alone) nor in
    ``valued`` (followed by a value that changes nothing)."""
    operands: list[str] = []
    rest = iter(words)
    for word in rest:
        if not word.startswith("-") or word == "-":
            operands.append(word)
        elif word in valued:
            if next(rest, None) is None:
                return None
        elif word not in harmless and word.partition("=")[0] not in valued:
            return None
    return operands


_CURL_LETTERS = re.compile(r"-[sSLfNgq]+")
_CURL_HARMLESS = frozenset(
    (
        "--disable",
        "--fail",
        "--globoff",
        "--location",
        "--no-buffer",
        "--no-progress-meter",
        "--retry-all-errors",
        "--retry-connrefused",
        "--show-error",
        "--silent",
    )
)
_CURL_VALUED = frozenset(("--connect-timeout", "--retry", "--retry-delay"))


def _curl(words: list[str]) -> str | None:
    operands = _options([w for w in words if not _CURL_LETTERS.fullmatch(w)], _CURL_HARMLESS, _CURL_VALUED)
    if operands is None or len(operands) != 1:
        return None
    url = operands[0]
    # curl expands [1-9] and {a,b} itself, resolves '..', and takes user:password@ as a login.
    if not re.match(r"https?://[^/@\s]+(/|$)", url) or re.search(r"[\s\[\]{}#]|/\.\.?(/|$)", url):
        return None
    return url


def _object(operands: list[str] | None, prefix: str) -> str | None:
    """The one operand, if it is an object's URL without wildcard or generation."""
    if operands is None or len(operands) != 1 or not operands[0].startswith(prefix):
        return None
    return None if re.search(r"[*?\[\]#]", operands[0]) else operands[0]


def _gsutil(words: list[str]) -> str | None:
    while words and words[0] in ("-q", "-m"):
        words = words[1:]
    if words[:1] != ["cat"]:
        return None
    return _object(_options(words[1:], frozenset(), frozenset()), "gs://")


def _gcloud(words: list[str]) -> str | None:
    operands = _options(words, frozenset(("-q", "--quiet")), frozenset())
    return _object(operands[2:], "gs://") if operands and operands[:2] == ["storage", "cat"] else None


def _aws(words: list[str]) -> str | None:
    harmless = frozenset(("--quiet", "--only-show-errors", "--no-progress"))
    operands = _options(words, harmless, frozenset())
    if operands is None or len(operands) != 4 or operands[:2] != ["s3", "cp"] or operands[3] != "-":
        return None
    # Unlike gsutil, aws takes wildcards literally.
    return operands[2] if operands[2].startswith("s3://") else None


_AZ_NAMES = {"-c": "--container-name", "-n": "--name", "-f": "--file", "-o": "--output"}


def _az(words: list[str]) -> str | None:
    if words[:3] != ["storage", "blob", "download"]:
        return None
    given: dict[str, str] = {}
    rest = iter(words[3:])
    for word in rest:
        if word in ("--no-progress", "--only-show-errors"):
            continue
        name, equals, value = word.partition("=")
        name = _AZ_NAMES.get(name, name)
        if name in given:
            return None
        given[name] = value if equals else next(rest, "")
    container, blob = given.pop("--container-name", ""), given.pop("--name", "")
    account = given.pop("--account-name", "")
    if given.pop("--file", "/dev/stdout") != "/dev/stdout" or given.pop("--output", "none") != "none":
        return None
    if given or not container or not blob:
        return None
    if account:
        if not re.fullmatch(r"[a-z0-9]+", account):
            return None
        return f"https://{account}.blob.core.windows.net/{container}/{urllib.parse.quote(blob)}"
    return f"az://{container}/{blob}"


def _cat(words: list[str]) -> str | None:
    if words[:1] == ["--"]:
        words = words[1:]
    elif any(w.startswith("-") for w in words):
        return None
    if len(words) != 1 or not words[0]:
        return None
    # A name that could be read as a URL is told apart by its directory.
    return f"./{words[0]}" if ":" in words[0] and words[0][0] not in "./" else words[0]


_COMMANDS: dict[str, Callable[[list[str]], str | None]] = {
    "aws": _aws,
    "az": _az,
    "cat": _cat,
    "curl": _curl,
    "gcloud": _gcloud,
    "gsutil": _gsutil,
}


def native_pipe(command_or_url: str) -> str | None:
    """The URL that gives the same bytes as a ``pipe:`` command, None where there is none to be sure of.

    Known are ``curl URL``, ``gsutil cat``, ``gcloud storage cat``, ``aws s3 cp X -``, ``az storage blob download``
    and ``cat FILE``, each with or without ``|| true``. Several files, shell syntax, and flags that change the request
    (``curl -H``, ``aws --profile``) give None.
    """
    command = _OR_TRUE.sub("", command_or_url.removeprefix("pipe:"))
    if "\n" in command:
        return None
    words = _words(command)
    if not words or words[0] not in _COMMANDS:
        return None
    return _COMMANDS[words[0]](words[1:])
