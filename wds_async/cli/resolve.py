"""``wds-async resolve``: what each URL becomes, who would read it and as whom, and whether it can be read."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

import click

from wds_async import rewrite, urls
from wds_async.cli import shards, terminal
from wds_async.config import settings
from wds_async.errors import WdsError
from wds_async.redact import redact
from wds_async.shardcache.cache import shard_cache
from wds_async.shardlists import check as shardcheck
from wds_async.storage.base import Location
from wds_async.storage.stores import usual_scheme
from wds_async.transfer import probe

__all__ = ["command"]

_SHOWN = 10
_SHARED = ("store", "endpoint", "identity", "direct", "why", "fallback", "rule", "route")
"""Facts that are shown once for adjacent shards."""
_Row = dict[str, Any]


@click.command("resolve")
@click.argument("url", nargs=-1, required=True)
@click.option("--check", "wanted", is_flag=True, help="Read the first bytes of each shard, by one ranged GET.")
@click.option("--all", "everything", is_flag=True, help=f"Show all shards, not only the first {_SHOWN}.")
@click.option("--verbose", is_flag=True, help="Show every error, not only the first of identical ones.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=30.0, show_default=True,
              help="Time limit for --check, in seconds per shard.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line, the summary last.")
def command(
    *, url: tuple[str, ...], wanted: bool, everything: bool, verbose: bool, timeout_s: float, as_json: bool
) -> None:
    """Show what URLs resolve to and how they would be read.

    For each shard: the expanded URL, the URL after rewriting (WDS_REWRITE) and routing (AIStore), the store, its
    endpoint, the identity (never a secret), and whether it is read by direct requests, or why not.

    With --check, the first bytes are read too. The exit status is 1 if a shard cannot be resolved or read.

    Example: wds-async resolve 's3://bucket/train-{000..099}.tar' --check
    """
    expanded = shards.expand(url)
    shown = expanded if everything else expanded[:_SHOWN]
    failed, repeats, last = 0, terminal.Repeats(), None
    for row in _rows(shown, wanted, timeout_s):
        check = row["check"] or {}
        error = row["error"] or check.get("error", "")
        failed += bool(error)
        if as_json:
            terminal.say(json.dumps(row))
        elif verbose or not (error and repeats.seen(error, row["url"])):
            shared = [row[name] for name in _SHARED]
            _draw(row, first=shared != last)
            last = shared
    for line in repeats.lines():
        terminal.say(f"    {line}")
    summary: _Row = {"shards": len(expanded), "shown": len(shown), "checked": wanted, "failed": failed}
    if unmatched := _unmatched_rules(expanded):
        summary["unmatched_rules"] = unmatched
        count = len(expanded)
        click.echo(f"WDS_REWRITE: these rules match none of the {count} shards: {'; '.join(unmatched)}", err=True)
    if as_json:
        click.echo(json.dumps(summary))
    else:
        rest = "" if len(shown) == len(expanded) else f", the first {len(shown)} shown (--all shows all)"
        outcome = f"{failed} cannot" if failed else f"all that are shown can be {'read' if wanted else 'resolved'}"
        click.echo(f"{shards.counted(len(expanded), 'shard')}{rest}: {outcome}", err=True)
    click.get_current_context().exit(1 if failed else 0)


def _rows(expanded: list[str], wanted: bool, timeout_s: float) -> Iterator[_Row]:
    """Yield one row a shard: what it becomes, and how it would be read. Nothing in it is a secret."""
    cache = shard_cache() if os.path.isdir(os.path.expanduser(settings().cache)) else None
    looks: Iterable[probe.Probed | None] = itertools.repeat(None)
    if wanted:
        looks = probe.probe(expanded, timeout_s=timeout_s)
    for described, look in zip(probe.describe(expanded, timeout_s=timeout_s), looks, strict=False):
        location, found = described.location, described.found
        yield {
            "url": redact(described.url),
            "target": "" if location is None else redact(location.target),
            "rule": _rule(described.url),
            "route": "" if location is None else _route(location),
            "kind": "" if location is None else location.kind,
            "store": "" if found is None else found.store,
            "endpoint": "" if found is None else redact(found.endpoint),
            "identity": "" if found is None else redact(found.identity),
            "direct": None if found is None else found.direct,
            "why": "" if found is None else found.why,
            "fallback": "" if location is None or location.fallback is None else location.fallback.kind,
            "cached": cache is not None and location is not None and cache.find(described.url) is not None,
            "error": "" if described.error is None else str(described.error),
            "check": None if look is None or location is None else _check(look, location),
        }


def _check(look: probe.Probed, location: Location) -> _Row:
    """Return the outcome of reading the first bytes: ``ok`` None where they were not read, the shard's size, the time
    until they came, and the backend that they came from where that is not the one described."""
    kind, damage = shardcheck.looks_like(look)
    error = look.error or damage
    seconds = round(look.seconds, 4) if look.checked and look.error is None else None
    elsewhere = look.location is not None and look.location.kind != location.kind
    return {
        "ok": error is None if look.checked else None,
        "bytes": look.size,
        "seconds": seconds,
        "looks_like": kind,
        "error": "" if error is None else str(error),
        "why": look.why,
        "read_from": look.location.kind if elsewhere and look.location is not None else "",
    }


def _unmatched_rules(expanded: Iterable[str]) -> list[str]:
    """Return the rules of ``WDS_REWRITE`` that rewrite none of the shards, as text."""
    with contextlib.suppress(WdsError):  # shown with each shard
        rules = rewrite.rules_from_env()
        used = {rewrite.rule_for(url, rules) for url in expanded} if rules else set()
        return [rule.shown for rule in rules if rule not in used]
    return []


def _rule(url: str) -> str:
    with contextlib.suppress(WdsError):  # shown with the shard itself
        rule = rewrite.rule_for(url, rewrite.rules_from_env())
        return "" if rule is None else rule.shown
    return ""


def _route(location: Location) -> str:
    """Return whether AIStore reads it, and why or why not; "" where that is not expected."""
    now, name = settings(), usual_scheme(urls.scheme(location.target))
    if location.spec.router:
        own = name in location.spec.schemes
        return "to AIStore (AIS_ENDPOINT)" if own else f"to AIStore: USE_AIS_FOR names {name}"
    if name in now.use_ais_for:
        why = f"AIStore has no provider for {name}" if now.ais_endpoint else "AIS_ENDPOINT is not set"
        return f"not to AIStore: USE_AIS_FOR names {name}, but {why}"
    if now.ais_endpoint and location.spec.buckets:
        return f"not to AIStore: USE_AIS_FOR does not name {name}"
    return ""


def _draw(row: _Row, *, first: bool) -> None:
    if first:
        click.echo(click.style(row["store"] or "cannot be resolved", bold=True, fg=None if row["store"] else "red"))
        direct = "as files" if row["kind"] == "local" else "by direct requests"
        facts = {
            "endpoint": row["endpoint"],
            "as": row["identity"],
            "read": row["store"] and (direct if row["direct"] else f"without direct requests: {row['why']}"),
            "rewritten": row["rule"] and f"by {row['rule']}",
            "routed": row["route"],
            "else": row["fallback"] and f"{row['fallback']}, where AIStore cannot be reached (WDS_AIS_FALLBACK)",
        }
        for name, text in facts.items():
            if text:
                terminal.say(f"  {click.style(name.ljust(9), dim=True)} {text}")
    where = row["url"] if row["target"] in ("", row["url"]) else f"{row['url']} → {row['target']}"
    cached = [click.style("in the cache", fg="cyan")] if row["cached"] else []
    terminal.say("  ".join([f"    {where}", *cached, *_result(row)]))


def _result(row: _Row) -> Iterator[str]:
    check = row["check"]
    if row["error"]:
        yield click.style(_short(row["error"], row), fg="red")
    if check is None or (check["error"] and check["error"] == row["error"]):
        return
    if check["ok"] is None:
        yield click.style(f"not checked: {check['why']}", fg="yellow")
    elif not check["ok"]:
        yield click.style(_short(check["error"], row), fg="red")
    else:
        yield click.style("ok", fg="green")
        yield "size unknown" if check["bytes"] is None else shards.human(check["bytes"])
        yield check["looks_like"]
        yield f"first bytes after {1000 * (check['seconds'] or 0):.0f} ms"
    if check["read_from"]:
        yield click.style(f"read from {check['read_from']} instead", fg="yellow")


def _short(error: str, row: _Row) -> str:
    """Return the error without the shard's name, which stands before it."""
    for name in (row["target"], row["url"]):
        if name and error.startswith(name):
            return error.removeprefix(name).removeprefix(" at byte 0").removeprefix(": ")
    return error
