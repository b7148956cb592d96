"""``wds-async resolve``: what each URL becomes, who would read it and as whom, and whether it can be read."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import click

from wds_async import rewrite, urls
from wds_async.cli import shards, terminal
from wds_async.config import settings
from wds_async.errors import WdsError
from wds_async.redact import redact
from wds_async.shardcache.cache import shard_cache
from wds_async.shardlists import check as shardcheck
from wds_async.storage.registry import Location
from wds_async.storage.stores import usual_scheme
from wds_async.transfer import probe

__all__ = ["Look", "Row", "command"]

_SHOWN = 10


@dataclass(frozen=True)
class Look:
    """What reading the first bytes said. ``ok`` is None where they were not read, and ``why`` not; ``bytes`` is the
    shard's size where the answer told it, ``seconds`` the time until they came."""

    ok: bool | None
    bytes: int | None = None
    seconds: float | None = None
    looks_like: str = ""
    error: str = ""
    why: str = ""
    read_from: str = ""
    """The backend that they came from, where that is not the one described."""


@dataclass(frozen=True)
class Row:
    """One shard: what it becomes, and how it would be read. Nothing here is a secret."""

    url: str
    target: str
    rule: str
    """The rule of ``WDS_REWRITE`` that matched."""
    route: str
    """Whether AIStore reads it, and why or why not."""
    kind: str = ""
    store: str = ""
    endpoint: str = ""
    identity: str = ""
    direct: bool | None = None
    why: str = ""
    """Why it is not read by direct requests."""
    fallback: str = ""
    cached: bool = False
    error: str = ""
    check: Look | None = None

    @property
    def failed(self) -> bool:
        """Whether it cannot be read, as far as that is known."""
        return bool(self.error) or (self.check is not None and self.check.ok is False)

    @property
    def why_failed(self) -> str:
        """The error of resolving it, else that of the look at it; "" for none."""
        return self.error or (self.check.error if self.check is not None else "")

    @property
    def alike(self) -> tuple[Any, ...]:
        """Return the facts that are shown once for adjacent shards."""
        facts = (self.store, self.endpoint, self.identity, self.direct, self.why, self.fallback, self.rule, self.route)
        return (bool(self.store), *facts)


@click.command("resolve")
@click.argument("url", nargs=-1, required=True)
@click.option("--check", "wanted", is_flag=True, help="Read the first bytes of each, by one ranged GET.")
@click.option("--all", "everything", is_flag=True, help=f"Show all shards, and not only the first {_SHOWN}.")
@click.option("--verbose", is_flag=True, help="Show every error, and not only the first of equal ones.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=30.0, show_default=True,
              help="Seconds for the look at each shard.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, the summary last.")
def command(
    *, url: tuple[str, ...], wanted: bool, everything: bool, verbose: bool, timeout_s: float, as_json: bool
) -> None:
    """Show what URLs become and how they would be read: expanded, rewritten (WDS_REWRITE), routed (AIStore); the
    store, its endpoint, the identity (never a secret), by direct requests or why not.

    With --check the first bytes are read. The status is 1 where a shard cannot be resolved or read.

    Example: wds-async resolve 's3://bucket/train-{000..099}.tar' --check
    """
    found = shards.expand(url)
    shown = found if everything else found[:_SHOWN]
    failed, repeats, last = 0, terminal.Repeats(), None
    for row in _rows(shown, wanted, timeout_s):
        failed += row.failed
        if as_json:
            terminal.say(json.dumps(asdict(row)))
        elif verbose or not (row.failed and repeats.seen(row.why_failed, row.url)):
            _draw(row, first=row.alike != last)
            last = row.alike
    for line in repeats.lines():
        terminal.say(f"    {line}")
    summary: dict[str, Any] = {
        "shards": len(found),
        "shown": len(shown),
        "checked": wanted,
        "failed": failed,
    }
    if unmatched := _unmatched_rules(found):
        summary["unmatched_rules"] = unmatched
        click.echo(f"WDS_REWRITE: these rules match none of the {len(found)} shards: {'; '.join(unmatched)}", err=True)
    click.echo(json.dumps(summary) if as_json else _in_words(summary), err=not as_json)
    click.get_current_context().exit(1 if failed else 0)


def _rows(found: list[str], wanted: bool, timeout_s: float) -> Iterator[Row]:
    cache = shard_cache() if os.path.isdir(os.path.expanduser(settings().cache)) else None
    looks: Iterable[probe.Probed | None] = itertools.repeat(None)
    if wanted:
        looks = probe.probe(found, timeout_s=timeout_s)
    for described, look in zip(probe.describe(found, timeout_s=timeout_s), looks, strict=False):
        cached = cache is not None and described.location is not None and cache.find(described.url) is not None
        yield _row(described, look, cached)


