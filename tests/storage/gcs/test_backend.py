"""The backend of Google Cloud Storage: its requests, its listings, what it says of itself and what answers mean."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from tests.servers.fakegcs import FakeGcs, clean_google, fake_gcs
from tests.servers.gcemetadata import EMAIL, GceMetadata, gce_metadata
from tests.servers.gcsauth import GcsAuth
from tests.storage.locations import location_of, on_backend
from tests.transfer.reading import bytes_of
from wds_async.errors import MissingExtra, UrlError
from wds_async.storage.base import Answer, Entry, Request
from wds_async.storage.filesystems import filesystem_of
from wds_async.storage.gcs.backend import GcsBackend
from wds_async.transfer.connection import request_bytes

__all__ = ["clean_google", "fake_gcs", "gce_metadata"]

T = TypeVar("T")
Clean = pytest.MonkeyPatch


def run(use: Callable[[GcsBackend], Coroutine[Any, Any, T]], options: Any = None, *, direct: bool = True) -> T:
    result: T = on_backend(GcsBackend, use, options, direct=direct)
    return result


def request_of(url: str, **options: Any) -> Request:
    found = run(lambda backend: backend.access(location_of(url)), options)
    assert isinstance(found, Request)
    return found


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("gs://bkt/a/b.tar", "/download/storage/v1/b/bkt/o/a%2Fb.tar?alt=media"),
        ("gcs://bkt/a b#c?d%2F.tar", "/download/storage/v1/b/bkt/o/a%20b%23c%3Fd%252F.tar?alt=media"),
        ("gs://bkt//ä", "/download/storage/v1/b/bkt/o/%2F%C3%A4?alt=media"),
        ("gs://bkt/x.tar#123", "/download/storage/v1/b/bkt/o/x.tar?alt=media&generation=123"),
        ("gs://bkt/x.tar?generation=123", "/download/storage/v1/b/bkt/o/x.tar?alt=media&generation=123"),
        ("gs://bkt/x#y.tar", "/download/storage/v1/b/bkt/o/x%23y.tar?alt=media"),
    ],
)
def test_the_request(clean_google: Clean, url: str, expected: str) -> None:
    request = request_of(url, token="anon")
    assert request.url == "https://storage.googleapis.com" + expected
    assert request_bytes(request.url, ()).startswith(f"GET {expected} HTTP/1.1\r\n".encode())
    assert not any(name == "Authorization" for name, _ in request.headers)


def test_generations_can_be_turned_off(clean_google: Clean) -> None:
    request = request_of("gs://bkt/x.tar#123", token="anon", version_aware=False)
    assert request.url.endswith("/o/x.tar%23123?alt=media")


def test_endpoints(clean_google: Clean) -> None:
    assert request_of("gs://bkt/x", token="anon", endpoint_url="http://h:1/").url.startswith("http://h:1/download/")
    clean_google.setenv("GOOGLE_CLOUD_UNIVERSE_DOMAIN", "apis.example")
    assert request_of("gs://bkt/x", token="anon").url.startswith("https://storage.apis.example/")
    for value in ("h:2", "http://h:2", "http://h:2/"):
        clean_google.setenv("STORAGE_EMULATOR_HOST", value)
        assert request_of("gs://bkt/x").url.startswith("http://h:2/download/")


def test_the_token_is_sent_and_hidden(clean_google: Clean) -> None:
    request = request_of("gs://bkt/x", token="ya29.marked-secret")
    sent = {name.lower(): value for name, value in request.headers}
    assert sent["authorization"] == "Bearer ya29.marked-secret"
    assert "marked" not in repr(request)


def test_a_bucket_is_no_object(clean_google: Clean) -> None:
    with pytest.raises(IsADirectoryError, match="bkt"):
        request_of("gs://bkt/", token="anon")


def test_without_the_extra(clean_google: Clean) -> None:
    """What is public needs no package of Google's."""
    clean_google.setitem(sys.modules, "google.oauth2.credentials", None)
    assert request_of("gs://bkt/x", token="anon").url
    with pytest.raises(MissingExtra, match=r"wds-async\[gcs\]"):
        request_of("gs://bkt/x", token="ya29.x")


