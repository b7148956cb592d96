"""The Hugging Face hub from end to end, against its double: redirects, signed URLs, tokens, revisions, listings."""

from __future__ import annotations

import collections
import importlib.util
import logging
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.servers.hub import Hub, Seen
from tests.servers.shards import make_tar
from tests.storage.locations import location_of, on_backend, page_through
from tests.transfer.reading import KIB, bytes_of, data, outcomes, quick
from wds_async.config import TransferConfig
from wds_async.errors import AccessDenied, ConfigError, ShardNotFound, WdsError
from wds_async.storage.base import Entry
from wds_async.storage.hub.backend import HuggingFaceBackend
from wds_async.storage.options import StorageOptions
from wds_async.transfer.reader import open_shards

TOKEN = "hf_MARKEDSECRETofthetest"
OTHER = "hf_OTHERSECRETofthetest"
PART = 256 * KIB


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the machine's own: no login, no endpoint, no proxy."""
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_OIDC_RESOURCE")
    proxies = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "NO_PROXY", "no_proxy")
    for name in (*names, *proxies, "TRANSFORMERS_OFFLINE", "FSSPEC_HF", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Hub]]:
    """``start(**options)`` runs a hub, which ``HF_ENDPOINT`` names."""
    running: list[Hub] = []

    def begin(**options: Any) -> Hub:
        running.append(Hub(**options).__enter__())
        monkeypatch.setenv("HF_ENDPOINT", running[-1].url)
        return running[-1]

    yield begin
    for hub in running:
        hub.__exit__()


@pytest.fixture
def hub(start: Callable[..., Hub]) -> Hub:
    return start()


def sequential(**overrides: Any) -> TransferConfig:
    """One connection: requests come one after another, so that they can be counted."""
    return quick(connections=1, **overrides)


def content_of(shard: Any) -> bytes:
    return b"".join(bytes(piece) for piece in iter(shard.read, None))


def no_secret(requests: list[Seen]) -> bool:
    return not any(
        "authorization" in seen.headers or TOKEN in seen.target or TOKEN in str(dict(seen.headers)) for seen in requests
    )


def listed(url: str, **options: Any) -> list[Entry]:
    return page_through(HuggingFaceBackend, url, options)


def described(url: str, direct: bool = True, **options: Any) -> Any:
    return on_backend(HuggingFaceBackend, lambda backend: backend.describe(location_of(url)), options, direct=direct)


# -- reading --------------------------------------------------------------------------------------------------


