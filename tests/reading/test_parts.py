"""The way to samples in parts: as WebDataset's parts, in loops of every age, and where shards break."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin, make_shard, make_tar
from tests.transfer.reading import MIB, data, open_fds
from wds_async.errors import DuplicateField, NotATar, ShardNotFound, TruncatedShard, UrlError
from wds_async.handlers import ignore_and_continue, ignore_and_stop
from wds_async.reading.parts import (
    EndOfShard,
    base_plus_ext,
    group_by_keys,
    tar_file_expander,
    tar_file_iterator,
    url_opener,
    valid_sample,
)
from wds_async.reading.url_files import gopen_schemes

A = make_shard({f"a{i}": {"txt": b"a%d" % i, "cls": b"1"} for i in range(3)})
B = make_shard({f"a{i}": {"jpg": b"2"} for i in range(2, 5)})  # begins with the key that A ends with


@pytest.fixture
def put(put: Any) -> Callable[..., list[dict[str, Any]]]:
    """Shards as a shard list gives them."""
    return lambda *shards: [{"url": url} for url in put(*shards)]


def older_loop(members: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Grouping as OpenCLIP and its forks have it: every item is taken for a member, and a duplicate ends a sample."""
    sample: dict[str, Any] | None = None
    for member in members:
        assert isinstance(member, dict)
        name, value = member["fname"], member["data"]
        key, field = base_plus_ext(name)
        if key is None or field is None:
            continue
        if sample is None or key != sample["__key__"] or field.lower() in sample:
            if valid_sample(sample):
                yield sample  # type: ignore[misc]
            sample = {"__key__": key, "__url__": member["__url__"]}
        sample[field.lower()] = value
    if valid_sample(sample):
        yield sample  # type: ignore[misc]


def newer_loop(members: Iterable[dict[str, Any]]) -> Iterator[list[str]]:
    """The names of each shard, by the ``{}`` behind it."""
    names: list[str] = []
    for member in members:
        if member == {}:
            yield names
            names = []
        else:
            names.append(member["fname"])
    assert not names


def test_an_older_loop_is_not_broken_by_the_ends_of_shards(put: Any) -> None:
    samples = list(older_loop(tar_file_expander(url_opener(put(A, None, B), ignore_and_continue), ignore_and_continue)))
    assert [s["__key__"] for s in samples] == ["a0", "a1", "a2", "a3", "a4"]


def test_a_newer_loop_sees_the_ends_of_shards(put: Any) -> None:
    names = list(newer_loop(tar_file_expander(url_opener(put(A, B)))))
    assert [len(of_shard) for of_shard in names] == [6, 3]
    assert list(newer_loop(tar_file_expander(url_opener(put(A, B)), eof_value={}))) == names
    assert not any(item == {} for item in tar_file_expander(url_opener(put(A, B)), eof_value=None))
    assert [i for i in tar_file_expander(url_opener(put(A, B)), eof_value="end") if isinstance(i, str)] == ["end"] * 2


def test_the_end_of_a_shard() -> None:
    end = EndOfShard("x.tar", broken=True)
    assert end == {}
    assert not end
    assert (end["fname"], end["data"], end["__url__"], end.broken) == ("", b"", "x.tar", True)
    assert end.get("fname") is None
    with pytest.raises(KeyError):
        end["stream"]


def test_streams_are_files_in_the_dicts_that_came(put: Any) -> None:
    shards = put(A, B)
    for i, sample in enumerate(url_opener(shards)):
        assert sample is shards[i]
        assert isinstance(sample["stream"], io.BufferedReader)
        assert sample["stream"].read() == (A, B)[i]


def test_shards_are_read_ahead(origin: Origin) -> None:
    urls = [origin.add(f"{i}.tar", make_shard({"a": {"bin": data(MIB, i)}})) for i in range(8)]
    opened = url_opener({"url": url} for url in urls)
    first = next(opened)
    first["stream"].read()
    origin.wait_until(lambda server: len({request.path for request in server.requests}) > 2)
    assert first["stream"].read() == b""
    rest = list(opened)
    assert len(rest) == 7
    assert rest[-1]["stream"].read() == make_shard({"a": {"bin": data(MIB, 7)}})
    assert rest[0]["stream"].read() == make_shard({"a": {"bin": data(MIB, 1)}})  # left behind, and fetched again


