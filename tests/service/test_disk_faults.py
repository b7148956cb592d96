"""Cached files that come back short or not at all, while clients read them: the clients get every byte all the same."""

from __future__ import annotations

import base64
import hashlib
import os
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin, Tls
from tests.servers.shards import make_tar
from tests.service.serving import Inside, ask
from tests.transfer.reading import MIB, data, quick
from wds_async.transfer.reader import open_shards

BODY = data(5 * MIB + 123)
SETTINGS = {"folder": "cache", "socket": "s"}


def cached(folder: Path) -> Path:
    """The file of the only object."""
    (path,) = (path for path in (folder / "cache" / "data").rglob("*") if path.is_file())
    return path


def truncated(service: Inside, folder: Path) -> None:
    service.stored()
    os.truncate(cached(folder), 3 * MIB + 5)


def unreadable(service: Inside, folder: Path) -> None:
    """Every read and write of the open file fails with EIO: /proc/self/mem has nothing at these addresses."""

    service.stored()

    async def spoil() -> None:
        (entry,) = service.context.cache.fetching.entries.values()
        memory = os.open("/proc/self/mem", os.O_RDWR)
        os.dup2(memory, entry.file.fd, inheritable=False)
        os.close(memory)

    service.call(spoil())


def figures(service: Inside) -> Any:
    return service.context.cache.statistics()


@pytest.mark.parametrize("spoil", [truncated, unreadable])
@pytest.mark.parametrize("span", ["", "bytes=100-5000000"])
def test_a_client_gets_every_byte_and_the_copy_heals(
    serve: Callable[..., Inside],
    origin: Origin,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Inside, Path], None],
    span: str,
) -> None:
    monkeypatch.setattr("wds_async.service.cache.writeback._PAUSE_S", 0.0)
    origin.add("/d/x.tar", BODY)
    service = serve()
    url = f"{service.base}/ais/b/x.tar"
    assert ask(url)[2] == BODY
    spoil(service, tmp_path)
    asked = {"Range": span} if span else {}
    expected = BODY[100:5_000_001] if span else BODY
    assert ask(url, **asked)[2] == expected
    assert figures(service).distrusted >= 1
    assert figures(service).bad_chunks >= 1
    assert ask(url)[2] == BODY
    service.stored()
    origin.forget()
    assert ask(url)[2] == BODY
    assert origin.requests == []  # it lies on the disk again
    page = ask(f"{service.base}/metrics")[2].decode()
    assert "wds_cache_distrusted_total" in page


def test_what_is_copied_for_tls_too(serve: Callable[..., Inside], origin: Origin, tmp_path: Path, tls: Tls) -> None:
    origin.add("/d/x.tar", BODY)
    service = serve(certificate=str(tls.cert), key=str(tls.key))
    context = tls.client_context()
    url = f"https://localhost:{service.port}/ais/b/x.tar"

    def get() -> bytes:
        with urllib.request.urlopen(url, context=context, timeout=30) as answer:
            return bytes(answer.read())

    assert get() == BODY
    truncated(service, tmp_path)
    assert get() == BODY
    assert figures(service).bad_chunks == 2


def test_members_of_an_archive(serve: Callable[..., Inside], origin: Origin, tmp_path: Path) -> None:
    origin.add("/d/x.tar", make_tar([(f"{number}.bin", BODY[: MIB + number]) for number in range(6)]))
    service = serve()
    assert len(ask(f"{service.base}/ais/b/x.tar")[2]) > 6 * MIB
    truncated(service, tmp_path)
    status, _, body = ask(f"{service.base}/v1/objects/b/x.tar?provider=ais&archpath=5.bin")
    assert (status, body == BODY[: MIB + 5]) == (200, True)


@pytest.mark.parametrize("wrong", ["short", "flipped"])
def test_a_loader_reports_a_file_that_it_was_handed(
    serve: Callable[..., Inside], origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.delenv("WDS_REWRITE", raising=False)
    origin.add("/d/x.tar", BODY)
    digest = base64.b64encode(hashlib.sha256(BODY).digest()).decode()
    origin.behave(headers={"Repr-Digest": f"sha-256=:{digest}:"})
    service = serve()
    monkeypatch.setenv("AIS_ENDPOINT", f"unix:{service.config.socket}")
    config = quick(verify="always")
    assert read(config) == BODY
    service.stored()
    assert read(config) == BODY
    assert b"handed" in ask(f"{service.base}/metrics")[2]
    if wrong == "short":
        truncated(service, tmp_path)
    else:
        with cached(tmp_path).open("r+b") as file:
            file.seek(3 * MIB)
            file.write(b"?" * 100)
    assert read(config) == BODY
    assert figures(service).distrusted == 1
    assert figures(service).bad_chunks == (2 if wrong == "short" else 1)
    service.stored()
    before = handed(service)
    assert read(config) == BODY
    assert handed(service) == before + 1


def handed(service: Inside) -> int:
    return sum(one.count for (api, _), one in service.context.meters._answers.items() if api == "handed")


def read(config: Any) -> bytes:
    with open_shards(["ais://b/x.tar"], config=config) as shards:
        return b"".join(bytes(piece) for shard in shards for piece in iter(shard.read, None))