def test_why_not_direct(clean_google: Clean) -> None:
    async def why(backend: GcsBackend) -> tuple[bool, str]:
        found = await backend.describe(location_of("gs://bkt/x"))
        return found.direct, found.why

    assert run(why, {"token": "anon"}) == (True, "")
    assert run(why, {"token": "anon"}, direct=False) == (False, "WDS_DIRECT=0")
    assert run(why, {"token": "anon", "session_kwargs": {"trust_env": False}})[0] is False
    clean_google.setenv("GOOGLE_API_USE_CLIENT_CERTIFICATE", "true")
    assert "certificates" in run(why, {"token": "anon"})[1]
    clean_google.delenv("GOOGLE_API_USE_CLIENT_CERTIFICATE")
    clean_google.setenv("https_proxy", "http://proxy:3128")
    assert run(why, {"token": "anon"}) == (False, "a proxy is in the way")


def test_describe(gce_metadata: GceMetadata) -> None:
    async def told(backend: GcsBackend) -> list[str]:
        before = await backend.describe(location_of("gs://bkt/x"))
        await backend.access(location_of("gs://bkt/x"))
        after = await backend.describe(location_of("gs://bkt/x"))
        return [before.store, before.endpoint, before.identity, after.identity]

    assert run(told) == [
        "Google Cloud Storage",
        "https://storage.googleapis.com",
        "metadata server",
        f"metadata server, service account {EMAIL}",
    ]


async def entries_of(backend: GcsBackend, url: str) -> list[Entry]:
    return [entry async for entry in backend.entries(location_of(url))]


def test_entries(fake_gcs: FakeGcs, clean_google: Clean) -> None:
    clean_google.setenv("STORAGE_EMULATOR_HOST", fake_gcs.base)
    bucket = fake_gcs.bucket("listed")
    for key in ("d/", "d/b.tar", "d/a.tar", "d/sub/x", "d/sub/y", "d/z ü#1", "other"):
        fake_gcs.put(bucket, key, key.encode())
    found = run(lambda backend: entries_of(backend, "gs://listed/d/"))
    assert [(entry.url, entry.size) for entry in found] == [
        ("gs://listed/d/a.tar", 7),
        ("gs://listed/d/b.tar", 7),
        ("gs://listed/d/sub/", None),
        ("gs://listed/d/z ü#1", 8),
    ]
    assert found[0].modified is not None
    top = run(lambda backend: entries_of(backend, "gcs://listed/"))
    assert [entry.url for entry in top] == ["gcs://listed/d/", "gcs://listed/other"]
    assert run(lambda backend: entries_of(backend, "gs://listed/none/")) == []
    by_gcsfs = {"session_kwargs": {"trust_env": True}}
    sub = run(lambda backend: entries_of(backend, "gs://listed/d/sub/"), by_gcsfs)
    assert [entry.url for entry in sub] == ["gs://listed/d/sub/x", "gs://listed/d/sub/y"]
    direct = run(lambda backend: entries_of(backend, "gs://listed/d/sub/"))
    assert sub == [replace(entry, version="") for entry in direct]


