"""Shards that are cut at any byte, or damaged in any header: whole samples come out, halves never, and the ledger names
the rest."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import tarfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import wds_async as wds
from tests.servers import make_tar
from wds_async.errors import ConfigError, MissingField
from wds_async.tar.group import expected as expected_fields
from wds_async.tar.group import samples
from wds_async.tar.parse import members
from wds_async.tariterators import tarfile_samples

FIELDS = {
    "a": {"txt": b"a1", "cls": b"a2"},
    "b" * 60 + "/b": {"x" * 60: b"b1", "cls": b"", "bin": b"b" * 700},  # a long name: an extension header
    "c": {"txt": b"c1"},
    "d/d": {"cls": b"d1", "txt": b"d2"},
}
KEYS = list(FIELDS)
MEMBERS = [(f"{key}.{field}", data) for key, fields in FIELDS.items() for field, data in fields.items()]
SHARDS = {form: make_tar(MEMBERS, format=form) for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)}
URL = "http://host/x.tar"


class Place(NamedTuple):
    key: str
    start: int
    data: int
    end: int


@functools.cache
def places(shard: bytes) -> list[Place]:
    """Where each member begins, where its data does, and where its padding ends, as ``tarfile`` tells."""
    with tarfile.open(fileobj=io.BytesIO(shard)) as tar:
        return [
            Place(m.name.rpartition(".")[0], m.offset, m.offset_data, m.offset_data + -(-m.size // 512) * 512)
            for m in tar.getmembers()
        ]


def expected(shard: bytes, readable: int, intact: int) -> tuple[list[str], list[str]]:
    """The keys that come out, and those that are lost, where the headers that end before the byte ``readable`` can be
    read, and the shard's first ``intact`` bytes."""
    where = places(shard)
    if intact == where[-1].end or intact >= where[-1].end + 512:
        return KEYS, []
    seen = list(dict.fromkeys(place.key for place in where if place.data <= readable))
    return seen[:-1], seen[-1:]


def read(data: bytes, size: int) -> tuple[list[str], list[str], Exception | None]:
    """The keys of the samples that come out, each of them whole, those that `on_cut` names, and the error."""
    pieces = iter([memoryview(data[i : i + size]) for i in range(0, len(data), size)])
    out: list[str] = []
    lost: list[str] = []
    try:
        for sample in samples(
            members(lambda: next(pieces, None), URL), URL, on_cut=lambda key, _: bool(lost.append(key))
        ):
            assert {k: v for k, v in sample.items() if not k.startswith("__")} == FIELDS[sample["__key__"]]
            out.append(sample["__key__"])
    except tarfile.ReadError as exn:
        return out, lost, exn
    return out, lost, None


@pytest.mark.parametrize("size", [1 << 20, 700], ids=lambda size: f"pieces of {size}")
@pytest.mark.parametrize("form", SHARDS, ids=["gnu", "pax"])
def test_cut_at_every_byte(form: int, size: int) -> None:
    shard = SHARDS[form]
    where = places(shard)
    between = {place.end for place in where[:-1]}  # there a cut looks like the end of an archive without end blocks
    for cut in range(where[-1].end + 1025):
        if cut in between:
            continue
        out, lost, error = read(shard[:cut], size)
        assert (out, lost) == expected(shard, cut, cut), cut
        assert (error is None) == (not lost and cut > 512), cut


@pytest.mark.parametrize("form", SHARDS, ids=["gnu", "pax"])
def test_any_byte_of_any_header_damaged(form: int) -> None:
    """But for the payload of an extension header, which no checksum covers."""
    shard = SHARDS[form]
    for place in places(shard):
        blocks = {place.start, place.data - 512}
        for at in itertools.chain.from_iterable(range(block, block + 512) for block in blocks):
            damaged = shard[:at] + bytes([shard[at] ^ 0x41]) + shard[at + 1 :]
            out, lost, error = read(damaged, 700)
            wanted = expected(shard, place.data - 1, at) if error is not None else (KEYS, [])
            assert (out, lost) == wanted, at


@pytest.fixture
def cut_shards(tmp_path: Path) -> list[tuple[int, str]]:
    """Cuts inside every header, name, payload and padding, and a good shard behind each."""
    shard = SHARDS[tarfile.GNU_FORMAT]
    cuts = sorted(
        {
            at
            for place in places(shard)
            for at in (place.start + 1, place.data - 1, place.data, place.data + 1, place.end - 1)
            if at not in {other.end for other in places(shard)}
        }
    )
    for cut in cuts:
        (tmp_path / f"{cut}.tar").write_bytes(shard[:cut])
    return [(cut, str(tmp_path / f"{cut}.tar")) for cut in cuts]


