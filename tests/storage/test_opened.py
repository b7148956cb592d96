"""Shards through the program's own openers: bytes, errors, and the closing of what they opened."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.servers import Origin, make_shard
from tests.transfer.reading import KIB, MIB, bytes_of, data, outcomes, quick
from wds_async.dataset import WebDataset
from wds_async.errors import ShardNotFound, TransferError, UrlError
from wds_async.reading.url_files import gopen
from wds_async.storage.user_openers import gopen_schemes
from wds_async.transfer import engine
from wds_async.transfer.reader import open_shards

BYTES = data(3 * MIB + 17)
SHARDS = {f"{i}": make_shard({f"{i}-{j}": {"cls": b"%d" % j} for j in range(20)}) for i in range(4)}


pytestmark = pytest.mark.usefixtures("openers")


class Reads:
    """Only ``read``; remembers whether it was closed, and can fail or wait."""

    def __init__(self, content: bytes, *, fails_at: int | None = None, waits: threading.Event | None = None) -> None:
        self._file = io.BytesIO(content)
        self._fails_at = fails_at
        self._waits = waits
        self.closed = threading.Event()

    def read(self, size: int) -> bytes:
        if self._fails_at is not None and self._file.tell() >= self._fails_at:
            raise LookupError("no more of this")
        if self._waits is not None and self._file.tell():
            self._waits.wait(20)
        return self._file.read(min(size, 64 * KIB))

    def close(self) -> None:
        self.closed.set()


def test_readinto_and_read_give_the_bytes() -> None:
    asked: list[tuple[str, str, int]] = []

    def opener(url: str, mode: str, bufsize: int) -> Any:
        asked.append((url, mode, bufsize))
        return io.BytesIO(BYTES) if url.endswith("1") else Reads(BYTES)

    gopen_schemes["own"] = opener
    assert bytes_of(["own:1", "own://b/2"]) == [BYTES, BYTES]
    assert sorted(asked) == [("own://b/2", "rb", 8192), ("own:1", "rb", 8192)]


def test_the_entry_wins_over_our_clients_and_default_serves_the_rest(tmp_path: Any) -> None:
    (tmp_path / "x").write_bytes(b"file")
    for name in ("http", "s3", "pipe", "file", "__default__"):
        gopen_schemes[name] = lambda url, mode, bufsize: io.BytesIO(url.encode())
    urls = ["http://h/x", "s3://b/x", "pipe:echo", "file:///x", "nosuch://x"]
    assert bytes_of(urls) == [url.encode() for url in urls]
    assert bytes_of([str(tmp_path / "x")]) == [b"file"]


def test_an_entry_may_wrap_ours(origin: Origin) -> None:
    url = origin.add("x.tar", BYTES)
    ours, opened = gopen_schemes["http"], []

    def opener(url: str, mode: str, bufsize: int) -> Any:
        opened.append(url)
        return ours(url, mode, bufsize)

    gopen_schemes["http"] = opener
    assert bytes_of([url, url]) == [BYTES, BYTES]
    assert opened == [url, url]
    with gopen(url) as file:
        assert file.read(5) == BYTES[:5]
    assert len(opened) == 3
    missing = url.replace("x.tar", "none.tar")
    ((_, error),) = outcomes([missing])
    assert isinstance(error, ShardNotFound)


def test_a_file_of_ours_that_is_left_keeps_nobody_waiting(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_STOP_WITHIN_S", 30.0)  # which it takes where thread and loop wait for each other
    url = origin.add("x.tar", data(256 * KIB))
    ours, files = gopen_schemes["http"], []

    class Behind(Reads):
        def close(self) -> None:
            files[0].close()
            super().close()

    def opener(url: str, mode: str, bufsize: int) -> Any:
        files.append(ours(url, mode, bufsize))
        files[0].read(1)  # starts the reader within
        return Behind(BYTES * 8)

    gopen_schemes["http"] = opener
    with open_shards([url], config=quick()) as reader:
        assert next(reader).read() is not None
    assert not _after(lambda: not _engine_threads())


def _engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "wds-async"]


def _after(condition: Callable[[], bool]) -> list[threading.Thread]:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return _engine_threads()


def test_an_opener_that_raises_is_named_with_its_cause() -> None:
    def opener(url: str, mode: str, bufsize: int) -> Any:
        raise LookupError("mine") if "a" in url else FileNotFoundError("gone")

    gopen_schemes["own"] = opener
    (_, first), (_, second) = outcomes(["own:a", "own:b?token=SECRET"])
    assert isinstance(first, TransferError)
    assert isinstance(first.__cause__, LookupError)
    assert "own:a at byte 0" in str(first)
    assert "LookupError: mine" in str(first)
    assert isinstance(second, ShardNotFound)
    assert "SECRET" not in str(second)


def test_an_error_comes_behind_the_bytes_before_it() -> None:
    file = Reads(BYTES, fails_at=128 * KIB)
    gopen_schemes["own"] = lambda url, mode, bufsize: file
    ((got, error), (following, none)) = outcomes(["own:x", "pipe:printf y"])
    assert got == BYTES[: 128 * KIB]
    assert isinstance(error.__cause__ if error else None, LookupError)
    assert (following, none) == (b"y", None)
    assert file.closed.wait(5)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (io.StringIO("text"), "returned str"),
        (object(), "has no read"),
        (type("Late", (), {"read": lambda self, size: None})(), "NoneType"),
        (type("Long", (), {"read": lambda self, size: bytes(size + 1)})(), "returned"),
    ],
)
def test_what_is_no_file_of_bytes_is_refused(file: Any, words: str) -> None:
    gopen_schemes["own"] = lambda url, mode, bufsize: file
    ((_, error),) = outcomes(["own:x"])
    assert words in str(error)


def test_what_close_says_at_the_end_counts() -> None:
    class Fails(io.BytesIO):
        def close(self) -> None:
            super().close()
            raise OSError("the command failed")

    gopen_schemes["own"] = lambda url, mode, bufsize: Fails(b"abc")
    ((got, error),) = outcomes(["own:x"])
    assert got == b"abc"
    assert "the command failed" in str(error)


def test_a_file_is_closed_at_its_end_and_when_it_is_left() -> None:
    files: list[Reads] = []

    def opener(url: str, mode: str, bufsize: int) -> Reads:
        files.append(Reads(BYTES))
        return files[-1]

    gopen_schemes["own"] = opener
    bytes_of(["own:x"])
    assert files[0].closed.is_set()
    with open_shards(["own:x"] * 3, config=quick()) as reader:
        assert next(reader).read() is not None
    assert all(file.closed.wait(5) for file in files)


def test_a_read_that_hangs_holds_nobody_up_and_closes_when_it_comes_back() -> None:
    goes_on = threading.Event()
    file = Reads(BYTES, waits=goes_on)
    gopen_schemes["own"] = lambda url, mode, bufsize: file
    with open_shards(["own:x"], config=quick()) as reader:
        assert next(reader).read() is not None
    assert not file.closed.is_set()
    goes_on.set()
    assert file.closed.wait(5)


def test_an_entry_taken_out_meanwhile() -> None:
    gopen_schemes["own"] = lambda url, mode, bufsize: io.BytesIO(b"x")
    with open_shards(["own:x"], config=quick()) as reader:
        stream = next(reader)
        del gopen_schemes["own"]
        with pytest.raises(UrlError, match="gone"):
            stream.read()


def test_secure_mode_leaves_the_programs_openers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_SECURE", "1")
    gopen_schemes["own"] = lambda url, mode, bufsize: io.BytesIO(b"x")
    assert bytes_of(["own:x"]) == [b"x"]


def open_shard(url: str, mode: str, bufsize: int) -> io.BytesIO:
    return io.BytesIO(SHARDS[url.removeprefix("own:")])


def test_a_dataset_in_loader_workers() -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    gopen_schemes["own"] = open_shard
    dataset = WebDataset([f"own:{i}" for i in range(4)], shardshuffle=False)
    loader = torch_data.DataLoader(dataset, num_workers=2, batch_size=None, multiprocessing_context="fork")
    samples = list(loader)
    assert sorted(s["__key__"] for s in samples) == sorted(f"{i}-{j}" for i in range(4) for j in range(20))
    assert {s["__url__"] for s in samples} == {f"own:{i}" for i in range(4)}
    assert "__local_path__" not in samples[0]