def test_a_user_reads_a_dataset(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.tokens = {TOKEN}
    for number in range(4):
        hub.add(f"x-{number}.tar", make_tar([(f"{number}{k}.txt", f"{number}{k}".encode()) for k in range(3)]))
    hub.repos["datasets", "o/n"].private = True
    hub.repos["datasets", "o/n"].owners = {TOKEN}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    dataset = wds.WebDataset("hf://datasets/o/n@main/x-{0..3}.tar", shardshuffle=False)
    assert [sample["txt"].decode() for sample in dataset] == [f"{n}{k}" for n in range(4) for k in range(3)]
    assert all(seen.headers["authorization"] == f"Bearer {TOKEN}" for seen in hub.seen)
    assert len(hub.cdn_seen) >= 4
    assert no_secret(hub.cdn_seen)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("small", [-1, 1 << 30])
@pytest.mark.parametrize("size", [0, 1, PART + 1, 5 * PART + 3])
def test_the_same_bytes_each_way(start: Callable[..., Hub], size: int, small: int, direct: bool) -> None:
    hub, content = start(small=small), data(size)
    url = hub.add("a folder/ü%20+#?.tar", content)
    assert bytes_of([url], quick(direct=direct)) == [content]
    assert (len(hub.cdn_seen) > 0) == (small < 0)


@pytest.mark.parametrize("direct", [True, False])
def test_the_token_stays_with_the_hub(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, direct: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    hub.tokens = {TOKEN}
    content = data(5 * PART)
    url = hub.add("x.tar", content)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert bytes_of([url], quick(direct=direct)) == [content]
    assert hub.seen
    assert {seen.headers.get("authorization") for seen in hub.seen} == {f"Bearer {TOKEN}"}
    assert hub.cdn_seen
    assert no_secret(hub.cdn_seen)
    assert TOKEN not in caplog.text


def test_the_redirect_is_kept_until_the_cdn_refuses(start: Callable[..., Hub]) -> None:
    hub, content = start(lifetime=4), data(12 * PART)
    url = hub.add("x.tar", content)
    assert bytes_of([url], sequential(first_part_bytes=PART)) == [content]
    served = [seen for seen in hub.cdn_seen if seen.status == 206]
    refused = [seen for seen in hub.cdn_seen if seen.status == 403]
    assert len(served) >= 12
    # Every signed URL was used up, and only then was the hub asked again.
    assert len(hub.resolved()) == len(refused) + 1 == -(-len(served) // 4)
    forever, hub.lifetime = len(hub.resolved()), None
    assert bytes_of([url], sequential()) == [content]
    assert len(hub.resolved()) == forever + 1


def test_many_parts_in_flight_when_the_url_expires(start: Callable[..., Hub]) -> None:
    hub = start(lifetime=3)
    contents = [data(9 * PART + i, i) for i in range(4)]
    urls = [hub.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    assert bytes_of(urls) == contents


def test_expiry_in_the_middle_of_a_shard(hub: Hub) -> None:
    content = data(16 * PART)
    url = hub.add("x.tar", content)
    got = bytearray()
    with open_shards([url], config=sequential(budget_bytes=1 << 20)) as reader:
        for shard in reader:
            while (piece := shard.read()) is not None:
                if not got:
                    hub.expire()
                got += piece
    assert bytes(got) == content
    assert len(hub.resolved()) == 2
    assert [seen.status for seen in hub.cdn_seen].count(403) == 1


def test_a_cdn_that_always_refuses_is_an_error(start: Callable[..., Hub]) -> None:
    hub = start(lifetime=0)
    ((_, error),) = outcomes([hub.add("x.tar", b"x" * 10)])
    assert isinstance(error, AccessDenied)
    assert "Request has expired" in str(error)
    asked = collections.Counter(seen.headers["range"] for seen in hub.resolved())
    assert asked["bytes=0-65535"] == 2  # once more than at first, for each part that was on its way
    assert max(asked.values()) == 2


@pytest.mark.parametrize("folder", ["models", "spaces", "buckets"])
def test_what_else_the_hub_holds(hub: Hub, folder: str) -> None:
    url = hub.add("a/x.tar", b"content", folder=folder)
    assert bytes_of([url]) == [b"content"]
    begin = "" if folder == "models" else f"{folder}/"
    assert url == f"hf://{begin}o/n/a/x.tar"


@pytest.mark.parametrize("written", ["refs/convert/parquet", "refs%2Fconvert%2Fparquet", "my%2Fbranch", "v1.0"])
def test_revisions(hub: Hub, written: str) -> None:
    hub.add("a/x.tar", b"main")
    hub.add("a/x.tar", b"other", revision=urllib.parse.unquote(written))
    assert bytes_of([f"hf://datasets/o/n@{written}/a/x.tar", "hf://datasets/o/n/a/x.tar"]) == [b"other", b"main"]
    assert bytes_of(["hf://datasets/o/n/a/x.tar"]) == [b"main"]


def test_a_dataset_without_an_owner_and_a_renamed_one(hub: Hub) -> None:
    hub.add("x.tar", b"renamed", repo="rajpurkar/squad")
    hub.add("x.tar", b"", repo="squad")
    hub.repos["datasets", "squad"].renamed_to = "rajpurkar/squad"
    assert bytes_of(["hf://datasets/squad@main/x.tar"]) == [b"renamed"]


def test_options(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", OTHER)
    hub.tokens = {TOKEN}
    url = hub.add("x.tar", b"version 2", revision="v2")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")

    def read(**options: Any) -> list[bytes]:
        given = StorageOptions({"hf": {"endpoint": f"{hub.url}/", **options}})
        with open_shards([url], config=sequential(), options=given) as reader:
            return [content_of(shard) for shard in reader]

    assert read(token=TOKEN, revision="v2") == [b"version 2"]
    assert read(token=False, revision="v2") == [b"version 2"]
    sent = list(dict.fromkeys(seen.headers.get("authorization") for seen in hub.seen))
    assert sent == [f"Bearer {TOKEN}", None]
    with pytest.raises(AccessDenied, match="refused the token"):
        read(revision="v2")
    with pytest.raises(ShardNotFound, match="no revision 'main'"):
        read(token=TOKEN)
    with pytest.raises(ConfigError, match="tokn means nothing here; did you mean token"):
        read(tokn=TOKEN)


# -- refusals -------------------------------------------------------------------------------------------------


def error_of(url: str, **config: Any) -> str:
    ((_, error),) = outcomes([url], quick(**config))
    assert isinstance(error, WdsError)
    for secret in (TOKEN, OTHER):
        assert secret not in str(error)
        assert secret not in repr(error)
    return f"{type(error).__name__}: {error}"


def test_limits_are_waited_for(hub: Hub) -> None:
    url = hub.add("x.tar", b"x")
    hub.refusals = [
        (429, {"RateLimit": '"resolvers";r=0;t=0', "RateLimit-Policy": '"fixed window";"resolvers";q=3000;w=300'}),
        (503, {}),
        (502, {}),
    ]
    assert bytes_of([url], quick(retry=patient(5))) == [b"x"]
    hub.refusals = [(429, {"Retry-After": "0"})] * 500
    said = error_of(url)
    assert "TransferError" in said
    assert "set HF_TOKEN for a higher limit" in said


def patient(attempts: int) -> Any:
    return type(quick().retry)(max_attempts=attempts, base_s=0.001, cap_s=0.01)


def test_a_login_that_is_renewed_while_we_read(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    monkeypatch.setenv("HF_TOKEN_PATH", str(file))
    monkeypatch.setattr("wds_async.storage.hub.backend._LOOKED_UP_AGAIN_S", 0.0)
    if importlib.util.find_spec("huggingface_hub"):
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(file))
    hub.tokens = {TOKEN}
    urls = [hub.add(f"{i}.tar", data(1000, i)) for i in range(8)]
    got = []
    with open_shards(urls, config=sequential(), lookahead=1) as reader:
        for shard in reader:
            if not got:
                file.write_text(OTHER)
                hub.tokens = {OTHER}
            got.append(content_of(shard))
    assert got == [data(1000, i) for i in range(8)]
    assert hub.resolved()[-1].headers["authorization"] == f"Bearer {OTHER}"
    assert no_secret(hub.cdn_seen)


# -- looking --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["datasets", "models", "buckets"])
def test_listings(start: Callable[..., Hub], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = start(page=3)
    hub.tokens = {TOKEN}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    names = [f"train/x-{i}.tar" for i in range(8)] + ["train/deep/er/y.tar", "train-2/z.tar", "README.md"]
    for name in names:
        root = hub.add(name, b"x" * len(name), folder=folder).removesuffix(name)
    at_root = [(entry.url.removeprefix(root), entry.size) for entry in listed(root)]
    assert sorted(at_root) == [("README.md", 9), ("train-2/", None), ("train/", None)]
    found = listed(f"{root}train/")
    assert sorted((e.url.removeprefix(f"{root}train/"), e.size) for e in found) == [
        ("deep/", None),
        *((f"x-{i}.tar", 13) for i in range(8)),
    ]
    assert len(hub.seen) >= 4
    assert {seen.headers.get("authorization") for seen in hub.seen} == {f"Bearer {TOKEN}"}
    assert not hub.cdn_seen
    assert (folder == "buckets") == all(entry.modified for entry in found if entry.size)


def test_descriptions(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "hf://datasets/o/n/x.tar"
    found = described(url)
    assert (found.store, found.endpoint, found.identity, found.direct) == (
        "the Hugging Face hub",
        hub.url,
        "anonymous",
        True,
    )
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert described(url).identity == "the token of HF_TOKEN"
    assert described(url, token=OTHER).identity == "the token of storage_options"
    assert described(url, direct=False).why == "WDS_DIRECT=0"
    assert not hub.seen


@pytest.mark.skipif(not importlib.util.find_spec("huggingface_hub"), reason="huggingface_hub is not installed")
def test_the_double_is_understood_by_the_hubs_own_client(hub: Hub) -> None:
    from huggingface_hub import HfFileSystem

    hub.tokens = {TOKEN}
    content = data(1000)
    hub.add("train/x.tar", content)
    hub.add("train/y.tar", content)
    hub.repos["datasets", "o/n"].private = True
    hub.repos["datasets", "o/n"].owners = {TOKEN}
    filesystem = HfFileSystem(endpoint=hub.url, token=TOKEN, skip_instance_cache=True)
    found = filesystem.ls("datasets/o/n/train", detail=True)
    ours = listed("hf://datasets/o/n/train/", token=TOKEN)
    assert [(f"hf://{info['name']}", info["size"]) for info in found] == [(entry.url, entry.size) for entry in ours]
    assert filesystem.cat_file("datasets/o/n/train/x.tar") == content
    with pytest.raises(FileNotFoundError):
        HfFileSystem(endpoint=hub.url, token=False, skip_instance_cache=True).ls("datasets/o/n/train")