def keys_of(found: Iterator[Any]) -> Iterator[str]:
    for sample in found:
        assert {k: v for k, v in sample.items() if not k.startswith("__")} == FIELDS[sample["__key__"]]
        yield sample["__key__"]


HANDLERS = ["reraise_exception", "ignore_and_continue", "ignore_and_stop", "warn_and_continue", "warn_and_stop"]


@pytest.mark.parametrize("on_corrupt", ["raise", "skip_shard", "resync"])
@pytest.mark.parametrize("handler", HANDLERS)
def test_whatever_the_handler(cut_shards: list[tuple[int, str]], handler: str, on_corrupt: str) -> None:
    shard = SHARDS[tarfile.GNU_FORMAT]
    for cut, url in cut_shards:
        data = wds.WebDataset(
            [url, url], shardshuffle=False, empty_check=False, handler=getattr(wds, handler), on_corrupt=on_corrupt
        )
        out: list[str] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                for key in keys_of(iter(data)):
                    out.append(key)
                raised = False
            except tarfile.ReadError:
                raised = True
        wanted, lost = expected(shard, cut, cut)
        nothing = cut < 512  # no header at all: no tar, or a header that is cut
        goes_on = "continue" in handler or (on_corrupt != "raise" and not nothing)
        assert raised == (handler == "reraise_exception" and not goes_on), cut
        assert out == wanted * (2 if goes_on else 1), cut
        noted = [] if raised else [*(lost or [None])] * (2 if goes_on else 1)
        assert [entry.key for entry in data.ledger] == noted, cut


@pytest.mark.parametrize("handler", ["ignore_and_continue", "ignore_and_stop"])
def test_in_parts(cut_shards: list[tuple[int, str]], handler: str) -> None:
    shard = SHARDS[tarfile.GNU_FORMAT]
    answer: Callable[[Exception], bool] = getattr(wds, handler)
    for cut, url in cut_shards:
        opened = [{"url": url, "stream": io.BytesIO(Path(url).read_bytes())}]
        parts = wds.tariterators.group_by_keys(wds.tariterators.tar_file_expander(opened, answer))
        assert list(keys_of(parts)) == expected(shard, cut, cut)[0], cut


def test_a_member_that_is_not_selected_ends_a_sample_too(tmp_path: Path) -> None:
    def select(name: str) -> bool:
        return not name.endswith(".json")

    def rename(name: str) -> str:
        return name.replace("a/", "b/")

    def read(tar: bytes, **functions: Any) -> tuple[list[str], list[Any]]:
        (tmp_path / "x.tar").write_bytes(tar)
        data = wds.WebDataset(
            str(tmp_path / "x.tar"), shardshuffle=False, handler=wds.ignore_and_continue, empty_check=False, **functions
        )
        return [s["__key__"] for s in data], [entry.key for entry in data.ledger]

    tar = make_tar([("b/1.txt", b"1"), ("b/2.json", b"2" * 600), ("b/2.txt", b"2")])
    for cut in (1536 + 10, 2560 + 10):  # inside the data that is passed over, and inside the header behind it
        assert read(tar[:cut], select_files=select) == (["b/1"], ["b/2"])
        assert read(tar[:cut], select_files=select, rename_files=rename) == (["b/1"], ["b/2"])
    tar = make_tar([("b/1.txt", b"1"), ("a/1.json", b"2" * 600), ("a/1.cls", b"2")])  # renamed, it is the same sample
    assert read(tar[: 1536 + 10], select_files=select, rename_files=rename) == ([], ["b/1"])
    tar = make_tar([("b/1.txt", b"1"), ("__meta__/x.json", b"2" * 600), ("b/1.cls", b"2")])
    assert read(tar[: 1536 + 10], select_files=select) == ([], ["b/1"])


