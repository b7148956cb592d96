"""``wds-async cache``: what is in a service's cache, removing it, filling it, comparing it with its checksums.

Where a service has the folder open, it does what changes anything there (`service.control`).
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
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
from wds_async.service.cache.open_entries import Verified
from wds_async.service.cache.upkeep import Warmed, warm_folder
from wds_async.service.config import ServiceConfig, cache_limit, load_config
from wds_async.service.control import chooser, keys_of, socket_path
from wds_async.storage.http.service_client import service_session

__all__ = ["command"]

_TIMEOUT_S = 600.0

_FOLDER = click.option(
    "--folder", type=click.Path(path_type=Path), default=None,
    help="The cache's folder; else that of the file that WDS_SERVE_CONFIG names.",
)  # fmt: skip
_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")


@click.group("cache")
def command() -> None:
    """Look after the cache of `wds-async serve`: list it, sum it up, remove from it, fill it, verify it, pin parts.
    If a service runs on the folder, it does the work.

    Example: wds-async cache du --folder /nvme/wds-cache
    """


@command.command("ls")
@click.argument("prefix", default="")
@_FOLDER
@_JSON
def _ls(*, prefix: str, folder: Path | None, as_json: bool) -> None:
    """List the objects whose URL begins with PREFIX: how much is there, of how much, last use, tenant. Also while a
    service runs on the folder.

    Example: wds-async cache ls s3://bucket/train/ --folder /nvme/wds-cache
    """
    where = _folder(folder)
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
@click.option("--depth", type=click.IntRange(min=0), default=1, show_default=True, help="Folders below the bucket.")
@_FOLDER
@_JSON
def _du(*, prefix: str, depth: int, folder: Path | None, as_json: bool) -> None:
    """Sum up what is in the cache, by bucket and folder. Also while a service runs on the folder.

    Example: wds-async cache du --depth 2 --folder /nvme/wds-cache
    """
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row in upkeep.listed(_folder(folder), prefix):
        for name in (_above(row.key, depth), ""):
            sums[name][0] += 1
            sums[name][1] += row.held
    total = sums.pop("", [0, 0])
    for name, (count, held) in sorted(sums.items()):
        _sum(name, count, held, as_json)
    _sum("total", total[0], total[1], as_json)


@command.command("rm")
@click.argument("url", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Remove everything.")
@_FOLDER
def _rm(*, url: tuple[str, ...], everything: bool, folder: Path | None) -> None:
    """Remove objects, pinned ones too: URLs, or prefixes that end with "/". Also while a service runs on the folder.

    Example: wds-async cache rm s3://bucket/old/ --folder /nvme/wds-cache
    """
    if bool(url) == everything:
        raise click.UsageError("name URLs or prefixes, or give --all")
    where = _existing(folder)
    with _service(where) as service:
        if service is not None:
            found = service.ask("/rm", urls=url, all=everything)
            count, held = found["objects"], found["bytes"]
        else:
            gone = upkeep.remove(where, chooser(url, everything=everything))
            count, held = len(gone), sum(row.held for row in gone)
    click.echo(f"{count} objects removed, {_bytes(held)}", err=True)


@command.command("pin")
@click.argument("url", nargs=-1)
@_FOLDER
def _pin(*, url: tuple[str, ...], folder: Path | None) -> None:
    """Never evict objects: URLs, or prefixes that end with "/", also of what is not cached yet. Without any, list what
    is pinned. Pinned objects displace others when they come, and go by `cache rm` only. Also while a service runs.

    Example: wds-async cache pin s3://bucket/val/ --folder /nvme/wds-cache
    """
    _change_pins(url, folder, pinned=True)


@command.command("unpin")
@click.argument("url", nargs=-1, required=True)
@_FOLDER
def _unpin(*, url: tuple[str, ...], folder: Path | None) -> None:
    """Let objects be evicted again: what was given to `cache pin`, as it was given. Also while a service runs.

    Example: wds-async cache unpin s3://bucket/val/ --folder /nvme/wds-cache
    """
    _change_pins(url, folder, pinned=False)


@command.command("quota")
@click.argument("share", nargs=-1, metavar="[TENANT=SHARE]...")
@_FOLDER
@_JSON
def _quota(*, share: tuple[str, ...], folder: Path | None, as_json: bool) -> None:
    """Show what each tenant holds of a running service's cache, and its quota; TENANT=SHARE changes quotas until the
    next start (0: none). The setting `quotas` is what a start begins with.

    Example: wds-async cache quota vision=0.5 speech=0.3 --folder /nvme/wds-cache
    """
    where = _existing(folder)
    with _service(where) as service:
        if service is None:
            raise ConfigError(
                f"{where}: no service runs on this cache; its setting quotas says what a start begins with"
            )
        found = service.ask("/quotas", **({"quotas": _shares(share)} if share else {}))
    for tenant in sorted({*found["quotas"], *found["held"]}):
        held, most = found["held"].get(tenant, 0), found["quotas"].get(tenant)
        if as_json:
            terminal.say(json.dumps({"tenant": tenant, "bytes": held, "quota": most}))
        else:
            terminal.say(
                f"{_bytes(held):>11} {'' if most is None else f'{100 * most:.3g}%':>5}  {tenant or '(no tenant)'}"
            )


@command.command("warm")
@click.argument("url", nargs=-1, required=True)
@click.option("--service", default="", help="A running service: http://host:51080 or unix:/path.")
@click.option("--token-file", type=click.Path(exists=True, path_type=Path), help="Its bearer token, the first line.")
@click.option("--size", default="80%", show_default=True, help="Of the cache, where the folder is filled directly.")
@click.option("--jobs", type=click.IntRange(min=1), default=8, show_default=True, help="Objects at once.")
@_FOLDER
@_JSON
def _warm(*, url: tuple[str, ...], service: str, token_file: Path | None, size: str, jobs: int, folder: Path | None,
          as_json: bool) -> None:  # fmt: skip
    """Fetch shards into the cache: by a running service, or (without --service) straight into its folder.

    The status is 1 where one could not be fetched. Example: wds-async cache warm 's3://bucket/train-{000..099}.tar'
    --service unix:/run/wds-async.sock
    """
    urls = shards.expand(url)
    failed: list[str] = []

    def told(one: Warmed) -> None:
        if one.error or not one.whole:
            failed.append(one.url)
        _show_warmed(one, as_json)

    if service:
        through_service(service, _token(token_file), urls, told, at_once=jobs)
    else:
        where = _folder(folder)
        where.mkdir(parents=True, exist_ok=True)
        limit = cache_limit(ServiceConfig(folder=str(where), cache_size=size))
        asyncio.run(warm_folder(where, limit, urls, transfer_config(), told, at_once=jobs))
    click.echo(f"{len(urls) - len(failed)} of {len(urls)} are there", err=True)
    click.get_current_context().exit(1 if failed else 0)


@command.command("verify")
@click.argument("prefix", default="")
@_FOLDER
@_JSON
def _verify(*, prefix: str, folder: Path | None, as_json: bool) -> None:
    """Compare every chunk with its checksum, and drop what is bad; it is fetched again when it is read. Also while a
    service runs on the folder. The status is 1 where something was bad.

    Example: wds-async cache verify --folder /nvme/wds-cache
    """
    good = bad = 0
    where = _existing(folder)
    with _service(where) as service:
        compared = upkeep.verify(where, prefix) if service is None else service.verified(prefix)
        for found in compared:
            good, bad = good + found.good, bad + found.bad
            if as_json:
                terminal.say(json.dumps({**asdict(found), "key": redact(found.key)}))
            elif found.bad:
                terminal.say(f"{found.bad} bad chunks dropped, {found.good} good: {redact(found.key)}")
    click.echo(f"{good} chunks are good, {bad} were bad", err=True)
    click.get_current_context().exit(1 if bad else 0)


class _Service:
    """The service that has a cache's ``folder`` open, by its control socket at ``address``."""

    def __init__(self, folder: Path, address: str) -> None:
        self._folder, self._address = folder, address

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """Return its answer. Raise ConfigError for what it refuses, TransferError where it does not answer."""
        with asyncio.Runner() as runner:
            answer: dict[str, Any] = json.loads(runner.run(self._all(path, body)))
            return answer

    def verified(self, prefix: str) -> Iterator[Verified]:
        """Yield each comparison when the service has made it. Errors as of `ask`."""
        lines = self._lines("/verify", {"prefix": prefix})

        async def following() -> bytes | None:
            return await anext(lines, None)

        with asyncio.Runner() as runner:
            while (line := runner.run(following())) is not None:
                yield Verified(**json.loads(line))

    async def _all(self, path: str, body: dict[str, Any]) -> bytes:
        return b"".join([line async for line in self._lines(path, body)])

    async def _lines(self, path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        try:
            async with (
                service_session(self._address, _TIMEOUT_S) as session,
                session.post(path, json=body) as answer,
            ):
                if answer.status == 400:
                    raise ConfigError((await answer.json())["error"])
                if answer.status != 200:
                    raise TransferError(f"{self._folder}: the service answered {answer.status} {answer.reason}")
                async for line in answer.content:
                    yield line
        except OSError as exn:
            if isinstance(exn, WdsError):
                raise
            why = f"{type(exn).__name__}: {exn}"
            raise TransferError(f"{self._folder}: the service that has this cache broke off: {why}") from exn


@contextlib.contextmanager
def _service(folder: Path) -> Iterator[_Service | None]:
    """Yield the service that runs on the folder, None without one. Raise ConfigError where it is another user's."""
    with contextlib.ExitStack() as stack:
        service: _Service | None = None
        try:
            path = stack.enter_context(socket_path(folder))
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(path)
            service = _Service(folder, f"unix:{path}")
        except PermissionError as exn:
            words = f"{folder}: the service on this cache runs as another user ({exn}). Run this command as that user"
            raise ConfigError(words) from exn
        except OSError:  # there is none, or its socket was left behind by one that was killed
            pass
        yield service


def _change_pins(urls: tuple[str, ...], folder: Path | None, *, pinned: bool) -> None:
    where = _existing(folder)
    if not urls:
        pins = upkeep.pins(where)
    else:
        with _service(where) as service:
            if service is not None:
                pins = service.ask("/pin", urls=urls, pinned=pinned)["pins"]
            else:
                pins = upkeep.pin(where, keys_of(urls), pinned=pinned)
    for name in pins:
        terminal.say(redact(name))


def _shares(given: tuple[str, ...]) -> dict[str, float]:
    try:
        return {tenant: float(share) for tenant, _, share in (one.rpartition("=") for one in given)}
    except ValueError:
        raise click.UsageError(f"{' '.join(given)}: write TENANT=SHARE, as vision=0.5") from None


def _bytes(count: int | None) -> str:
    return "?" if count is None else shards.human(count)


def _folder(given: Path | None) -> Path:
    if given is not None:
        return given
    path = environment.variable("WDS_SERVE_CONFIG")
    folder = load_config(path).folder if path else ""
    if not folder:
        raise ConfigError("which cache? Give --folder, or set WDS_SERVE_CONFIG to the service's configuration")
    return Path(folder)


def _existing(given: Path | None) -> Path:
    """A folder that is one already: nothing is made by removing and verifying."""
    folder = _folder(given)
    next(upkeep.listed(folder), None)
    return folder


def _token(path: Path | None) -> str:
    return "" if path is None else (path.read_text(encoding="utf-8").split() or [""])[0]


def _above(key: str, depth: int) -> str:
    """The bucket (or host) of a URL, and ``depth`` folders below it."""
    kind, separator, rest = redact(key).partition("://")
    if not separator:
        kind, rest = "", key
    parts = rest.split("/")
    kept = parts[: min(depth + 1, max(1, len(parts) - 1))]
    return f"{kind}{separator}{'/'.join(kept)}/"


def _sum(name: str, count: int, held: int, as_json: bool) -> None:
    shown: dict[str, Any] = {"prefix": name, "objects": count, "bytes": held}
    terminal.say(json.dumps(shown) if as_json else f"{_bytes(held):>11} {count:>9}  {name}")


def _show_warmed(one: Warmed, as_json: bool) -> None:
    if as_json:
        terminal.say(json.dumps({**asdict(one), "url": redact(one.url)}))
    elif one.error:
        click.secho(terminal.line(f"not there: {one.error}"), fg="red", err=True)
    else:
        terminal.say(f"{_bytes(one.there):>11} of {_bytes(one.size)}  {redact(one.url)}")
