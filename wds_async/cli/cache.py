"""``wds-async cache``: what is in a service's cache, removing it, filling it, comparing it with its checksums.

Where a service has the folder open, it does what changes anything there (`service.control`).
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from wds_async import environment
from wds_async.cli import shards, terminal
from wds_async.cli.warm import through_service
from wds_async.config import transfer_config
from wds_async.errors import ConfigError, TransferError, WdsError
from wds_async.redact import redact
from wds_async.service.cache import upkeep
from wds_async.service.cache.disk import INDEX
from wds_async.service.cache.open_entries import Verified
from wds_async.service.cache.upkeep import Warmed, warm_folder
from wds_async.service.config import ServiceConfig, cache_limit, load_config
from wds_async.service.control import chooser, keys_of, socket_path
from wds_async.storage.http.service_client import service_session

__all__ = ["command"]

_TIMEOUT_S = 600.0

_FOLDER = click.option(
    "--folder", type=click.Path(path_type=Path), default=None,
    help="Folder of the cache. Default: the folder in the file that WDS_SERVE_CONFIG names.",
)  # fmt: skip
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")


@click.group("cache")
def command() -> None:
    """Manage the cache of `wds-async serve`: list, sum up, remove, warm, verify, pin. If a service is running on the
    folder, it does the work.

    Example: wds-async cache du /nvme/wds-cache
    """


@command.command("ls")
@click.argument("prefix", default="")
@_FOLDER
@_JSON
def _ls(*, prefix: str, folder: Path | None, as_json: bool) -> None:
    """List cached objects: bytes cached, size, last use, tenant.

    PREFIX is the beginning of their URLs, or the cache's folder in place of --folder. This also works while a service
    runs on the folder.

    Example: wds-async cache ls s3://bucket/train/ --folder /nvme/wds-cache
    """
    where, prefix = _place(folder, prefix)
    pinned = chooser(upkeep.pins(where))
    for row in upkeep.listed(where, prefix):
        used = datetime.datetime.fromtimestamp(row.used).astimezone().isoformat(" ", "seconds")
        if as_json:
            shown = {"url": redact(row.key), "size": row.size, "held": row.held, "used": used, "tenant": row.tenant}
            terminal.say(json.dumps({**shown, "identity": row.identity, "pinned": pinned(row.key)}))
        else:
            there = "whole" if row.size is not None and row.held >= row.size else f"{_bytes(row.held)} of"
            more = f"{f'  {row.tenant}' if row.tenant else ''}{'  pinned' if pinned(row.key) else ''}"
            terminal.say(f"{there:>14} {_bytes(row.size):>9}  {used}  {redact(row.key)}{more}")


@command.command("du")
@click.argument("prefix", default="")
@click.option(
    "--depth", type=click.IntRange(min=0), default=1, show_default=True, help="Levels of folders below the bucket."
)
@_FOLDER
@_JSON
def _du(*, prefix: str, depth: int, folder: Path | None, as_json: bool) -> None:
    """Sum up the cache by bucket and folder.

    PREFIX is the beginning of URLs, or the cache's folder in place of --folder. This also works while a service runs on
    the folder.

    Example: wds-async cache du --depth 2 /nvme/wds-cache
    """
    sums: dict[str, tuple[int, int]] = {}
    total = (0, 0)
    for row in upkeep.listed(*_place(folder, prefix)):
        # The bucket (or host) of the URL, and so many folders below it.
        kind, separator, rest = redact(row.key).rpartition("://")
        folders = rest.split("/")[:-1] or [rest]
        name = f"{kind}{separator}{'/'.join(folders[: depth + 1])}/"
        count, held = sums.get(name, (0, 0))
        sums[name] = (count + 1, held + row.held)
        total = (total[0] + 1, total[1] + row.held)
    for name, (count, held) in [*sorted(sums.items()), ("total", total)]:
        record = {"prefix": name, "objects": count, "bytes": held}
        terminal.say(json.dumps(record) if as_json else f"{_bytes(held):>11} {count:>9}  {name}")


@command.command("rm")
@click.argument("url", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Remove everything.")
@_FOLDER
def _rm(*, url: tuple[str, ...], everything: bool, folder: Path | None) -> None:
    """Remove objects, including pinned ones.

    Give their URLs, or prefixes that end with "/". This also works while a service runs on the folder.

    Example: wds-async cache rm s3://bucket/old/ --folder /nvme/wds-cache
    """
    if bool(url) == everything:
        raise click.UsageError("name URLs or prefixes, or give --all")
    with _service(where := _existing(folder)) as ask:
        if ask is not None:
            (answer,) = ask("/rm", urls=url, all=everything)
            count, held = answer["objects"], answer["bytes"]
        else:
            gone = upkeep.remove(where, chooser(url, everything=everything))
            count, held = len(gone), sum(row.held for row in gone)
    click.echo(f"{shards.counted(count, 'object')} removed, {_bytes(held)}", err=True)


@command.command("pin")
@click.argument("url", nargs=-1)
@_FOLDER
def _pin(*, url: tuple[str, ...], folder: Path | None) -> None:
    """Keep objects from being evicted.

    Give URLs, or prefixes that end with "/"; they need not be cached yet. Without any, the pins are listed. Pinned
    objects displace others when they are downloaded, and only `cache rm` removes them. This also works while a service
    runs on the folder.

    Example: wds-async cache pin s3://bucket/val/ --folder /nvme/wds-cache
    """
    _change_pins(url, folder, pinned=True)


@command.command("unpin")
@click.argument("url", nargs=-1, required=True)
@_FOLDER
def _unpin(*, url: tuple[str, ...], folder: Path | None) -> None:
    """Let pinned objects be evicted again.

    Give the same names as for `cache pin`. This also works while a service runs on the folder.

    Example: wds-async cache unpin s3://bucket/val/ --folder /nvme/wds-cache
    """
    _change_pins(url, folder, pinned=False)


def _change_pins(urls: tuple[str, ...], folder: Path | None, *, pinned: bool) -> None:
    with _service(where := _existing(folder)) as ask:
        if not urls:
            pins = upkeep.pins(where)
        elif ask is not None:
            (answer,) = ask("/pin", urls=urls, pinned=pinned)
            pins = answer["pins"]
        else:
            pins = upkeep.pin(where, keys_of(urls), pinned=pinned)
    for name in pins:
        terminal.say(redact(name))


@command.command("quota")
@click.argument("share", nargs=-1, metavar="[TENANT=SHARE]...")
@_FOLDER
@_JSON
def _quota(*, share: tuple[str, ...], folder: Path | None, as_json: bool) -> None:
    """Show or change the quotas of a running service.

    Without arguments, shows how much of the cache each tenant holds, and its quota. TENANT=SHARE changes a quota until
    the next start, which uses the setting `quotas` again (0: no quota).

    Example: wds-async cache quota vision=0.5 speech=0.3 --folder /nvme/wds-cache
    """
    try:
        shares = {tenant: float(part) for tenant, _, part in (each.rpartition("=") for each in share)}
    except ValueError:
        raise click.UsageError(f"{' '.join(share)}: write TENANT=SHARE, as vision=0.5") from None
    with _service(where := _existing(folder)) as ask:
        if ask is None:
            raise ConfigError(
                f"{where}: no service runs on this cache; its setting quotas says what a start begins with"
            )
        (answer,) = ask("/quotas", **({"quotas": shares} if shares else {}))
    for tenant in sorted({*answer["quotas"], *answer["held"]}):
        held, most = answer["held"].get(tenant, 0), answer["quotas"].get(tenant)
        quota = "" if most is None else f"{100 * most:.3g}%"
        record = {"tenant": tenant, "bytes": held, "quota": most}
        terminal.say(json.dumps(record) if as_json else f"{_bytes(held):>11} {quota:>5}  {tenant or '(no tenant)'}")


@command.command("warm")
@click.argument("url", nargs=-1, required=True)
@click.option("--service", default="", help="Address of a running service: http://host:51080 or unix:/path.")
@click.option(
    "--token-file",
    type=click.Path(exists=True, path_type=Path),
    help="File whose first line is the service's bearer token.",
)
@click.option("--size", default="80%", show_default=True, help="Size of the cache, if there is no service.")
@click.option(
    "--jobs", type=click.IntRange(min=1), default=8, show_default=True, help="Number of objects to download at a time."
)
@_FOLDER
@_JSON
def _warm(*, url: tuple[str, ...], service: str, token_file: Path | None, size: str, jobs: int, folder: Path | None,
          as_json: bool) -> None:  # fmt: skip
    """Download shards into the cache.

    A running service does it (--service), or without one this command itself, into the cache's folder. The exit status
    is 1 if a shard could not be downloaded.

    Example: wds-async cache warm 's3://bucket/train-{000..099}.tar' --service unix:/run/wds-async.sock
    """
    urls = shards.expand(url)
    failed: list[str] = []

    def report(one: Warmed) -> None:
        if one.error or not one.whole:
            failed.append(one.url)
        if as_json:
            terminal.say(json.dumps({**asdict(one), "url": redact(one.url)}))
        elif one.error:
            click.secho(terminal.line(f"not there: {one.error}"), fg="red", err=True)
        else:
            terminal.say(f"{_bytes(one.there):>11} of {_bytes(one.size)}  {redact(one.url)}")

    if service:
        token = "" if token_file is None else next(iter(token_file.read_text(encoding="utf-8").split()), "")
        through_service(service, token, urls, report, at_once=jobs)
    else:
        where = _folder(folder)
        where.mkdir(parents=True, exist_ok=True)
        limit = cache_limit(ServiceConfig(folder=str(where), cache_size=size))
        asyncio.run(warm_folder(where, limit, urls, transfer_config(), report, at_once=jobs))
    click.echo(f"{len(urls) - len(failed)} of {len(urls)} are there", err=True)
    click.get_current_context().exit(1 if failed else 0)


@command.command("verify")
@click.argument("prefix", default="")
@_FOLDER
@_JSON
def _verify(*, prefix: str, folder: Path | None, as_json: bool) -> None:
    """Compare every chunk with its checksum and drop bad ones.

    A dropped chunk is downloaded again when it is read. The exit status is 1 if something was bad. PREFIX is the
    beginning of URLs, or the cache's folder in place of --folder. This also works while a service runs on the folder.

    Example: wds-async cache verify /nvme/wds-cache
    """
    good = bad = 0
    where, prefix = _place(folder, prefix)
    with _service(_existing(where)) as ask:
        if ask is None:
            results = upkeep.verify(where, prefix)
        else:
            results = (Verified(**answer) for answer in ask("/verify", prefix=prefix))
        for result in results:
            good, bad = good + result.good, bad + result.bad
            if as_json:
                terminal.say(json.dumps({**asdict(result), "key": redact(result.key)}))
            elif result.bad:
                terminal.say(f"{result.bad} bad chunks dropped, {result.good} good: {redact(result.key)}")
    click.echo(f"{good} chunks are good, {bad} were bad", err=True)
    click.get_current_context().exit(1 if bad else 0)


@contextlib.contextmanager
def _service(folder: Path) -> Iterator[Callable[..., Iterator[dict[str, Any]]] | None]:
    """Yield the function that sends a command to the service that runs on the folder (`_answers`), None without one.
    Raise ConfigError where it is another user's."""
    with contextlib.ExitStack() as stack:
        ask = None
        try:
            path = stack.enter_context(socket_path(folder))
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(path)
            ask = functools.partial(_answers, folder, f"unix:{path}")
        except PermissionError as exn:
            words = f"{folder}: the service on this cache runs as another user ({exn}). Run this command as that user"
            raise ConfigError(words) from exn
        except OSError:  # there is none, or its socket was left behind by one that was killed
            pass
        yield ask


