"""Conformance of the stores: each reads, lists, checks and writes as every other one does, whatever its protocol.

What is particular to a store (credentials, generations, errors in its own words) is in its own tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import re
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest

import wds_async as wds
from tests.clouds.ais import no_settings  # noqa: F401 - fixture
from tests.finished import SAMPLES, write_job
from tests.servers import Nginx
from tests.servers import moto as moto_server
from tests.servers.aistore import AisDouble
from tests.servers.azurite import azure_environment_fixture, azurite_fixture  # noqa: F401 - fixtures
from tests.servers.fakegcs import clean_google, fake_gcs  # noqa: F401 - fixtures
from tests.servers.hub import Hub
from tests.servers.shards import make_tar
from tests.transfer.reading import KIB, MIB, bytes_of, data, outcomes, quick
from wds_async import distributed as dist
from wds_async.distributed.attempts import Attempt
from wds_async.distributed.plan import planned
from wds_async.errors import ChecksumMismatch, ObjectChanged, ShardNotFound, TruncatedShard, UrlError, WdsError
from wds_async.storage.ais.backend import explain_answer as explain_ais_answer
from wds_async.storage.azure import errors as azureerrors
from wds_async.storage.base import Answer, Fault, Ranges, Verdict
from wds_async.storage.gcs import errors as gcserrors
from wds_async.storage.gcs.credentials import GoogleIdentity
from wds_async.storage.http.auth import ANONYMOUS
from wds_async.storage.http.errors import explain_status
from wds_async.storage.hub.backend import explain_hub_answer, hub_place
from wds_async.storage.listing.expand import expand_listed, folder_entries, forget_listings
from wds_async.storage.registry import Backends, locate
from wds_async.storage.removal import remove
from wds_async.storage.s3 import errors as s3errors
from wds_async.transfer.reader import open_shards

clean_aws, moto = moto_server.clean_aws, moto_server.moto
pytestmark = [
    pytest.mark.servers,
    pytest.mark.filterwarnings("ignore:Sending a large body"),  # aiohttp, of gcsfs's and our own uploads
]
NAMES = ("with space.tar", "50%25.tar", "a#b?c=d&e.tar", "plus+and~tilde'().tar", "ümlaut/☃.tar", "x@y:z", "k?v=1.tar")


@dataclass
class StoreUnderTest:
    """``folder`` is a URL that ends with "/"; ``put`` writes an object below it by the store's own means, and ``names``
    lists all of them (None: it is only read)."""

    kind: str
    folder: str
    put: Callable[[str, bytes], Any]
    names: Callable[[], list[str]] | None = None
    missing: tuple[str, ...] = ("none.tar",)
    quotes: Callable[[str], str] = str
    """Name of an object as it stands in a URL."""

    def url(self, name: str) -> str:
        return self.folder + self.quotes(name)


def files(kind: str, root: Path, folder: str, quotes: Callable[[str], str] = str) -> StoreUnderTest:
    def put(name: str, body: bytes) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".new").write_bytes(body)
        os.utime(path.with_suffix(".new"), (next(seconds), next(seconds)))  # a web server's ETag is its second and size
        path.with_suffix(".new").rename(path)

    def names() -> list[str]:
        return sorted(str(path.relative_to(root)) for path in root.rglob("[!.]*") if path.is_file())

    root.mkdir()
    seconds = itertools.count(1_700_000_000)
    return StoreUnderTest(kind, folder, put, names, quotes=quotes)


def local(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreUnderTest]:
    yield files("local", tmp_path / "files", f"{tmp_path}/files/")


def http(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreUnderTest]:
    store = files("http", tmp_path / "files", "", urllib.parse.quote)
    with Nginx(tmp_path / "files", extra="autoindex on; dav_methods PUT DELETE; client_max_body_size 0;") as server:
        store.folder = f"{server.base}/"
        yield store


def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreUnderTest]:
    filesystem, root = fsspec.filesystem("memory"), f"/conformance-{os.urandom(4).hex()}"
    filesystem.mkdir(root)

    def names() -> list[str]:
        return sorted(path.removeprefix(f"{root}/") for path in filesystem.find(root))

    yield StoreUnderTest(
        "memory", f"memory:/{root}/", lambda name, body: filesystem.pipe_file(f"{root}/{name}", body), names
    )
    filesystem.rm(root, recursive=True)


def s3(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreUnderTest]:
    client = moto_server.empty_bucket(request.getfixturevalue("moto"), request.getfixturevalue("clean_aws"))

    def names() -> list[str]:
        assert not client.list_multipart_uploads(Bucket="bucket").get("Uploads"), "an upload was left behind"
        return [item["Key"] for item in client.list_objects_v2(Bucket="bucket").get("Contents", [])]

    def put(name: str, body: bytes) -> None:
        client.put_object(Bucket="bucket", Key=name, Body=body)

    yield StoreUnderTest("s3", "s3://bucket/", put, names, ("none.tar", "s3://nobucket/x.tar"))


def gcs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreUnderTest]:
    server, patch = request.getfixturevalue("fake_gcs"), request.getfixturevalue("clean_google")
    patch.setenv("STORAGE_EMULATOR_HOST", server.base)
    bucket = server.bucket(f"conformance-{os.urandom(4).hex()}")
    yield StoreUnderTest(
        "gs",
        f"gs://{bucket}/",
        lambda name, body: server.put(bucket, name, body),
        lambda: server.keys(bucket),
        ("none.tar", "gs://nobucket/x.tar"),
    )


def azure(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreUnderTest]:
    server, patch = request.getfixturevalue("azurite"), request.getfixturevalue("azure_environment")
    patch.setenv("AZURE_STORAGE_CONNECTION_STRING", server.connection_string)
    container = f"conformance-{os.urandom(4).hex()}"
    server.put(container, {})
    yield StoreUnderTest(
        "az",
        f"az://{container}/",
        lambda name, body: server.put(container, {name: body}),
        lambda: server.names(container),
        ("none.tar", "az://nocontainer/x.tar"),
    )


def hub(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreUnderTest]:
    patch = request.getfixturevalue("monkeypatch")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HTTP_PROXY"):
        patch.delenv(name, raising=False)
    with Hub(page=7) as server:
        patch.setenv("HF_ENDPOINT", server.url)
        patch.setenv("HF_HOME", str(tmp_path / "hf"))
        server.add("README.md", b"")
        yield StoreUnderTest("hf", "hf://datasets/o/n/", server.add)


def ais(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreUnderTest]:
    request.getfixturevalue("no_settings")
    with AisDouble(page=7) as double:
        request.getfixturevalue("monkeypatch").setenv("AIS_ENDPOINT", double.endpoint)
        double.put("ais/b/README", b"")

        def names() -> list[str]:
            return sorted(name for name in double._buckets["ais/@#/b"] if name != "README")

        yield StoreUnderTest(
            "ais", "ais://b/", lambda name, body: double.put(f"ais/b/{name}", body), names,
            ("none.tar", "ais://nobucket/x.tar"),
        )  # fmt: skip


@pytest.fixture(params=[local, http, memory, s3, gcs, azure, hub, ais], ids=lambda make: make.__name__)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreUnderTest]:
    forget_listings()
    yield from request.param(request, tmp_path)


@pytest.fixture
def writable(store: StoreUnderTest) -> StoreUnderTest:
    if store.names is None:
        pytest.skip(f"{store.kind} is only read")
    return store


# -- errors -----------------------------------------------------------------------------------------------------------

EXPLAINERS: dict[str, Callable[[Answer], Fault]] = {
    "http": explain_status,
    "s3": lambda answer: s3errors.explain_refusal(s3errors.refusal_of_answer(answer), "me"),
    "gs": lambda answer: gcserrors.explain(answer, GoogleIdentity("me", object()), generation="", renewable=False),
    "az": lambda answer: azureerrors.explain_answer(answer, identity="me", kind="key", renewed=False),
    "hf": lambda answer: explain_hub_answer(answer, hub_place("hf://o/n/x"), "https://hub", ANONYMOUS),
    "ais": lambda answer: explain_ais_answer(answer, "me", "http://proxy"),
}


@pytest.mark.parametrize("explain", EXPLAINERS.values(), ids=EXPLAINERS)
@pytest.mark.parametrize(
    ("statuses", "verdict"),
    [
        ((401, 403), Verdict.DENIED),
        ((404, 410), Verdict.MISSING),
        ((412,), Verdict.CHANGED),
        ((408, 409, 425, 429, 500, 502, 503, 504), Verdict.TRANSIENT),
        ((501, 505), Verdict.FATAL),
    ],
)
def test_a_status_alone(explain: Callable[[Answer], Fault], statuses: tuple[int, ...], verdict: Verdict) -> None:
    for status in statuses:
        fault = explain(Answer(status, {"retry-after": "4"}))
        assert (fault.verdict, fault.throttled) == (verdict, status in (429, 503)), status
        assert fault.retry_after_s == (4 if verdict is Verdict.TRANSIENT else None)
        assert verdict is Verdict.CHANGED or str(status) in fault.reason


# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
def test_objects_of_every_size_and_name(store: StoreUnderTest, direct: bool) -> None:
    sizes = (0, 1, 64 * KIB, 256 * KIB + 1, MIB + 7)
    objects = {f"{size}.tar": data(size) for size in sizes} | {name: data(300 * KIB, n) for n, name in enumerate(NAMES)}
    for name, body in objects.items():
        store.put(name, body)
    assert bytes_of([store.url(name) for name in objects], quick(direct=direct)) == list(objects.values())


@pytest.mark.parametrize("direct", [True, False])
def test_spans_of_objects(store: StoreUnderTest, direct: bool) -> None:
    size = 300 * KIB + 5
    body = data(size)
    store.put("x.tar", body)
    asked: list[tuple[int, int | None]] = [(0, 1), (0, size), (0, None), (1, 2), (5, 200 * KIB), (100 * KIB, None)]
    asked += [(size - 1, None), (size - 1, 9 * MIB), (size, None), (size, size), (7, 7), (9 * MIB, 9 * MIB)]
    with open_shards([store.url("x.tar")], config=quick(direct=direct)) as reader:
        shard = next(reader)
        assert shard.read()
        version = shard.version
    shards = [{"url": store.url("x.tar"), "start": start, "stop": stop, "version": version} for start, stop in asked]
    assert bytes_of(shards, quick(direct=direct)) == [body[start:stop] for start, stop in asked]
    for start, stop in ((size + 1, None), (size, size + 1), (9 * MIB, 10 * MIB)):
        ((got, error),) = outcomes([{"url": store.url("x.tar"), "start": start, "stop": stop}], quick(direct=direct))
        assert (got, type(error)) == (b"", TruncatedShard)
        assert f"it has {size} bytes" in str(error)


@pytest.mark.parametrize("direct", [True, False])
def test_a_shard_that_was_replaced_since_a_state_was_saved(store: StoreUnderTest, direct: bool) -> None:
    url, config = store.url("x.tar"), quick(direct=direct)
    store.put("x.tar", data(1000))
    with open_shards([url], config=config) as reader:
        shard = next(reader)
        assert shard.read()
        version = shard.version
    store.put("x.tar", data(1001))
    ((got, error),) = outcomes([{"url": url, "start": 10, "version": version}], config)
    assert (got, type(error)) == (b"", ObjectChanged)
    assert version in str(error)


def on_backend(url: str, use: Callable[[Any, str], Any], direct: bool = True) -> Any:
    async def run() -> Any:
        backends = Backends(asyncio.to_thread, direct=direct)
        try:
            location = locate(url)
            return await use(backends.of(location), location)
        finally:
            await backends.close()

    return asyncio.run(run())


def test_ranges_of_another_client(store: StoreUnderTest) -> None:
    body = data(1000)
    store.put("x.tar", body)

    async def read(backend: Any, location: Any) -> None:
        access = await backend.access(location)
        if not isinstance(access, Ranges):
            pytest.skip(f"{store.kind} has no other client")
        assert access.size == len(body)
        for start, stop in ((0, 1), (0, 1000), (499, 501), (999, 1000)):
            assert await access.read(start, stop) == body[start:stop]
        with contextlib.suppress(OSError):
            assert await access.read(990, 1010) == body[990:]

    on_backend(store.url("x.tar"), read, direct=False)


@pytest.mark.parametrize("direct", [True, False])
def test_what_is_missing_is_named(store: StoreUnderTest, direct: bool) -> None:
    store.put("there.tar", b"x")
    for name in store.missing:
        url = name if "://" in name else store.url(name)
        ((got, error),) = outcomes([url], quick(direct=direct))
        assert got == b""
        assert isinstance(error, ShardNotFound)
        assert url in str(error)


@pytest.mark.parametrize("direct", [True, False])
def test_an_object_that_is_replaced_is_no_mixture(store: StoreUnderTest, direct: bool) -> None:
    if store.kind in ("local", "hf", "memory"):
        pytest.skip("a file that is open stays as it was; the hub's are read at one revision; memory has no versions")
    store.put("x.tar", data(4 * MIB))
    config = quick(direct=direct, connections=1, budget_bytes=MIB)
    ((got, error),) = outcomes([store.url("x.tar")], config, after=lambda: store.put("x.tar", data(4 * MIB, 1)))
    assert isinstance(error, ObjectChanged)
    assert data(4 * MIB).startswith(got)


def test_the_checksum_of_the_store_is_that_of_the_object(store: StoreUnderTest) -> None:
    body = data(1000)
    store.put("x.tar", body)
    checksum = on_backend(store.url("x.tar"), lambda backend, location: backend.remote_checksum(location))
    if checksum is not None and checksum.algorithm in hashlib.algorithms_available:
        assert checksum.digest == hashlib.new(checksum.algorithm, body).digest()
    assert bytes_of([store.url("x.tar")], quick(verify="always")) == [body]


# -- listing ----------------------------------------------------------------------------------------------------------


def test_a_folder_of_many_pages(store: StoreUnderTest) -> None:
    files = {f"train/x-{n:02d}.tar": bytes(n) for n in range(25)}
    for name, body in {**files, "train/deep/er/y.tar": b"y", "train-2/z.tar": b"z"}.items():
        store.put(name, body)
    entries = {entry.url.removeprefix(store.folder): entry.size for entry in folder_entries(f"{store.folder}train/")}
    sizes = {name: None if store.kind == "http" else len(body) for name, body in files.items()}
    assert entries == {**sizes, "train/deep/": None}
    assert {"train/", "train-2/"} <= {entry.url.removeprefix(store.folder) for entry in folder_entries(store.folder)}
    assert expand_listed(f"{store.folder}train/x-0[1-3].tar") == [f"{store.folder}train/x-0{n}.tar" for n in (1, 2, 3)]
    with pytest.raises(UrlError):
        expand_listed(f"{store.folder}train/none-*.tar")


def test_every_listed_name_can_be_read(store: StoreUnderTest) -> None:
    for n, name in enumerate(NAMES):
        store.put(f"odd/{name.replace('/', '-')}", data(1000, n))
    urls = [entry.url for entry in folder_entries(f"{store.folder}odd/")]
    assert sorted(bytes_of(urls)) == sorted(data(1000, n) for n in range(len(NAMES)))


@pytest.mark.parametrize("direct", [True, False])
def test_shards_are_identified_as_their_reader_pins_them(store: StoreUnderTest, direct: bool) -> None:
    names = [f"train/x-{n:02d}.tar" for n in range(20)]
    for n, name in enumerate(names):
        store.put(name, data(1000 + n, n))
    by_name = planned([store.url(name) for name in names])
    assert [(entry.url, entry.size) for entry in by_name] == [(store.url(n), 1000 + i) for i, n in enumerate(names)]
    assert all(entry.version for entry in by_name)
    assert planned(f"{store.folder}train/x-{{00..19}}.tar") == by_name
    found = planned(f"{store.folder}train/*.tar")
    assert found == by_name
    for entry in (by_name[3], *planned(by_name[3].url)):
        shard, config = {"url": entry.url, "version": entry.version}, quick(direct=direct)
        assert bytes_of([shard], config) == [data(1003, 3)]
    store.put(names[3], data(1003, 99))
    replaced = planned([store.url(name) for name in names])[3]
    assert replaced.version != by_name[3].version
    ((got, error),) = outcomes([{"url": by_name[3].url, "version": by_name[3].version}], quick(direct=direct))
    assert (got, type(error)) == (b"", ObjectChanged)
    for text in (replaced.url, by_name[3].version, replaced.version.partition(",")[0]):
        assert text in str(error)


def test_a_shard_that_is_missing_is_not_identified(store: StoreUnderTest) -> None:
    store.put("x.tar", b"x")
    for names in (["x.tar", "none.tar"], [*(f"none-{n}.tar" for n in range(20)), "x.tar"]):
        with pytest.raises(ShardNotFound, match="none"):
            planned([store.url(name) for name in names])


def test_a_shard_that_is_replaced_after_planning_fails_its_task(store: StoreUnderTest, tmp_path: Path) -> None:
    urls = [store.url("a.tar"), store.url("b.tar")]
    for name in ("a.tar", "b.tar"):
        store.put(name, make_tar([("x.txt", b"first")]))
    function = "tests.distributed.functions:split"
    jobs = [
        dist.map_shards(urls, f"{tmp_path}/map/{{task}}-{{part}}.tar", function),
        dist.index(urls, f"{tmp_path}/index/", kinds=("wds", "json"), inputs_per_task=1),
    ]
    before = planned(urls)
    store.put("b.tar", make_tar([("x.txt", b"other")]))
    now = planned(urls)
    assert (now[0], now[1].size) == (before[0], before[1].size)
    for job in jobs:
        attempt = Attempt(job.work, job.folder)
        assert attempt(job.tasks[0]).record is not None
        result = attempt(job.tasks[1])
        assert result.record is None
        assert result.permanent, "another attempt cannot help"
        for text in ("ObjectChanged", urls[1], before[1].version, now[1].version.partition(",")[0]):
            assert text in result.error


def test_a_job_is_read_by_its_folder(store: StoreUnderTest, tmp_path: Path) -> None:
    write_job(tmp_path / "job", 3)
    paths = {str(path.relative_to(tmp_path / "job")): path for path in (tmp_path / "job").rglob("*") if path.is_file()}
    for name, path in paths.items():
        if not name.endswith(("finished.json", "00001.json")):
            store.put(name, path.read_bytes())
    folder = f"{store.folder}_wds/j"
    for name, tasks in {"": (0, 2), "_wds/j/00001.json": (0, 1, 2), "_wds/j/finished.json": (0, 1, 2)}.items():
        if name:
            store.put(name, paths[name].read_bytes())
        dataset = wds.WebDataset(folder, shardshuffle=False)
        assert len(dataset) == len(tasks) * SAMPLES
        assert [sample["__key__"] for sample in dataset] == [f"{task}-{n}" for task in tasks for n in range(SAMPLES)]
    body = bytearray(paths["x-01.tar"].read_bytes())
    body[700] ^= 1
    store.put("x-01.tar", bytes(body))
    with pytest.raises(ChecksumMismatch, match=re.escape(store.url("x-01.tar"))):
        list(wds.WebDataset(folder, shardshuffle=False))


# -- writing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, 7 * MIB], ids=["whole", "multipart"])
def test_an_object_appears_whole_and_replaces(writable: StoreUnderTest, size: int) -> None:
    assert writable.names is not None
    url = writable.url("new.tar")
    for seed in (0, 1):
        with wds.TarWriter(url) as writer:
            writer.write({"__key__": "a", "bin": data(size, seed)})
            assert writable.names() == (["new.tar"] if seed else [])
        assert [sample["bin"] for sample in wds.WebDataset(url, shardshuffle=False)] == [data(size, seed)]
    assert writable.names() == ["new.tar"]


def test_an_upload_that_is_aborted_leaves_what_was_there(writable: StoreUnderTest) -> None:
    assert writable.names is not None
    writable.put("before.tar", b"as it was")
    for name in ("before.tar", "new.tar"):
        writer = wds.TarWriter(writable.url(name))
        writer.write({"__key__": "a", "bin": data(7 * MIB)})
        writer.__exit__(RuntimeError, RuntimeError(), None)
    assert writable.names() == ["before.tar"]
    assert bytes_of([writable.url("before.tar")]) == [b"as it was"]


def test_a_bucket_that_is_missing_is_named_when_writing(writable: StoreUnderTest) -> None:
    for url in writable.missing[1:]:
        with pytest.raises(WdsError) as caught, wds.TarWriter(url) as writer:
            writer.write({"__key__": "a", "txt": "x"})
        assert url in str(caught.value)


def test_objects_are_removed(writable: StoreUnderTest) -> None:
    assert writable.names is not None
    for name in ("a/x.tar", "a/y.tar", "a/deep/z.tar", "b.tar", "c d#.tar"):
        writable.put(name, b"x")
    remove([writable.url("b.tar"), writable.url("none.tar"), writable.url("c d#.tar")])
    assert sorted(writable.names()) == ["a/deep/z.tar", "a/x.tar", "a/y.tar"]
    remove([f"{writable.folder}a/", f"{writable.folder}none/"])
    assert writable.names() == []
    for url in writable.missing[1:]:
        if writable.kind not in ("gs", "ais"):  # they answer 404 for either
            with pytest.raises(ShardNotFound):
                remove([url])
