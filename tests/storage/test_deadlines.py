"""Clients that never answer are left after a while, also those that ignore their cancellation."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem, get_loop
from fsspec.implementations.memory import MemoryFileSystem

from tests.servers import Origin
from tests.servers.azurite import azure_environment_fixture
from tests.servers.behaviour import BEFORE_HEAD
from tests.servers.moto import clean_aws
from tests.storage.test_checked import WAYS, options, read_to_error, shard_of
from tests.transfer.reading import KIB, bytes_of, data, outcomes, quick
from wds_async.config import RetryPolicy
from wds_async.errors import FetchTimeout, StorageError, WdsError
from wds_async.storage.deadlines import Progress, call_with_deadline, with_deadline
from wds_async.storage.listing.expand import folder_entries
from wds_async.storage.sink import open_sink
from wds_async.transfer.probe import probe

__all__ = ["azure_environment_fixture", "clean_aws"]

SHARD = data(300 * KIB)
SHORT = {"connect_timeout_s": 0.1, "stall_timeout_s": 0.2}
TWICE = RetryPolicy(max_attempts=2, base_s=0.001)


@pytest.fixture(autouse=True)
def nothing_of_this_machine(clean_aws: pytest.MonkeyPatch, azure_environment: Any) -> None:
    clean_aws.setenv("AWS_DEFAULT_REGION", "us-east-1")
    for name in ("STORAGE_EMULATOR_HOST", "AIS_ENDPOINT", "WDS_RETRIES"):
        clean_aws.delenv(name, raising=False)
    clean_aws.setenv("WDS_TIMEOUT", "0.25")


# -- the deadline itself --------------------------------------------------------------------------------------------


async def stubborn() -> None:
    """Never returns, and ignores its cancellation."""
    end = asyncio.get_running_loop().time() + 60
    while asyncio.get_running_loop().time() < end:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if ending.is_set():
                raise


ending = threading.Event()


def run(scenario: Callable[[], Any]) -> Any:
    """The result of the coroutine function; what it abandoned is ended after that."""

    async def all_of_it() -> Any:
        try:
            return await scenario()
        finally:
            ending.set()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            ending.clear()

    return asyncio.run(all_of_it())


def test_what_ignores_its_cancellation_is_abandoned() -> None:
    async def scenario() -> None:
        with pytest.raises(TimeoutError, match=r"^no answer within 0\.1 s$"):
            await with_deadline(stubborn(), 0.1)

    run(scenario)


def test_the_caller_can_be_cancelled() -> None:
    async def scenario() -> None:
        task = asyncio.ensure_future(with_deadline(stubborn(), 50))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(scenario)


def test_progress_starts_the_deadline_again() -> None:
    async def scenario() -> None:
        progress = Progress()

        async def works() -> str:
            for _ in range(3):
                await asyncio.sleep(0.5)
                progress.made()
            return "done"

        assert await with_deadline(works(), 1.0, "no byte arrived", progress) == "done"

    run(scenario)


def test_what_is_raised_and_returned_is_passed_on() -> None:
    async def scenario() -> None:
        async def fails() -> None:
            raise KeyError("k")

        async def gives_up() -> None:
            raise asyncio.CancelledError

        with pytest.raises(KeyError):
            await with_deadline(fails(), 20)
        with pytest.raises(ConnectionError, match="cancelled its own call"):
            await with_deadline(gives_up(), 20)
        assert await with_deadline(asyncio.sleep(0, "result"), 20) == "result"

    run(scenario)


def test_a_blocking_call_is_left_on_its_thread() -> None:
    release = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        call_with_deadline(0.1, release.wait, 60)
    release.set()
    assert call_with_deadline(20, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        call_with_deadline(20, divmod, 7, 0)


# -- reading, store by store ----------------------------------------------------------------------------------------


def read(url: str, origin: Origin, **config: Any) -> tuple[bytes, WdsError | None]:
    return read_to_error(url, origin, quick(**{**SHORT, "retry": TWICE, **config}))


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "others"])
@pytest.mark.parametrize("store", WAYS)
def test_a_rubbish_chunk_size_is_a_stall(store: str, direct: bool, origin: Origin) -> None:
    """aiohttp waits for ever there: its error and its timer are lost."""
    url = shard_of(store, origin, SHARD)
    origin.behave(when=lambda request: request.method == "GET", bad_chunk=True, cut_after=100_000, cut="fin")
    got, error = read(url, origin, direct=direct)
    assert isinstance(error, FetchTimeout)
    assert f"{url} at byte {len(got)}: " in str(error)
    assert got == SHARD[: len(got)]


@pytest.mark.parametrize("store", WAYS)
def test_a_rubbish_chunk_size_heals(store: str, origin: Origin) -> None:
    url = shard_of(store, origin, SHARD)
    origin.behave(times=4, bad_chunk=True, cut_after=100_000, cut="fin")
    assert read(url, origin, retry=RetryPolicy(base_s=0.001)) == (SHARD, None)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "others"])
@pytest.mark.parametrize("store", WAYS)
def test_a_store_that_never_answers(store: str, direct: bool, origin: Origin) -> None:
    url = shard_of(store, origin, SHARD)
    origin.behave(stall_after=BEFORE_HEAD)
    got, error = read(url, origin, direct=direct)
    assert isinstance(error, FetchTimeout)
    assert (got, f"{url} at byte 0: " in str(error)) == (b"", True)


@pytest.mark.parametrize("store", WAYS)
def test_an_error_page_without_end(store: str, origin: Origin) -> None:
    url = shard_of(store, origin, SHARD)
    origin.behave(status=500, body=b"", bad_chunk=True)
    _, error = read(url, origin, direct=False, connect_timeout_s=1.0)
    assert error is not None
    assert url in str(error)
    assert "500" in str(error) or store == "s3"  # its client reads the page whole


def test_the_probe_ends(origin: Origin) -> None:
    url = origin.add("x.tar", SHARD)
    origin.behave(chunked=True, when=lambda request: request.range is not None)
    origin.behave(bad_chunk=True, cut_after=100, cut="fin")
    (found,) = probe([url], config=quick(**SHORT))
    assert isinstance(found.error, FetchTimeout)


def test_a_token_that_never_comes(origin: Origin, clean_aws: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "token").write_text("a token of the cluster")
    clean_aws.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/training")
    clean_aws.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    clean_aws.setenv("AWS_ENDPOINT_URL_STS", origin.base)
    clean_aws.setenv("AWS_ENDPOINT_URL_S3", origin.base)
    origin.behave(body=b"<Assume", bad_chunk=True)
    (_, error), *_ = outcomes(["s3://bucket/x.tar"], quick(**SHORT))
    assert isinstance(error, FetchTimeout)
    assert "s3://bucket/x.tar at byte 0: " in str(error)
    assert "no answer within" in str(error)


# -- listings -------------------------------------------------------------------------------------------------------

_S3_PAGE = b'<?xml version="1.0"?><ListBucketResult><Name>bucket</Name><Contents><Key>x.tar</Key></Contents>'
LISTED: dict[str, tuple[str, bytes]] = {
    "http": ("", b'<html><a href="x.tar">x.tar</a>'),
    "s3": ("s3://bucket/", _S3_PAGE),
    "gcs": ("gs://bucket/", json.dumps({"items": []}).encode()),
    "azure": ("az://c/", b"<?xml version='1.0'?><EnumerationResults>"),
    "ais": ("ais://b/", json.dumps({"entries": []}).encode()),
    "hf": ("hf://datasets/o/n/", b"[]"),
    "generic": ("webhdfs://host/", b"{}"),
}


@pytest.mark.parametrize("how", ["never", "rubbish"])
@pytest.mark.parametrize("store", LISTED)
def test_a_listing_that_never_ends(store: str, how: str, origin: Origin) -> None:
    url, page = LISTED[store]
    url = (url or origin.url("folder/")).replace("host", f"127.0.0.1:{origin.port}")
    if how == "never":
        origin.behave(stall_after=BEFORE_HEAD)
    else:
        origin.behave(body=page, headers={"content-type": "text/html" if store == "http" else None}, bad_chunk=True)
    with pytest.raises(WdsError) as info:
        list(folder_entries(url, options=options(origin)))
    assert isinstance(info.value, FetchTimeout) or store == "generic"  # requests reads what there is
    assert str(info.value).startswith(url)


# -- the rest of fsspec ---------------------------------------------------------------------------------------------


class Silent(AsyncFileSystem):
    """An asynchronous filesystem whose ``hangs`` (a method's name) never returns, and cannot be cancelled."""

    protocol = "silent"
    hangs = ""
    cachable = False

    async def _info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        await self._perhaps("info")
        return {"name": path, "size": len(SHARD), "type": "file"}

    async def _cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        await self._perhaps("cat_file")
        return SHARD[start:end]

    async def _ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        await self._perhaps("ls")
        return [{"name": f"{path}/x.tar", "size": len(SHARD), "type": "file"}]

    async def _perhaps(self, name: str) -> None:
        if self.hangs == name:
            await stubborn()


@pytest.fixture
def silent() -> Iterator[type[Silent]]:
    fsspec.register_implementation("silent", Silent, clobber=True)
    yield Silent
    Silent.hangs = ""
    ending.clear()


@pytest.mark.parametrize("call", ["info", "cat_file"])
def test_an_asynchronous_filesystem_that_hangs(silent: type[Silent], call: str) -> None:
    url = "silent://host/x.tar"
    assert bytes_of([url], quick(**SHORT)) == [SHARD]
    silent.hangs = call
    ending.set()  # so that the loop of the engine can end
    ((got, error),) = outcomes([url], quick(**SHORT, part_bytes=64 * KIB))
    assert isinstance(error, FetchTimeout)
    assert (got, f"{url} at byte 0: no answer within" in str(error)) == (b"", True)


def test_an_asynchronous_filesystem_that_hangs_when_it_lists(silent: type[Silent]) -> None:
    assert [entry.url for entry in folder_entries("silent://host/")] == ["silent://host/x.tar"]
    silent.hangs = "ls"
    ending.set()
    with pytest.raises(FetchTimeout, match="silent://host/ cannot be listed: no answer within"):
        list(folder_entries("silent://host/"))


class Stuck(MemoryFileSystem):
    """A blocking filesystem whose next ``times`` calls hang until ``release``; every file holds ``content``."""

    protocol = "stuck"
    cachable = False
    release = threading.Event()
    content = data(1000)
    times = 0
    made = 0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        Stuck.made += 1

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.rpartition("://")[2].lstrip("/")

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        self._perhaps()
        return self.content[start:end]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return {"name": path, "size": len(self.content), "type": "file"}

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        self._perhaps()
        return []

    def put_file(self, lpath: Any, rpath: Any, callback: Any = None, **kwargs: Any) -> None:
        self._perhaps()

    def _perhaps(self) -> None:
        if Stuck.times > 0:
            Stuck.times -= 1
            Stuck.release.wait(60)


@pytest.fixture
def stuck() -> Iterator[type[Stuck]]:
    fsspec.register_implementation("stuck", Stuck, clobber=True)
    Stuck.release.clear()
    Stuck.times = Stuck.made = 0
    yield Stuck
    Stuck.release.set()


def test_a_blocking_filesystem_that_hangs_is_made_anew(stuck: type[Stuck]) -> None:
    stuck.times = 2
    assert bytes_of(["stuck://x.tar"] * 2, quick(**SHORT, retry=RetryPolicy(base_s=0.001))) == [stuck.content] * 2
    assert stuck.made == 3


def test_a_blocking_filesystem_that_always_hangs(stuck: type[Stuck]) -> None:
    stuck.times = 1000
    found = outcomes(["stuck://x.tar", "stuck://y.tar"], quick(**SHORT))
    for (got, error), name in zip(found, "xy", strict=True):
        assert isinstance(error, FetchTimeout)
        assert (got, f"stuck://{name}.tar at byte 0: " in str(error)) == (b"", True)


def test_a_blocking_filesystem_that_hangs_when_it_lists(stuck: type[Stuck]) -> None:
    stuck.times = 1000
    with pytest.raises(FetchTimeout, match="stuck://b/ cannot be listed: no answer within"):
        list(folder_entries("stuck://b/"))


def test_calls_that_hang_leave_others_their_threads(stuck: type[Stuck], tmp_path: Any) -> None:
    """The engine has 24 threads for what blocks; files are read on them, too."""
    (tmp_path / "x.tar").write_bytes(SHARD)
    stuck.times = 1000
    retry = RetryPolicy(max_attempts=40, base_s=0.001, cap_s=0.002)
    config = quick(connect_timeout_s=0.01, stall_timeout_s=0.01, retry=retry)
    (_, error), good = outcomes(["stuck://x.tar", str(tmp_path / "x.tar")], config)
    assert isinstance(error, FetchTimeout)
    assert good == (SHARD, None)


# -- writing --------------------------------------------------------------------------------------------------------


WRITTEN = {
    "http": "",
    "s3": "s3://bucket/x.tar",
    "gcs": "gs://bucket/x.tar",
    "azure": "az://c/x.tar",
    "ais": "ais://b/x.tar",
    "generic": "stuck://x.tar",
}


@pytest.fixture
def nothing_goes_on() -> Iterator[None]:
    """End what fsspec's clients still do on their loop: threads wait for it."""
    yield
    loop = get_loop()
    loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])


def write(url: str, origin: Origin) -> None:
    sink = open_sink(url, options=options(origin))
    sink.write(b"x" * 5000)
    sink.commit()


@pytest.mark.parametrize("how", ["never", "rubbish"])
@pytest.mark.parametrize("store", WRITTEN)
def test_an_upload_that_is_not_answered(
    store: str, how: str, origin: Origin, stuck: type[Stuck], nothing_goes_on: None
) -> None:
    url, stuck.times = WRITTEN[store] or origin.url("x.tar"), 1000
    script = {"stall_after": BEFORE_HEAD} if how == "never" else {"status": 500, "bad_chunk": True}
    origin.behave(**script)
    with pytest.raises(StorageError) as info:
        write(url, origin)
    assert isinstance(info.value, FetchTimeout) or how == "rubbish"
    assert f"{url} at byte " in str(info.value)