def _answers(folder: Path, address: str, path: str, **body: Any) -> Iterator[dict[str, Any]]:
    """Yield each line of the service's answer to a command when it comes. Raise ConfigError for what it refuses,
    TransferError where it does not answer."""

    async def lines() -> AsyncIterator[bytes]:
        async with service_session(address, _TIMEOUT_S) as session, session.post(path, json=body) as answer:
            if answer.status == 400:
                raise ConfigError((await answer.json())["error"])
            if answer.status != 200:
                raise TransferError(f"{folder}: the service answered {answer.status} {answer.reason}")
            async for line in answer.content:
                yield line

    answers = lines()

    async def next_line() -> bytes | None:
        return await anext(answers, None)

    try:
        with asyncio.Runner() as runner:
            while (line := runner.run(next_line())) is not None:
                yield json.loads(line)
    except OSError as exn:
        if isinstance(exn, WdsError):
            raise
        why = f"{type(exn).__name__}: {exn}"
        raise TransferError(f"{folder}: the service that has this cache broke off: {why}") from exn


def _bytes(count: int | None) -> str:
    return "?" if count is None else shards.human(count)


def _folder(folder: Path | None) -> Path:
    if folder is not None:
        return folder
    path = environment.variable("WDS_SERVE_CONFIG")
    configured = load_config(path).folder if path else ""
    if not configured:
        raise ConfigError("which cache? Give --folder, or set WDS_SERVE_CONFIG to the service's configuration")
    return Path(configured)


def _place(folder: Path | None, prefix: str) -> tuple[Path, str]:
    """Return the cache's folder and the prefix of URLs. A prefix is the folder if it is a cache's, or any folder where
    no other is configured."""
    configured = environment.variable("WDS_SERVE_CONFIG")
    if folder is None and prefix and ((Path(prefix) / INDEX).is_file() or (Path(prefix).is_dir() and not configured)):
        return Path(prefix), ""
    return _folder(folder), prefix


def _existing(folder: Path | None) -> Path:
    """Return a folder that is a cache already: removing and verifying create none."""
    where = _folder(folder)
    next(upkeep.listed(where), None)
    return where
