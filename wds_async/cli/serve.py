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
@click.option("--config", "file", help="YAML file with any of the settings (WDS_SERVE_CONFIG); options win over it.")
@click.option("--host", help="Address to listen at [127.0.0.1].")
@click.option("--port", type=click.IntRange(0, 65535), help="Port [51080]; 0 takes a free one.")
@click.option("--socket", help="Path of a Unix socket to listen at too.")
@click.option("--folder", help="Where the cache lies; without it nothing is kept.")
@click.option("--hand-from", help="The same folder by a read-only mount; files for the Unix socket are opened there.")
@click.option("--cache-size", help="Bytes (500G), or a share of the folder's file system [80%].")
@click.option("--keep-free", help="What its file system keeps free, whatever uses it: bytes, or a share of it [2%].")
@click.option(
    "--freshness", "freshness_s", type=float, help="Seconds until a store is checked again [300]; inf: never."
)
@click.option("--allow", multiple=True, help="What may be read, as gs://bucket/; as often as need be.")
@click.option("--bucket", "buckets", multiple=True, help="name=URL: what ais://name/ stands for; as often as need be.")
@click.option("--tokens", help="File of bearer tokens, a line each: token, then its tenant's name.")
@click.option("--certificate", help="PEM file: serve HTTPS; with --key.")
@click.option("--key", help="PEM file of the certificate's key.")
@click.option("--log", type=click.Choice(["human", "json"]), help="Form of the log on standard error [human].")
def command(*, file: str | None, allow: tuple[str, ...], buckets: tuple[str, ...], **options: Any) -> None:
    """Serve shards to every process of this node from one cache: each is fetched once for all.

    AIStore's clients read it by AIS_ENDPOINT=http://HOST:51080 (and USE_AIS_FOR=gs:s3), others by /gs/BUCKET/OBJECT,
    /s3 (clients of S3) and /url/ESCAPED-URL. Without --allow it listens at this machine only, and serves no /url.
    SIGTERM drains it. SIGHUP reads the configuration, tokens, certificates and prices again.

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