def test_a_member_that_is_too_large_costs_its_own_sample(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(make_tar([("a.txt", b"1"), ("b.txt", b"2" * 600), ("c.txt", b"3")]))
    data = wds.WebDataset(str(path), shardshuffle=False, handler=wds.ignore_and_continue, max_field_bytes=100)
    assert [s["__key__"] for s in data] == ["a"]
    assert [(entry.kind, entry.key) for entry in data.ledger] == [("FieldTooLarge", "b")]


def test_the_sample_before_the_one_that_is_cut_comes_before_the_error(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(SHARDS[tarfile.GNU_FORMAT][: places(SHARDS[tarfile.GNU_FORMAT])[2].data + 1])
    found = tarfile_samples([str(path)])
    assert next(found)["__key__"] == "a"
    with pytest.raises(tarfile.ReadError) as caught:
        next(found)
    assert caught.value.last_member == MEMBERS[2][0]  # type: ignore[attr-defined]


PAIRS = [(f"{key}.{field}", b"x") for key in "abc" for field in ("jpg", "txt")]
BETWEEN = 3 * 1024  # behind a.jpg, a.txt and b.jpg


def test_expected_fields_show_a_cut_between_two_members(put: Any) -> None:
    urls = put(make_tar(PAIRS)[:BETWEEN], make_tar(PAIRS))

    def read(handler: str, expect: Any = ("jpg;png", "txt")) -> tuple[list[str], list[Any], Exception | None]:
        data = wds.WebDataset(urls, shardshuffle=False, handler=getattr(wds, handler), expect=expect)
        out: list[str] = []
        try:
            out.extend(sample["__key__"] for sample in data)
        except MissingField as exn:
            return out, [], exn
        return out, [(e.stage, e.kind, e.key, e.field, e.offset, e.samples) for e in data.ledger if e.samples], None

    noted = [("tar", "MissingField", "b", "txt", 2048, 1)]
    assert read("ignore_and_continue") == (["a", *"abc"], noted, None)
    assert read("ignore_and_stop") == (["a"], noted, None)
    assert read("ignore_and_continue", None) == (["a", "b", *"abc"], [], None)
    out, _, error = read("reraise_exception")
    assert isinstance(error, MissingField)
    assert (out, error.key, error.field, error.shard, error.offset) == (["a"], "b", "txt", urls[0], 2048)
    assert "sample 'b' at byte 2048 lacks txt" in str(error)
    assert "it has ['jpg']" in str(error)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert read("warn_and_continue") == read("ignore_and_continue")


def test_no_half_sample_where_fields_are_expected() -> None:
    shard, expect = make_tar(PAIRS), expected_fields(["jpg", "txt"])
    for cut in range(512, 6 * 1024 + 1025, 64):
        lost: list[str] = []
        pieces = iter([memoryview(shard[:cut])])
        found = samples(
            members(lambda pieces=pieces: next(pieces, None), URL),
            URL,
            on_cut=lambda key, _, lost=lost: bool(lost.append(key)),
            on_error=lambda exn, lost=lost: bool(lost.append(exn.key)),
            expect=expect,
        )
        out: list[str] = []
        with contextlib.suppress(tarfile.ReadError):
            for sample in found:
                assert sample.keys() >= {"jpg", "txt"}
                out.append(sample["__key__"])
        begun = [key for key, data in zip("abc", (512, 2560, 4608), strict=True) if data <= cut]
        assert out + lost == begun, cut


def test_a_sample_without_an_expected_field_costs_no_other(put: Any) -> None:
    (url,) = put(make_tar([("a.jpg", b""), ("b.png", b""), ("b.txt", b""), ("c.txt", b""), ("d.PNG", b"")]))
    stage = wds.tarfile_to_samples(wds.ignore_and_continue, expect=("jpg;png",))
    assert [sample["__key__"] for sample in stage([url])] == ["a", "b", "d"]
    assert [entry.key for entry in stage.ledger] == ["c"]


def test_expected_fields_in_parts(tmp_path: Path) -> None:
    def run(handler: Any) -> list[str]:
        opened = [{"url": "x.tar", "stream": io.BytesIO(make_tar(PAIRS)[:BETWEEN])}]
        return [s["__key__"] for s in wds.tariterators.group_by_keys(
            wds.tariterators.tar_file_expander(opened), handler=handler, expect=["jpg", "txt"]
        )]  # fmt: skip

    assert run(wds.ignore_and_continue) == ["a"]
    with pytest.raises(MissingField, match=r"x\.tar: sample 'b' lacks txt"):
        run(wds.reraise_exception)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"expect": "jpg"}, "list of field names"),
        ({"expect": ["jpg", 3]}, "list of field names"),
        ({"expect": ["JPG"]}, "lower case"),
        ({"expect": ["jpg", "cls"], "suffixes": {"jpg"}}, r"only the fields \['jpg'\] are kept"),
    ],
)
def test_expected_fields_that_no_sample_can_have(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        wds.tarfile_to_samples(**options)
    with pytest.raises(ConfigError, match=why):
        wds.tariterators.group_by_keys([], **options)
    wds.tarfile_to_samples(expect=["JPG"], lcase=False)
