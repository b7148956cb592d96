"""``wds-async verify``: the bytes of shards beside their checksums."""

from __future__ import annotations

import json
from collections.abc import Mapping

import click

from wds_async.cli import shards, terminal
from wds_async.distributed.folder import read_objects
from wds_async.errors import ConfigError, ShardNotFound
from wds_async.redact import redact
from wds_async.storage.sink import publish_text
from wds_async.tools import sums

__all__ = ["command"]


@click.command("verify")
@click.argument("urls", nargs=-1, required=True, metavar="SHARDS...")
@click.option("--sums", "sums_url", help="File of checksums.  [default: SHA256SUMS in the folder of each shard]")
@click.option("--write", is_flag=True, help="Write the file of checksums instead of comparing.")
@click.option("--json", "as_json", is_flag=True, help="Print one object for each shard.")
def command(*, urls: tuple[str, ...], sums_url: str | None, write: bool, as_json: bool) -> None:
    """Read every byte of SHARDS and compare their SHA-256 with SHA256SUMS, in the format of sha256sum.

    The status is 1 if a shard differs, cannot be read or is not listed; listed ones that are not among SHARDS are
    counted. Whether a training can read what is in them, wds-async check tells.

    Example: wds-async verify 's3://bucket/train/*.tar' --write

    Example: wds-async verify 's3://bucket/train/*.tar'
    """
    names = shards.expand(urls)
    files = _files(names, sums_url)
    expected = {} if write else {url: _read(url) for url in dict.fromkeys(files.values())}
    found: dict[str, dict[str, str]] = {url: {} for url in files.values()}
    errors = 0
    for one in sums.digests(names):
        where = files[one.url]
        name = _name(one.url, where)
        wanted = expected.get(where, {}).get(name)
        error: Exception | None = one.error
        if error is None and not write:
            error = ConfigError(f"{redact(where)} does not list it") if wanted is None else sums.check(one, wanted)
        found[where][name] = one.sha256
        errors += error is not None
        _show(one, error, as_json)
    if write and not errors:
        for where, digests in found.items():
            publish_text(where, sums.sums_text(digests))
            terminal.say(where, err=as_json)
    others = sum(len(expected[where].keys() - found[where].keys()) for where in expected)
    if others:
        click.echo(f"{shards.counted(others, 'listed shard')} not among these", err=True)
    click.echo(f"{shards.counted(len(names), 'shard')}: {shards.counted(errors, 'error')}", err=True)
    click.get_current_context().exit(1 if errors else 0)


def _files(names: list[str], sums_url: str | None) -> dict[str, str]:
    """Return the URL of the file of checksums of each shard."""
    return {name: sums_url or f"{name.partition('?')[0][: name.rfind('/') + 1]}SHA256SUMS" for name in names}


def _name(url: str, where: str) -> str:
    return url.partition("?")[0].removeprefix(where[: where.rfind("/") + 1])


def _read(where: str) -> Mapping[str, str]:
    try:
        data = next(read_objects([where]))
    except ShardNotFound as exn:
        raise ShardNotFound(
            f"{redact(where)}: there are no checksums; --write makes them, --sums names others"
        ) from exn
    return sums.read_sums(data.decode("utf-8", "surrogateescape"), where)


def _show(one: sums.FileDigest, error: Exception | None, as_json: bool) -> None:
    if as_json:
        row = {"url": redact(one.url), "bytes": one.bytes, "sha256": one.sha256, "error": str(error) if error else None}
        click.echo(json.dumps(row))
    elif error is not None:
        terminal.say(f"{click.style('wrong', fg='red', bold=True)}  {redact(one.url)}: {error}")