def test_a_stream_that_was_left_in_its_middle_goes_on_there(put: Any) -> None:
    content = make_shard({"a": {"bin": data(3 * MIB)}})
    opened = url_opener(put(content, A))
    stream = next(opened)["stream"]
    before = stream.read(MIB + 3)
    next(opened)
    assert before + stream.read() == content
    opened.close()


def test_other_arguments_open_one_by_one(put: Any) -> None:
    def opener(url: str, mode: str, bufsize: int, speed: int) -> io.BytesIO:
        if "bad" in url:
            raise LookupError("mine")
        return io.BytesIO(A if speed == 3 else b"")

    gopen_schemes["own"] = opener
    try:
        with pytest.raises(LookupError, match="own:bad"):
            list(url_opener([{"url": "own:bad"}], speed=3))
        (sample,) = url_opener([{"url": "own:x"}], speed=3)
        assert sample["stream"].read() == A
        (sample,) = url_opener(put(None, A), ignore_and_continue, bufsize=9)
        with sample["stream"] as file:
            assert file.read() == A
        assert list(url_opener(put(None, A), ignore_and_stop, bufsize=9)) == []
    finally:
        del gopen_schemes["own"]


def test_an_error_of_opening_goes_to_the_openers_handler(put: Any) -> None:
    asked: list[Exception] = []
    handler = _noting(asked, True)
    assert [s["url"][-5:] for s in url_opener(put(None, A, None), handler)] == ["1.tar"]
    assert [type(exn) for exn in asked] == [ShardNotFound, ShardNotFound]
    assert put(None)[0]["url"] in str(asked[0])
    assert list(url_opener(put(None, A), ignore_and_stop)) == []
    with pytest.raises(UrlError, match="dict"):
        list(url_opener(["x.tar"]))  # type: ignore[list-item]


def _noting(asked: list[Exception], answer: bool) -> Callable[[Exception], bool]:
    def handler(exn: Exception) -> bool:
        asked.append(exn)
        return answer

    return handler


def test_a_truncated_shard(put: Any) -> None:
    cut = A[:1536]  # a0.txt, and the header of a0.cls
    b = make_tar([("a0.cls", b"3"), ("b.cls", b"4")])
    for answer, wanted in ((True, [("a0", b"3"), ("b", b"4")]), (False, [])):
        asked: list[Exception] = []
        handler = _noting(asked, answer)
        samples = group_by_keys(tar_file_expander(url_opener(put(cut, b), handler), handler), handler=handler)
        assert [(s["__key__"], s.get("cls")) for s in samples] == wanted
        assert [type(exn) for exn in asked] == [TruncatedShard]
        assert "0.tar" in str(asked[0])
    with pytest.raises(TruncatedShard):
        list(tar_file_expander(url_opener(put(cut, b))))


def test_names_are_skipped_renamed_and_selected(put: Any) -> None:
    def select(name: str) -> bool:
        if name == "a1.text":
            raise LookupError("mine")
        return name.endswith(".text")

    def rename(name: str) -> str:
        return name.replace(".txt", ".text")

    def run(handler: Any) -> list[str]:
        return [item["fname"] for item in tar_file_iterator(io.BytesIO(A), None, handler, select, rename)]

    assert run(ignore_and_continue) == ["a0.text", "a2.text"]
    assert run(ignore_and_stop) == ["a0.text"]
    with pytest.raises(LookupError):
        list(tar_file_iterator(io.BytesIO(A), select_files=select, rename_files=rename))
    members = list(tar_file_expander(url_opener(put(A)), ignore_and_continue, select, rename, None))
    assert members[0] == {"fname": "a0.text", "data": b"a0", "__url__": put(A)[0]["url"]}
    assert len(members) == 2


