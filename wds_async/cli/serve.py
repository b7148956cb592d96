"""``wds-async serve``: the shard cache of a node."""

from __future__ import annotations

import asyncio
import signal
from functools import partial
from typing import Any

import click

from wds_async import environment
from wds_async.errors import ConfigError
from wds_async.service.config import load_config

__all__ = ["command"]


@click.command("serve")
@click.option("--config", "file", help="YAML file with settings (WDS_SERVE_CONFIG). Options override it.")
@click.option("--host", help="Address to listen on [127.0.0.1].")
@click.option("--port", type=click.IntRange(0, 65535), help="Port [51080]; 0 picks a free one.")
@click.option("--socket", help="Path of a Unix socket to listen on as well.")
@click.option("--folder", help="Folder of the cache. Without it, nothing is cached.")
@click.option(
    "--hand-from", help="The same folder through a read-only mount; files for the Unix socket are opened there."
)
@click.option("--cache-size", help="Size of the cache: bytes (500G), or a share of the file system [80%].")
@click.option("--keep-free", help="Space to keep free on the file system: bytes, or a share of it [2%].")
@click.option(
    "--freshness",
    "freshness_s",
    type=float,
    help="Seconds until an object is checked in its store again [300]; inf: never.",
)
@click.option("--allow", multiple=True, help="URL prefix that may be read, such as gs://bucket/. May be repeated.")
@click.option(
    "--bucket", "buckets", multiple=True, help="name=URL: the URL or folder behind ais://name/. May be repeated."
)
@click.option("--tokens", help="File of bearer tokens, one per line, optionally followed by a tenant.")
@click.option("--certificate", help="PEM file of the certificate, to serve HTTPS; needs --key.")
@click.option("--key", help="PEM file of the certificate's key.")
@click.option("--log", type=click.Choice(["human", "json"]), help="Format of the log on standard error [human].")
def command(*, file: str | None, allow: tuple[str, ...], buckets: tuple[str, ...], **options: Any) -> None:
    """Serve shards to every process of this node from one cache: each shard is downloaded once for all.

    Clients of AIStore use AIS_ENDPOINT=http://HOST:51080 (and USE_AIS_FOR=gs:s3), S3 clients use /s3, others
    /gs/BUCKET/OBJECT and /url/ESCAPED-URL. Without --allow, the service listens on this machine only and does not serve
    /url. SIGTERM drains it. SIGHUP reloads the configuration, tokens, certificates and prices.

    Example: wds-async serve --folder /mnt/nvme/shards --allow gs://my-bucket/train/
    """
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nothing is read yet that could be read again
    from wds_async.service.running import run  # noqa: PLC0415 (takes half a second, in which SIGHUP must not end it)

    names = dict(bucket.partition("=")[::2] for bucket in buckets)
    if not all(names) or not all(names.values()):
        raise ConfigError(f"--bucket {' '.join(buckets)}: write name=URL, as imagenet=https://host/imagenet/")
    path = file or environment.value("WDS_SERVE_CONFIG") or None
    load = partial(load_config, path, allow=allow or None, buckets=names or None, **options)
    click.get_current_context().exit(asyncio.run(run(load)))
