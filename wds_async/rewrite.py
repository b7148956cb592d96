r"""Rewrite rules, ``regex=replacement;…`` as in ``WDS_REWRITE``, and URLs of commands that print one object.

A rule's expression is anchored at the start of the URL, and the first rule that matches is the only one
applied. ``\=`` and ``\;`` are a literal ``=`` and ``;``; ``\1`` and ``\g<name>`` in a replacement are groups.

The other names of a scheme (``gcs``, ``s3a``, ``abfs``, …) follow it: where no rule matches ``gcs://b/o`` as it was
written, the rules are tried on ``gs://b/o``. So a rule for the alias as written wins over one for the scheme, whatever
their order.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shlex
import urllib.parse
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from wds_async.config import is_secure, rewriting
from wds_async.errors import UnsafeContent, UrlError, WdsError
from wds_async.redact import redact
from wds_async.storage.stores import usual_scheme

__all__ = [
    "Rule",
    "native_pipe",
    "note_matches",
    "parse_rules",
    "rewrite",
    "rule_for",
    "rules_from_env",
    "unmatched_rules",
]

_HOW = r"rules are regex=replacement, separated by ';'; write \= and \; for those characters themselves"
_REFERENCE = re.compile(r"\\(?:g<(\w+)>|([0-9]{1,2})|(.))", re.DOTALL)
_LOOKED_AT_MOST = 100_000
_settled: set[Rule] = set()
"""Rules of ``WDS_REWRITE`` that rewrite a shard of a list of this process, and those that `unmatched_rules` gave."""

# What runs its arguments through the shell of another machine, where the quotes of this one's are gone.
_REMOTE = re.compile(r"pipe:\s*(?:\S*/)?ssh\s")


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern for the start of a URL, and the replacement of the part that matched."""

    pattern: re.Pattern[str]
    replacement: str

    @property
    def shown(self) -> str:
        """The rule as written, without secrets."""
        return redact(f"{self.pattern.pattern}={self.replacement}")


def _cut(text: str, separator: str) -> list[str]:
    """Split ``text`` at each ``separator`` that is not escaped, and unescape it."""
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
    numbers = [reference[2] for reference in _REFERENCE.finditer(replacement) if reference[2]]
    if any(number.startswith("0") or int(number) > compiled.groups for number in numbers):
        raise wrong(r"\0 and three digits are a character's code to Python; write \g<0> for all that matched")
    return Rule(compiled, replacement)


@functools.lru_cache(maxsize=32)
def parse_rules(text: str) -> tuple[Rule, ...]:
    """Return the rules in ``text``, in order, without empty ones (a ``;`` at the end).

    Raises `UrlError` with the number (from 1) and text of a rule that is malformed.
    """
    pieces = [piece for piece in _cut(text, ";") if piece.strip()]
    return tuple(_rule(number, piece) for number, piece in enumerate(pieces, 1))


def rewrite(url: str, rules: Sequence[Rule]) -> str:
    """Apply the first rule that matches the start of ``url``.

    Where a rule turns a URL into a ``pipe:`` command, what comes from the URL (its groups and its rest) is quoted
    for the shell, so that no name can run a command: ``gs://=pipe:gsutil cat gs://`` makes of ``gs://b/o x``
    ``pipe:gsutil cat gs://'b/o x'``. For ``pipe:ssh …`` it is quoted twice: ssh gives its words to a shell again. A
    command that calls another shell by itself (``sh -c``) is quoted for the first one only.
    """
    first = _first(url, rules)
    if first is None:
        return url
    rule, match = first
    rest = match.string[match.end() :]
    if not rule.replacement.startswith("pipe:") or url.startswith("pipe:"):
        return match.expand(rule.replacement) + rest
    return _command(match, rule.replacement, rest)


def rule_for(url: str, rules: Sequence[Rule]) -> Rule | None:
    """Return the rule that `rewrite` applies to ``url``, None where no rule matches."""
    first = _first(url, rules)
    return None if first is None else first[0]


def note_matches(urls: Sequence[str]) -> None:
    """Note which rules of ``WDS_REWRITE`` rewrite one of ``urls``, for `unmatched_rules`. Costs nothing once all do."""
    with contextlib.suppress(WdsError):  # raised for each shard that is read
        rules = rules_from_env()
        if len(urls) > _LOOKED_AT_MOST:
            _settled.update(rules)
        for url in urls:
            if _settled.issuperset(rules):
                return
            if (rule := rule_for(url, rules)) is not None:
                _settled.add(rule)


def unmatched_rules() -> list[str]:
    """Return the rules of ``WDS_REWRITE``, redacted, that rewrite none of the shards that were noted; each once."""
    with contextlib.suppress(WdsError):
        unmatched = [rule for rule in rules_from_env() if rule not in _settled]
        _settled.update(unmatched)
        return [rule.shown for rule in unmatched]
    return []


def _first(url: str, rules: Sequence[Rule]) -> tuple[Rule, re.Match[str]] | None:
    for spelling in _spellings(url):
        for rule in rules:
            if (match := rule.pattern.match(spelling)) is not None:
                return rule, match
    return None


def _spellings(url: str) -> tuple[str, ...]:
    """Return ``url``, and where its scheme is an alias, also ``url`` by the usual scheme."""
    name, separator, rest = url.partition("://")
    usual = usual_scheme(name.lower())
    return (url, f"{usual}://{rest}") if separator and usual != name.lower() else (url,)


