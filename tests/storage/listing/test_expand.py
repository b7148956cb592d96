"""Patterns and folders of whole stores, as a program meets them: blocking, cached, retried, refused."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import wds_async as wds
from tests.servers import Nginx, Origin, make_tar
from tests.servers.aistore import AisDouble
from tests.servers.azurite import Azurite, azure_environment_fixture, azurite_fixture
from tests.servers.fakegcs import FakeGcs, clean_google, fake_gcs
from tests.servers.hub import Hub
from tests.servers.moto import clean_aws, moto
from tests.servers.s3list import S3List
from wds_async import shardlists
from wds_async.errors import AccessDenied, ConfigError, TransferError, UnsafeContent, UrlError
from wds_async.storage.listing.expand import expand_listed, folder_entries, forget_listings, listed_by_folder, matches
from wds_async.storage.options import StorageOptions

__all__ = ["azure_environment_fixture", "azurite_fixture", "clean_aws", "clean_google", "fake_gcs", "moto"]

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("WDS_REWRITE", raising=False)
    monkeypatch.delenv("AIS_ENDPOINT", raising=False)
    monkeypatch.setenv("WDS_RETRIES", "4")
    forget_listings()
    yield
    forget_listings()


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    filesystem = fsspec.filesystem("memory")
    for name in ("x-0.tar", "x-1.tar", "notes.txt", "sub/y.tar"):
        filesystem.pipe_file("/b/" + name, make_tar([("a.txt", name.encode())]))
    yield filesystem
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def s3(clean_aws: pytest.MonkeyPatch) -> Iterator[Callable[..., S3List]]:
    """``s3(keys)`` serves them as the only bucket of all S3."""
    pytest.importorskip("s3fs")
    running: list[S3List] = []
    clean_aws.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    clean_aws.setenv("AWS_SECRET_ACCESS_KEY", "hush-secret")
    clean_aws.setenv("AWS_DEFAULT_REGION", "us-east-1")
    clean_aws.setenv("AWS_MAX_ATTEMPTS", "1")  # the attempts that count here are ours

    def start(keys: list[str], **options: Any) -> S3List:
        server = S3List(keys, **options).__enter__()
        running.append(server)
        clean_aws.setenv("AWS_ENDPOINT_URL", server.endpoint)
        return server

    yield start
    for server in running:
        server.__exit__()


# ---------------------------------------------------------------- what is given


def test_braces_come_first_and_order_is_kept(memory: Any) -> None:
    assert expand_listed("memory://b/{sub/,}[xy]*.tar") == [
        "memory://b/sub/y.tar",
        "memory://b/x-0.tar",
        "memory://b/x-1.tar",
    ]
    assert expand_listed(["s3://b/z.tar", "memory://b/", "a.tar", "memory://b/*1.tar"]) == [
        "s3://b/z.tar",
        "memory://b/x-0.tar",
        "memory://b/x-1.tar",
        "a.tar",
        "memory://b/x-1.tar",
    ]


def test_local_files_are_expanded_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.tar", "b.tar", "s3:x*.tar"):
        (tmp_path / name).touch()
    assert expand_listed("[ab].tar") == ["a.tar", "b.tar"]
    assert expand_listed(tmp_path)[:1] == [str(tmp_path / "a.tar")]
    assert expand_listed("s3:x*.tar") == ["s3:x*.tar"]


def test_samples_of_a_pattern_and_of_a_folder(memory: Any) -> None:
    for urls in ("memory://b/x-*.tar", "memory://b/", ["memory://b/*[01].tar"]):
        dataset = wds.WebDataset(urls, shardshuffle=False)
        assert [sample["txt"] for sample in dataset] == [b"x-0.tar", b"x-1.tar"]
        assert len(dataset.pipeline[0]) == 2
    assert shardlists.SimpleShardList("memory://b/x-*.tar").urls == shardlists.ResampledShards("memory://b/").urls


def test_what_was_found_is_not_expanded_again(memory: Any) -> None:
    memory.pipe_file("/b/{x,y}-0.tar", b"")
    found = shardlists.expand_source("memory://b/{*,x-0}.tar".replace("{*,x-0}", "?x,y?-0"))
    assert found == ["memory://b/{x,y}-0.tar"]
    assert shardlists.SimpleShardList(shardlists.Expanded(found)).urls == found


def test_sizes_and_times(memory: Any, tmp_path: Path) -> None:
    (entry, _) = matches("memory://b/x-*.tar")
    assert entry.size == len(make_tar([("a.txt", b"x-0.tar")]))
    assert entry.modified is not None
    assert abs(entry.modified - time.time()) < 3600 * 24
    (tmp_path / "a.tar").write_bytes(b"12345")
    (local, missing) = matches([str(tmp_path / "*.tar"), str(tmp_path / "none.tar")])
    assert (local.size, missing.size) == (5, None)


# ---------------------------------------------------------------- where it runs


def test_within_a_running_loop_and_without_leaving_a_thread(memory: Any) -> None:
    before = set(threading.enumerate())

    async def notebook() -> list[str]:
        return expand_listed("memory://b/x-*.tar")

    assert len(asyncio.run(notebook())) == 2
    for thread in set(threading.enumerate()) - before:  # one that has given its result may not have returned yet
        thread.join(5)
    assert set(threading.enumerate()) <= before


def test_leaving_a_folder_early_ends_its_thread(memory: Any) -> None:
    entries = folder_entries("memory://b/")
    next(entries)
    assert any(thread.name == "wds-async-listing" for thread in threading.enumerate())
    entries.close()
    assert not any(thread.name == "wds-async-listing" for thread in threading.enumerate())


def test_what_is_below_a_folder(memory: Any, tmp_path: Path) -> None:
    assert {entry.url.removeprefix("memory://b/") for entry in folder_entries("memory://b/")} == {
        "x-0.tar",
        "x-1.tar",
        "notes.txt",
        "sub/",
    }
    below = [entry.url for entry in folder_entries("memory://b/", recursive=True)]
    assert len(below) == 4
    assert below[-1] == "memory://b/sub/y.tar"
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").write_bytes(b"1")
    assert [(e.url, e.size) for e in folder_entries(f"{tmp_path}/")] == [(f"{tmp_path}/d/", None)]


_INTERRUPTED = """
import sys, threading
from wds_async.storage.listing.expand import expand_listed
print("ready", flush=True)
try:
    expand_listed(sys.argv[1])