def test_any_file_is_read(tmp_path: Path) -> None:
    class OnlyReads:
        def __init__(self) -> None:
            self._file = io.BytesIO(A)

        def read(self, size: int) -> bytes:
            return self._file.read(min(size, 700))

    import gzip

    for fileobj in (OnlyReads(), io.BytesIO(A), io.BytesIO(gzip.compress(A))):
        assert [item["fname"] for item in tar_file_iterator(fileobj)][:2] == ["a0.txt", "a0.cls"]
    with pytest.raises(NotATar, match="BytesIO"):
        list(tar_file_iterator(io.BytesIO(b"x" * 1000)))
    assert list(tar_file_iterator(io.BytesIO(b"x" * 1000), handler=ignore_and_continue)) == []
    with pytest.warns(DeprecationWarning, match="info"):
        items = tar_file_iterator(io.BytesIO(A), "__", ignore_and_continue, {"tag": 1})
    assert next(items) == {"fname": "a0.txt", "data": b"a0", "tag": 1}


def test_what_a_file_raises_names_the_shard() -> None:
    class Broken(io.BytesIO):
        def readinto(self, buffer: Any) -> int:
            raise LookupError("mine")

    with pytest.raises(LookupError, match=r"mine.*own:x\?token=\*\*\*"):
        list(tar_file_expander([{"url": "own:x?token=SECRET", "stream": Broken()}]))
    asked: list[Exception] = []
    assert list(tar_file_expander([{"url": "x"}], _noting(asked, True))) == []
    assert list(tar_file_expander([{"url": "x"}], _noting(asked, False))) == []
    assert "stream" in str(asked[1])


def test_a_command_that_fails_behind_its_bytes_loses_no_member(tmp_path: Path) -> None:
    """Of a small shard all bytes have come when the error does; only the last sample may be cut short."""
    (tmp_path / "x.tar").write_bytes(A)
    opened = url_opener([{"url": f"pipe:cat {tmp_path}/x.tar; exit 2"}])
    found = group_by_keys(tar_file_expander(opened, handler=ignore_and_continue))
    assert [sample["__key__"] for sample in found] == ["a0", "a1"]


def test_streams_are_closed(put: Any) -> None:
    files = [io.BytesIO(A), io.BytesIO(b"x" * 1000), io.BytesIO(B)]
    sources = [{"url": str(i), "stream": file, "local_path": f"/{i}"} for i, file in enumerate(files)]
    members = tar_file_expander(sources, ignore_and_continue)
    assert next(members)["__local_path__"] == "/0"
    list(members)
    assert all(file.closed for file in files)
    before = open_fds()
    for _ in range(3):
        members = tar_file_expander(url_opener(put(A, B)))
        next(members)
        del members
    gc.collect()
    assert open_fds() <= before + 1


def test_grouping() -> None:
    def member(name: str, url: str = "u", **more: Any) -> dict[str, Any]:
        return {"fname": name, "data": name.encode(), "__url__": url, **more}

    assert list(group_by_keys([member("a.X"), member("a.y", __local_path__="/p")], suffixes={"x"})) == [
        {"__key__": "a", "__url__": "u", "x": b"a.X", "__local_path__": "/p"}
    ]
    (sample,) = group_by_keys([member("a.b.X")], lambda name: (name[:3], name[4:]), lcase=False)
    assert sample == {"__key__": "a.b", "__url__": "u", "X": b"a.b.X"}
    assert len(list(group_by_keys([member("a.x"), member("a.y", "v")]))) == 2  # another shard
    assert len(list(group_by_keys([member("a.x"), {}, member("a.y")]))) == 2
    assert list(group_by_keys([member("a.x"), member("a.__bad__")])) == []
    twice = [member("a.x"), member("a.X"), member("a.y"), member("b.x")]
    with pytest.raises(DuplicateField, match=r"'a\.X'"):
        list(group_by_keys(twice, handler=None))
    assert [len(s) for s in group_by_keys(twice, handler=ignore_and_continue)] == [4, 3]
    assert [len(s) for s in group_by_keys(twice, handler=ignore_and_stop)] == [3]