def _command(match: re.Match[str], replacement: str, rest: str) -> str:
    """Return ``match.expand(replacement) + rest`` with every part of the URL quoted for the shell."""
    command, position = "", 0
    remote = _REMOTE.match(replacement) is not None

    def quote(value: str, before: str) -> str:
        return _quote(_quote(value, _read(before)[1]) if remote else value, before)

    for reference in _REFERENCE.finditer(replacement):
        name, number, other = reference.groups()
        command += replacement[position : reference.start()]
        position = reference.end()
        if other is not None:
            command += other if other == "\\" else reference.group()
        else:
            group = int(name or number) if (name or number).isdecimal() else name
            command += quote(match.group(group) or "", command)
    command += replacement[position:]
    return command + (quote(rest, command) if rest else "")


def _quote(value: str, before: str) -> str:
    """Quote ``value`` so that the shell takes it literally after the text ``before``, inside or outside of quotes."""
    quote, _ = _read(before)
    if quote == "'":
        return value.replace("'", "'\\''")
    if quote == '"':
        return re.sub(r"([\\\"$`])", r"\\\1", value)
    return shlex.quote(value)


def _read(text: str) -> tuple[str, str]:
    """Return the quote that is open after ``text`` ("" for none), and the text as the shell passes it on."""
    quote, seen = "", ""
    for token in re.findall(r"\\.|.", text, re.DOTALL):
        if quote == "'" and token != "'":  # no escapes within '…'
            seen, quote = seen + token.removesuffix("'"), "" if token == "\\'" else quote
        elif token == quote:
            quote = ""
        elif not quote and token in ("'", '"'):
            quote = token
        elif token[0] == "\\" and len(token) == 2 and (not quote or token[1] in '\\"$`'):
            seen += token[1]
        else:
            seen += token
    return quote, seen


def rules_from_env() -> tuple[Rule, ...]:
    """Return the rules of ``WDS_REWRITE`` (or ``GOPEN_REWRITE``).

    Raises `UnsafeContent` where there are some and ``WDS_SECURE=1`` forbids them, `UrlError` for a malformed one.
    """
    rules, secure = rewriting(), is_secure()
    if rules and secure:
        raise UnsafeContent(
            "rewrite_url: unsafe_gopen is False, cannot rewrite URLs using environment variables: WDS_SECURE=1 is "
            "set; unset WDS_REWRITE (GOPEN_REWRITE) or WDS_SECURE"
        )
    try:
        return parse_rules(rules) if rules else ()
    except UrlError as exn:
        raise UrlError(f"WDS_REWRITE (or GOPEN_REWRITE): {exn}") from None


_QUOTED = re.compile(r"'[^']*'|\"[^\"$`\\]*\"")
# '&' ends a command, and '~' at the start of a word is expanded.
_SHELL_SYNTAX = re.compile(r"[^\w%@+=:,./?~\s\-]|(?:^|\s)~")
_OR_TRUE = re.compile(r"\s*\|\|\s*true\s*$")


def _words(command: str) -> list[str] | None:
    """Return the words of a command, None where it has shell syntax."""
    bare = _QUOTED.sub("", command)
    # '?' is a glob, but no file is called https://….
    if _SHELL_SYNTAX.search(bare) or any("?" in word and "://" not in word for word in bare.split()):
        return None
    return shlex.split(command)


def _options(words: list[str], harmless: Collection[str], valued: Collection[str] = frozenset()) -> list[str] | None:
    """Return the operands among ``words``; None if there is an option that is neither in ``harmless`` (alone) nor in
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
_CURL_HARMLESS = frozenset({
    "--disable", "--fail", "--globoff", "--location", "--no-buffer", "--no-progress-meter", "--retry-all-errors",
    "--retry-connrefused", "--show-error", "--silent",
})  # fmt: skip
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


_GOOGLE_OBJECT = r"gs://[^*?\[\]#]*"  # without wildcard or generation
_PRINTING = {
    "gsutil": (["cat"], _GOOGLE_OBJECT, [], ("-q", "-m")),
    "gcloud": (["storage", "cat"], _GOOGLE_OBJECT, [], ("-q", "--quiet")),
    "aws": (["s3", "cp"], r"s3://.*", ["-"], ("--quiet", "--only-show-errors", "--no-progress")),  # no wildcards
}
"""The words of commands that print an object: before its URL, the form of the URL, after it, and harmless options."""


def _printed(tool: str, words: list[str]) -> str | None:
    before, form, after, harmless = _PRINTING[tool]
    operands = _options(words, harmless) or []
    url = operands[len(before)] if len(operands) == len(before) + 1 + len(after) else ""
    return url if operands == [*before, url, *after] and re.fullmatch(form, url, re.DOTALL) else None


_AZ_NAMES = {"-c": "--container-name", "-n": "--name", "-f": "--file", "-o": "--output"}


def _az(words: list[str]) -> str | None:
    if words[:3] != ["storage", "blob", "download"]:
        return None
    options: dict[str, str] = {}
    rest = iter(words[3:])
    for word in rest:
        if word in ("--no-progress", "--only-show-errors"):
            continue
        name, equals, value = word.partition("=")
        name = _AZ_NAMES.get(name, name)
        if name in options:
            return None
        options[name] = value if equals else next(rest, "")
    container, blob = options.pop("--container-name", ""), options.pop("--name", "")
    account = options.pop("--account-name", "")
    if options.pop("--file", "/dev/stdout") != "/dev/stdout" or options.pop("--output", "none") != "none":
        return None
    if options or not container or not blob:
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
    **{tool: functools.partial(_printed, tool) for tool in _PRINTING},
    "az": _az,
    "cat": _cat,
    "curl": _curl,
}


def native_pipe(command_or_url: str) -> str | None:
    """Return the URL with the same bytes as a ``pipe:`` command, None where that is not certain.

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
