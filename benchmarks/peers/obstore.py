"""obstore: whole shards, some ahead in threads, and the standard library's tarfile."""

# ruff: noqa: PLC0415  (a peer's process imports only what that peer needs)

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from benchmarks.peer import Job, Peer, Run
from benchmarks.tarsamples import ahead, in_workers, untarred

__all__ = ["PEER"]


def _settings(scheme: str) -> dict[str, Any]:
    """Return what leads a client to the scenario's server; that for S3 reads the environment by itself."""
    options: dict[str, Any] = {"client_options": {"allow_http": True}}
    if scheme == "gs":
        account = {"client_email": "", "private_key": "", "private_key_id": "", "disable_oauth": True}
        account["gcs_base_url"] = os.environ["STORAGE_EMULATOR_HOST"]
        options["config"] = {"service_account_key": json.dumps(account)}
    if scheme == "az":
        parts = dict(part.split("=", 1) for part in os.environ["AZURE_STORAGE_CONNECTION_STRING"].split(";"))
        options["account_name"], options["account_key"] = parts["AccountName"], parts["AccountKey"]
        options["endpoint"] = parts["BlobEndpoint"]
    return options


def _samples(urls: Sequence[str]) -> Iterator[dict[str, bytes]]:
    from obstore.store import from_url

    first = urlsplit(urls[0])
    store = from_url(f"{first.scheme}://{first.netloc}", **_settings(first.scheme))

    def fetch(url: str) -> bytes:
        return bytes(store.get(urlsplit(url).path.lstrip("/")).bytes())

    for shard in ahead(fetch, urls):
        yield from untarred(shard)


def samples(job: Job) -> Run:
    """Undecoded samples, in one process."""
    import obstore.store  # noqa: F401

    return lambda: job.count(_samples(job.urls))


def loader(job: Job, *, images: bool = False) -> Run:
    """Batches from DataLoader workers, of undecoded samples or of pictures."""
    return in_workers(job, _samples, images=images)


PEER = Peer(
    "obstore 0.12 (Rust): whole shards, four ahead, and Python's tarfile",
    tasks={"samples": samples, "loader": loader, "images": functools.partial(loader, images=True)},
    requirements=("obstore==0.12.1",),
    cannot={"file": "is for stores"},
    schemes=("http", "https", "s3", "gs", "az"),
)