except KeyboardInterrupt:
    print("interrupted", [t.name for t in threading.enumerate() if not t.daemon], flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no signals")
def test_ctrl_c_while_it_waits(s3: Callable[..., S3List]) -> None:
    asked, release = threading.Event(), threading.Event()
    server = s3(["x.tar"])
    server.stall = lambda: (asked.set(), release.wait(30))
    process = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED, "s3://bucket/*.tar"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert asked.wait(30)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
        assert out == "ready\ninterrupted ['MainThread']\n"
        assert process.returncode == 0
    finally:
        release.set()
        process.kill()
        process.wait()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_lists_for_itself(memory: Any) -> None:
    assert len(expand_listed("memory://b/x-*.tar")) == 2
    pid = os.fork()
    if pid == 0:
        forget_listings()
        os._exit(0 if len(expand_listed("memory://b/x-*.tar")) == 2 else 1)
    assert os.waitpid(pid, 0)[1] == 0


# ---------------------------------------------------------------- S3: pages, memory, faults


def test_pages_of_a_folder(s3: Callable[..., S3List]) -> None:
    server = s3([f"a/x-{i:04}.tar" for i in range(2500)] + ["a/sub/x.tar", "b/y.tar", "a-0.tar"])
    found = expand_listed("s3://bucket/a/x-*.tar")
    assert found == [f"s3://bucket/a/x-{i:04}.tar" for i in range(2500)]
    assert server.listings == ["a/", "+a/", "+a/"]
    assert all(request.startswith("GET /bucket?") for request in server.requests)


def test_a_folder_is_listed_once_a_run(s3: Callable[..., S3List]) -> None:
    server = s3(["a/x.tar", "a/y.tar"])
    for urls in ("s3://bucket/a/x*.tar", "s3://bucket/a/", ["s3://bucket/a/[xy].tar"] * 3):
        wds.WebDataset(urls, shardshuffle=False)
    assert server.listings == ["a/"]
    expand_listed("s3://bucket/a/", StorageOptions({"s3": {"key": "other", "secret": "one"}}))
    assert server.listings == ["a/"] * 2
    forget_listings()
    expand_listed("s3://bucket/a/")
    assert server.listings == ["a/"] * 3


def urls_of(keys: list[str]) -> list[str]:
    return [f"s3://bucket/{key}" for key in keys]


def test_shards_by_name_are_looked_up_by_one_listing_of_their_folder(s3: Callable[..., S3List]) -> None:
    keys = [f"{folder}/x-{n:03d}.tar" for folder in "ab" for n in range(300)]
    server = s3(keys, page=100)
    wanted = urls_of([*keys[:250], *keys[300:310]])
    listed = listed_by_folder(wanted)
    assert list(listed) == wanted[:250], "ten in a folder are as soon asked for one by one"
    assert {(entry.size, entry.version) for entry in listed.values()} == {(1234, 'etag "e"')}
    assert server.listings == ["a/", "+a/", "+a/"]


def test_the_listing_of_a_folder_ends_where_it_no_longer_pays(s3: Callable[..., S3List]) -> None:
    keys = [f"x-{n:05d}.tar" for n in range(20_000)]
    server = s3(keys)
    assert list(listed_by_folder(urls_of([*keys[:16], *keys[-4:]]))) == urls_of(keys[:16])
    assert len(server.listings) <= 7
    assert listed_by_folder(urls_of(keys[-2000:])).keys() == set(urls_of(keys[-2000:]))


def test_what_a_listing_lacks_is_left_out(s3: Callable[..., S3List], tmp_path: Path) -> None:
    keys = [f"x-{n:05d}.tar" for n in range(20)]
    s3(keys).faults.append((403, "AccessDenied"))
    assert listed_by_folder(urls_of(keys)) == {}
    assert list(listed_by_folder(urls_of([*keys, "missing.tar"]))) == urls_of(keys)
    assert listed_by_folder([f"{tmp_path}/none/{key}" for key in keys]) == {}
    assert listed_by_folder([f"pipe:cat {tmp_path}/{key}" for key in keys]) == {}


def test_another_account_sees_its_own_listing(s3: Callable[..., S3List]) -> None:
    s3(["a.tar"])
    assert expand_listed("s3://bucket/*.tar") == ["s3://bucket/a.tar"]
    s3(["b.tar"])
    assert expand_listed("s3://bucket/*.tar") == ["s3://bucket/b.tar"]


def test_leaving_early_lists_no_further_page(s3: Callable[..., S3List]) -> None:
    server = s3([f"{i:05}.tar" for i in range(5000)])
    entries = folder_entries("s3://bucket/")
    assert next(entries).url == "s3://bucket/00000.tar"
    entries.close()
    assert server.listings == [""]


def test_faults_are_tried_again_without_losing_or_doubling(s3: Callable[..., S3List]) -> None:
    server = s3([f"{i:04}.tar" for i in range(2500)])
    server.faults = [(503, "SlowDown")]
    assert len(expand_listed("s3://bucket/*.tar")) == 2500
    server.faults = [(500, "InternalError")]
    taken = []
    for entry in folder_entries("s3://bucket/"):
        taken.append(entry.url)
        if len(taken) == 1500:
            server.faults = [(503, "SlowDown")]
    assert taken == [f"s3://bucket/{i:04}.tar" for i in range(2500)]


def test_without_the_permission_to_list(s3: Callable[..., S3List]) -> None:
    s3(["a.tar"]).faults = [(403, "AccessDenied")] * 50
    with pytest.raises(AccessDenied) as caught:
        wds.WebDataset("s3://bucket/*.tar", shardshuffle=False)
    text = str(caught.value)
    assert text.startswith("s3://bucket/ cannot be listed: ")
    assert "AccessDenied" in text
    assert "name the shards with braces: x-{000..999}.tar" in text
    assert "hush-secret" not in text


def test_a_store_that_stays_broken(s3: Callable[..., S3List]) -> None:
    s3(["a.tar"]).faults = [(500, "InternalError")] * 50
    with pytest.raises(TransferError, match=r"s3://bucket/ cannot be listed: .*after \d attempts"):
        expand_listed("s3://bucket/*.tar")


_MEASURED = """
from pathlib import Path
from wds_async.storage.listing.expand import expand_listed

def kib(name):
    return int(Path("/proc/self/status").read_text().partition(name + ":")[2].split()[0])

expand_listed("s3://bucket/few/*.tar")
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
before = kib("VmRSS")
found = expand_listed("s3://bucket/many/*7.tar")
print(len(found), (kib("VmHWM") - before) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts pages as Linux does")
def test_many_keys_in_bounded_memory(s3: Callable[..., S3List]) -> None:
    server = s3([f"many/train-{i:09}.tar" for i in range(30_000)] + [f"few/{i}.tar" for i in range(1000)])
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED], capture_output=True, text=True, timeout=55, check=True, cwd=ROOT
    )
    found, mib = map(int, done.stdout.split())
    assert found == 3000
    assert len(server.listings) == 31
    assert mib < 18, mib  # 12, and 13 for twice as many


# ---------------------------------------------------------------- HTTP


def test_index_pages(nginx: Callable[..., Nginx], tmp_path: Path) -> None:
    folder = tmp_path / "dir"
    (folder / "sub").mkdir(parents=True)
    for name in ("x-0.tar", "x-1.tar", "x y[1].tar", "notes.txt", "sub/z.tar"):
        (folder / name).write_bytes(make_tar([("a.txt", name.encode())]))
    server = nginx(tmp_path, extra="autoindex on;")
    base = server.url("dir/")
    assert expand_listed(base + "x-*.tar") == [base + "x-0.tar", base + "x-1.tar"]
    assert len(expand_listed(base)) == 3
    dataset = wds.WebDataset(base + "**/*.tar", shardshuffle=False)
    assert sorted(sample["txt"] for sample in dataset) == [b"sub/z.tar", b"x y[1].tar", b"x-0.tar", b"x-1.tar"]
    with pytest.raises(UrlError, match=r"nearest is 'x-[01]\.tar'"):
        expand_listed(base + "z-*.tar")


def test_a_query_is_no_pattern(origin: Origin) -> None:
    url = origin.add("x.tar", b"") + "?sig=[a*b]"
    assert expand_listed(url) == [url]
    assert not origin.requests


# ---------------------------------------------------------------- rewriting, openers, security


def test_names_keep_the_users_spelling(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_REWRITE", "gs://bucket/=memory://b/")
    assert expand_listed("gs://bucket/**/*.tar") == [
        "gs://bucket/sub/y.tar",
        "gs://bucket/x-0.tar",
        "gs://bucket/x-1.tar",
    ]
    dataset = wds.WebDataset("gs://bucket/", shardshuffle=False)
    assert [sample["__url__"] for sample in dataset] == ["gs://bucket/x-0.tar", "gs://bucket/x-1.tar"]
    assert next(folder_entries("gs://bucket/")).url.startswith("gs://bucket/")
    with pytest.raises(UrlError, match=r"'gs://bucket/q-.*in gs://bucket/"):
        expand_listed("gs://bucket/q-*.tar")


def test_rewritten_to_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a b.tar", "c%20d.tar"):
        (tmp_path / name).touch()
    monkeypatch.setenv("WDS_REWRITE", f"s3://bucket/={tmp_path}/")
    assert expand_listed("s3://bucket/*.tar") == ["s3://bucket/a b.tar", "s3://bucket/c%20d.tar"]


def test_a_rule_that_cannot_be_listed_through(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_REWRITE", r"gs://bucket/x-(\d).tar=memory://other/\1.tar;gs://bucket/=memory://b/")
    with pytest.raises(UrlError, match=r"gs://bucket/x-0.tar: WDS_REWRITE leads this name elsewhere"):
        expand_listed("gs://bucket/*.tar")
    monkeypatch.setenv("WDS_REWRITE", "gs://=pipe:gsutil cat gs://")
    with pytest.raises(UrlError, match=r"gs://bucket/: .*not a folder that can be listed"):
        expand_listed("gs://bucket/*.tar")
    assert expand_listed("pipe:cat *.tar") == ["pipe:cat *.tar"]


def test_a_programs_opener_gets_what_was_written(openers: None) -> None:
    wds.gopen_schemes["mine"] = lambda url, mode, bufsize, **kwargs: io.BytesIO(make_tar([("a.txt", url.encode())]))
    assert expand_listed("mine://b/*.tar") == ["mine://b/*.tar"]
    (sample,) = wds.WebDataset("mine://b/*.tar", shardshuffle=False)
    assert sample["txt"] == b"mine://b/*.tar"


def test_secure_mode_lists_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_SECURE", "1")
    with pytest.raises(UnsafeContent, match="cannot open local files"):
        expand_listed(f"local://{tmp_path}/*.tar")
    monkeypatch.setenv("WDS_REWRITE", f"s3://={tmp_path}/")
    with pytest.raises(UnsafeContent, match="WDS_SECURE=1"):
        expand_listed("s3://b/*.tar")


def test_what_a_fetched_specification_may_list(memory: Any, origin: Origin) -> None:
    def shards(text: str) -> list[str]:
        url = origin.add("spec.yaml", f"dataset:\n- shards: '{text}'\n".encode())
        return [url for source in wds.spec.load(url).sources for url in source.urls]

    assert shards("memory://b/x-*.tar") == ["memory://b/x-0.tar", "memory://b/x-1.tar"]
    for text in ("local:///etc/*", "simplecache::file:///etc/*.tar", "/etc/*", "pipe:ls *"):
        with pytest.raises((UnsafeContent, UrlError)):
            shards(text)
    memory.pipe_file("/b/evil/x::pipe:touch owned.tar", b"")
    with pytest.raises(UnsafeContent):
        shards("memory://b/evil/*.tar")


def test_what_is_wrong_is_said_at_once(memory: Any) -> None:
    with pytest.raises(UrlError, match="unknown scheme 'nosuch'"):
        expand_listed("nosuch://b/*.tar")
    with pytest.raises(ConfigError, match="storage_options"):
        shardlists.SimpleShardList("memory://b/*.tar", storage_options=3)  # type: ignore[arg-type]
    with pytest.raises(UrlError, match="an empty list"):
        expand_listed([])


# ---------------------------------------------------------------- the other stores

_NAMES = ("dir/x-0.tar", "dir/x-1.tar", "dir/é [y].tar", "dir/notes.txt", "dir/sub/z.tar", "other/x-9.tar")


def _listed_alike(base: str) -> None:
    def names(pattern: str) -> list[str]:
        return [url.removeprefix(base) for url in expand_listed(base + pattern)]

    assert names("dir/x-*.tar") == ["dir/x-0.tar", "dir/x-1.tar"]
    assert len(names("dir/")) == 3
    assert names("*/x-[0-9].tar") == ["dir/x-0.tar", "dir/x-1.tar", "other/x-9.tar"]
    assert names("dir/**/z*") == ["dir/sub/z.tar"]
    dataset = wds.WebDataset(base + "**/*.tar", shardshuffle=False)
    assert sorted(sample["txt"].decode() for sample in dataset) == sorted(n for n in _NAMES if n.endswith(".tar"))
    with pytest.raises(UrlError, match="among 5 names"):
        expand_listed(base + "dir/none-*.tar")


_ODD_NAMES = ("odd//a.tar", "odd/./b.tar", "odd/x//y/./c.tar", "odd/.hidden/d.tar", "odd/e.tar")


def _odd_names_are_listed(base: str, names: Iterable[str] = _ODD_NAMES) -> None:
    """Keys of object stores may hold "//" and "./": twice, the second time from memory."""
    for _ in range(2):
        found = expand_listed(base + "odd/**/*.tar")
        assert {url.removeprefix(base) for url in found} == {name for name in names if ".hidden" not in name}
    with pytest.raises(UrlError, match="nothing matches"):  # "*" is a name, not none
        expand_listed(base + "odd/*/*.tar")


def _shard(name: str) -> bytes:
    return make_tar([("a.txt", name.encode())])


def test_google(fake_gcs: FakeGcs, clean_google: pytest.MonkeyPatch) -> None:
    clean_google.setenv("STORAGE_EMULATOR_HOST", fake_gcs.base)
    bucket = fake_gcs.bucket("patterns")
    for name in _NAMES:
        fake_gcs.put(bucket, name, _shard(name))
    _listed_alike(f"gs://{bucket}/")
    for name in _ODD_NAMES:
        fake_gcs.put(bucket, name, _shard(name))
    _odd_names_are_listed(f"gs://{bucket}/")


def test_s3_of_moto(moto: str, clean_aws: pytest.MonkeyPatch) -> None:
    boto = pytest.importorskip("botocore.session")
    clean_aws.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    clean_aws.setenv("AWS_SECRET_ACCESS_KEY", "hush-secret")
    clean_aws.setenv("AWS_DEFAULT_REGION", "us-east-1")
    clean_aws.setenv("AWS_ENDPOINT_URL", moto)
    client = boto.get_session().create_client("s3")
    client.create_bucket(Bucket="patterns")
    for name in _NAMES:
        client.put_object(Bucket="patterns", Key=name, Body=_shard(name))
    _listed_alike("s3://patterns/")
    for name in _ODD_NAMES:
        client.put_object(Bucket="patterns", Key=name, Body=_shard(name))
    client.close()
    _odd_names_are_listed("s3://patterns/")


def test_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with Hub(page=2) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        for name in _NAMES:
            hub.add(name, _shard(name))
        _listed_alike("hf://datasets/o/n/")


def test_aistore(monkeypatch: pytest.MonkeyPatch) -> None:
    with AisDouble() as cluster:
        monkeypatch.setenv("AIS_ENDPOINT", cluster.endpoint)
        monkeypatch.setenv("USE_AIS_FOR", "gs")
        for name in _NAMES:
            cluster.put(f"ais/patterns/{name}", _shard(name))
            cluster.put(f"gcp/patterns/{name}", _shard(name))
        _listed_alike("ais://patterns/")
        for name in _ODD_NAMES:
            cluster.put(f"ais/odd/{name}", _shard(name))
        _odd_names_are_listed("ais://odd/")
        _listed_alike("gs://patterns/")
        assert expand_listed("ais://patterns/dir/*0.tar?etl_name=E") == ["ais://patterns/dir/x-0.tar?etl_name=E"]


def test_azure(azurite: Azurite, azure_environment: pytest.MonkeyPatch) -> None:
    azurite.put("patterns", {name: _shard(name) for name in _NAMES})
    azure_environment.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite.connection_string)
    _listed_alike("az://patterns/")
    names = [name for name in _ODD_NAMES if "/./" not in name]  # which Azure's own client cannot write
    azurite.put("patterns", {name: _shard(name) for name in names})
    _odd_names_are_listed("az://patterns/", names)