def _row(described: probe.Described, look: probe.Probed | None, cached: bool) -> Row:
    place, found = described.location, described.found
    facts: dict[str, Any] = {"rule": _rule(described.url), "cached": cached}
    if place is not None:
        facts |= {"kind": place.kind, "fallback": "" if place.fallback is None else place.fallback.kind}
    if found is not None:
        facts |= {
            "store": found.store,
            "endpoint": redact(found.endpoint),
            "identity": redact(found.identity),
            "direct": found.direct,
            "why": found.why,
        }
    if described.error is not None:
        facts["error"] = str(described.error)
    if look is not None and place is not None:
        facts["check"] = _look(look, place)
    target = "" if place is None else redact(place.target)
    return Row(redact(described.url), target, route=_route(place), **facts)


def _look(found: probe.Probed, place: Location) -> Look:
    if not found.checked:
        return Look(None, why=found.why)
    kind, error = shardcheck.looks_like(found)
    wrong = found.error or error
    elsewhere = "" if found.location is None or found.location.kind == place.kind else found.location.kind
    return Look(
        wrong is None,
        found.size,
        None if found.error is not None else round(found.seconds, 4),
        kind,
        "" if wrong is None else str(wrong),
        read_from=elsewhere,
    )


def _unmatched_rules(found: Iterable[str]) -> list[str]:
    """Return the rules of ``WDS_REWRITE`` that rewrite none of the shards, as text."""
    with contextlib.suppress(WdsError):  # shown with each shard
        rules = rewrite.rules_from_env()
        used = {rewrite.rule_for(url, rules) for url in found} if rules else set()
        return [rule.shown for rule in rules if rule not in used]
    return []


def _rule(url: str) -> str:
    with contextlib.suppress(WdsError):  # shown with the shard itself
        rules = rewrite.rules_from_env()
        if (rule := rewrite.rule_for(url, rules)) is not None:
            return rule.shown
    return ""


def _route(place: Location | None) -> str:
    """What there is to say about AIStore."""
    if place is None:
        return ""
    now, name = settings(), urls.scheme(place.target)
    name = usual_scheme(name)
    if place.spec.router:
        own = name in place.spec.schemes
        return "to AIStore (AIS_ENDPOINT)" if own else f"to AIStore: USE_AIS_FOR names {name}"
    if name in now.use_ais_for:
        why = f"AIStore has no provider for {name}" if now.ais_endpoint else "AIS_ENDPOINT is not set"
        return f"not to AIStore: USE_AIS_FOR names {name}, but {why}"
    if now.ais_endpoint and place.spec.buckets:
        return f"not to AIStore: USE_AIS_FOR does not name {name}"
    return ""


def _draw(row: Row, *, first: bool) -> None:
    if first:
        click.echo(click.style(row.store or "cannot be resolved", bold=True, fg=None if row.store else "red"))
        for name, text in _facts(row):
            terminal.say(f"  {click.style(name.ljust(9), dim=True)} {text}")
    where = row.url if row.target in ("", row.url) else f"{row.url} → {row.target}"
    notes = ["in the cache"] if row.cached else []
    terminal.say("  ".join([f"    {where}", *(click.style(note, fg="cyan") for note in notes), *_result(row)]))


def _facts(row: Row) -> Iterator[tuple[str, str]]:
    if row.endpoint:
        yield "endpoint", row.endpoint
    if row.store:
        yield "as", row.identity
        direct = "as files" if row.kind == "local" else "by direct requests"
        yield "read", direct if row.direct else f"without direct requests: {row.why}"
    if row.rule:
        yield "rewritten", f"by {row.rule}"
    if row.route:
        yield "routed", row.route
    if row.fallback:
        yield "else", f"{row.fallback}, where AIStore cannot be reached (WDS_AIS_FALLBACK)"


def _result(row: Row) -> Iterator[str]:
    look = row.check
    if row.error:
        yield click.style(_short(row.error, row), fg="red")
    if look is None or (look.error and look.error == row.error):
        return
    if look.ok is None:
        yield click.style(f"not checked: {look.why}", fg="yellow")
    elif not look.ok:
        yield click.style(_short(look.error, row), fg="red")
    else:
        yield click.style("ok", fg="green")
        yield "size unknown" if look.bytes is None else shards.human(look.bytes)
        yield look.looks_like
        yield f"first bytes after {1000 * (look.seconds or 0):.0f} ms"
    if look.read_from:
        yield click.style(f"read from {look.read_from} instead", fg="yellow")


def _short(error: str, row: Row) -> str:
    """The error without the shard's name, which stands before it."""
    for name in (row.target, row.url):
        if name and error.startswith(name):
            return error.removeprefix(name).removeprefix(" at byte 0").removeprefix(": ")
    return error


def _in_words(summary: dict[str, Any]) -> str:
    count, shown, failed = summary["shards"], summary["shown"], summary["failed"]
    rest = "" if shown == count else f", the first {shown} shown (--all shows all)"
    can = "can be read" if summary["checked"] else "can be resolved"
    outcome = f"{failed} cannot" if failed else f"all that are shown {can}"
    return f"{count} shards{rest}: {outcome}"