def test_pages(fake_gcs: FakeGcs, gce_metadata: GceMetadata) -> None:
    """A page at a time, by the token of the one before; a page that is refused or fails is asked for again."""
    bucket = fake_gcs.bucket("paged")
    for number in range(7):
        fake_gcs.put(bucket, f"{number}", b"")
    with GcsAuth(fake_gcs.base, gce_metadata.good) as store:
        troubles: dict[int, Callable[[], Any]] = {
            2: gce_metadata.expire,
            4: lambda: store.refusal(503, "backendError", "Backend Error"),
        }
        store.before = lambda path, headers: troubles.pop(len(store.seen), lambda: None)()
        store.page = 2

        async def first_only(backend: GcsBackend) -> str:
            iterator = backend.entries(location_of("gs://paged/"))
            first = await anext(iterator)
            await iterator.aclose()  # type: ignore[attr-defined]
            return first.url

        assert run(first_only, {"endpoint_url": store.base}) == "gs://paged/0"
        assert len(store.seen) == 1
        found = run(lambda backend: entries_of(backend, "gs://paged/"), {"endpoint_url": store.base})
    assert [entry.url for entry in found] == [f"gs://paged/{number}" for number in range(7)]
    assert troubles == {}
    assert len(store.seen) == 1 + 4 + 2


def test_buckets(fake_gcs: FakeGcs, clean_google: Clean) -> None:
    clean_google.setenv("STORAGE_EMULATOR_HOST", fake_gcs.base)
    fake_gcs.bucket("some-bucket")
    with pytest.raises(UrlError, match="GOOGLE_CLOUD_PROJECT"):
        run(lambda backend: entries_of(backend, "gs://"))
    for options in ({"project": "p"}, {}):
        clean_google.setenv("GOOGLE_CLOUD_PROJECT", "p")
        found = run(lambda backend: entries_of(backend, "gs://"), options)
        assert Entry("gs://some-bucket/", None) in found


def test_expired_once_more(gce_metadata: GceMetadata) -> None:
    """A 401 makes the next `access` ask for another token, and only a 401 does."""

    async def tokens(backend: GcsBackend) -> list[int]:
        counts = []
        for status in (0, 403, 401, 0):
            if status:
                backend.classify(Answer(status, {}, b"Invalid Credentials"), location_of("gs://bkt/x"))
            await backend.access(location_of("gs://bkt/x"))
            counts.append(gce_metadata.token_requests)
        return counts

    assert run(tokens) == [1, 1, 2, 2]


HANGS = """
import sys, threading
sys.modules_before = set(sys.modules)
import wds_async.storage.filesystems as f
filesystem, path = f.filesystem_of("gs://bkt/x", {"token": "anon"})
print(type(filesystem).__module__, type(filesystem).__name__)
"""


def test_nothing_asks_for_the_storage_layout(fake_gcs: FakeGcs, clean_google: Clean) -> None:
    """gcsfs's default class would ask by gRPC, and wait for a minute: it is neither made, nor asks the class we use."""
    clean_google.setenv("STORAGE_EMULATOR_HOST", fake_gcs.base)
    done = subprocess.run([sys.executable, "-c", HANGS], check=True, capture_output=True, text=True, timeout=50)
    assert done.stdout.split() == ["gcsfs.core", "GCSFileSystem"]
    from gcsfs.extended_gcsfs import ExtendedGcsFileSystem

    filesystem, _ = filesystem_of("gs://bkt/x", {"token": "anon"})
    assert not isinstance(filesystem, ExtendedGcsFileSystem)


def test_the_loop_is_not_blocked(gce_metadata: GceMetadata) -> None:
    """Credentials are found and refreshed on another thread than the loop's."""
    threads: list[str] = []

    async def call(function: Callable[..., Any], *args: Any) -> Any:
        def on_thread() -> Any:
            threads.append(threading.current_thread().name)
            return function(*args)

        return await asyncio.to_thread(on_thread)

    async def main() -> None:
        backend = GcsBackend(call)
        await backend.access(location_of("gs://bkt/x"))
        await backend.close()

    asyncio.run(main())
    assert len(threads) == 2
    assert threading.current_thread().name not in threads


def test_chains_do_not_ask_for_it_either(fake_gcs: FakeGcs, clean_google: Clean) -> None:
    clean_google.setenv("STORAGE_EMULATOR_HOST", fake_gcs.base)
    fake_gcs.put(fake_gcs.bucket("chained"), "x.tar", b"content")
    assert bytes_of(["simplecache::gs://chained/x.tar"]) == [b"content"]
