"""Sparse members are expanded as ``tarfile`` expands them, within bounds, and a bad map is an error that says so."""

from __future__ import annotations

import subprocess
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tar.test_parse import END, URL, Feed, by_tarfile, header, padded, parse, pax
from tests.tar.test_resync import outcome, pack, some
from wds_async.errors import CorruptShard, FieldTooLarge, TruncatedShard
from wds_async.tar.index import scan
from wds_async.tar.parse import members

Pieces = list[tuple[int, bytes]]
FORMATS = ["gnu", "0.0", "0.1", "1.0"]
CUTS = ([1 << 22], [512], [513, 7])
LONG = b"n" * 150 + b".bin"


def written(form: str, size: int, pieces: Pieces, name: bytes = b"holes.bin") -> bytes:
    """A sparse member as GNU tar writes it, without the end of an archive."""
    data = b"".join(piece for _, piece in pieces)
    table = [(offset, len(piece)) for offset, piece in pieces]
    numbers = [b"%d" % number for pair in table for number in pair]
    if form == "gnu":
        return _old(size, table, data, name)
    known = [b"GNU.sparse.size=%d" % size, b"GNU.sparse.numblocks=%d" % len(table)]
    if form == "0.0":
        fields = [b"GNU.sparse.offset=", b"GNU.sparse.numbytes="] * len(table)
        extra = [*known, *(field + digits for field, digits in zip(fields, numbers, strict=True)), b"path=" + name]
    elif form == "0.1":
        extra = [*known, b"GNU.sparse.map=" + b",".join(numbers), b"GNU.sparse.name=" + name]
    else:
        extra = [b"GNU.sparse.major=1", b"GNU.sparse.minor=0", b"GNU.sparse.name=" + name]
        extra.append(b"GNU.sparse.realsize=%d" % size)
        data = padded(b"".join(digits + b"\n" for digits in [b"%d" % len(table), *numbers])) + data
    return pax(b"x", *extra) + header(name=b"GNUSparseFile.0/x\0", size=b"%011o\0" % len(data)) + padded(data)


def _old(size: int, table: list[tuple[int, int]], data: bytes, name: bytes) -> bytes:
    cells = [b"%011o\0%011o\0" % pair for pair in table]
    block = bytearray(header(name=name + b"\0", kind=b"S", size=b"%011o\0" % len(data), magic=b"ustar  \0"))
    block[345:500] = bytes(155)
    block[386:482] = b"".join(cells[:4]).ljust(96, b"\0")
    block[482] = len(cells) > 4
    block[483:495] = b"%011o\0" % size
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    more = [cells[at : at + 21] for at in range(4, len(cells), 21)]
    blocks = [
        b"".join(part).ljust(504, b"\0") + bytes([number < len(more)]) + bytes(7) for number, part in enumerate(more, 1)
    ]
    return bytes(block) + b"".join(blocks) + padded(data)


def whole(size: int, pieces: Pieces) -> bytes:
    data = bytearray(size)
    for offset, piece in pieces:
        data[offset : offset + len(piece)] = piece
    return bytes(data)


@st.composite
def maps(draw: st.DrawFn) -> tuple[int, Pieces]:
    """A size, and pieces of 512 bytes and more, with holes before, between and behind them, or none."""
    pieces, at = [], 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=60)):
        at += 512 * gap
        pieces.append((at, bytes([len(pieces) % 255 + 1]) * 512 * length))
        at += 512 * length
    at += draw(st.integers(0, 1500))
    if draw(st.booleans()):
        pieces.append((at, b""))  # how GNU tar says that the file ends with a hole
    return at, pieces


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=60, deadline=None)
@given(file=maps(), sizes=st.sampled_from(CUTS))
def test_equals_tarfile(form: str, file: tuple[int, Pieces], sizes: list[int]) -> None:
    data = header() + written(form, *file) + header(name=b"b.txt\0", size=b"%011o\0" % 5) + padded(b"hello") + END
    found = parse(data, sizes)
    assert found == [("a.txt", b"", 0), ("holes.bin", whole(*file), 512), ("b.txt", b"hello", found[2][2])]
    if form != "0.1" or file[1]:  # there tarfile fails on a map of no pieces
        assert found == by_tarfile(data)


@pytest.mark.parametrize(
    "options", [["--format=gnu"], *[["--format=posix", f"--sparse-version={v}"] for v in FORMATS[1:]]]
)
def test_equals_tarfile_on_gnu_tars_archives(tmp_path: Path, options: list[str]) -> None:
    pieces = {
        "ends": [(1 << 20, b"end")], "starts": [(0, b"start" * 100)], "hole": [],
        "many": [(n << 14, bytes([n]) * 4096) for n in range(1, 100)], "n" * 150: [(1 << 20, b"long")],
    }  # fmt: skip
    for name, parts in pieces.items():
        with open(tmp_path / f"{name}.bin", "wb") as file:
            for offset, data in parts:
                file.seek(offset)
                file.write(data)
            file.truncate(2 << 20)
    out = tmp_path / "x.tar"
    names = [f"{name}.bin" for name in pieces]
    command = ["tar", *options, "--hole-detection=raw", "-Scf", str(out), "-C", str(tmp_path), *names]
    subprocess.run(command, check=True)
    assert out.stat().st_size < 1 << 20
    for sizes in CUTS[:2]:
        found = parse(out.read_bytes(), sizes)
        assert [(name, data) for name, data, _ in found] == [(n, (tmp_path / n).read_bytes()) for n in names]
    # Of 0.1 tarfile takes the name from the header where that is long, not the file's own.
    assert [member[1:] for member in found] == [member[1:] for member in by_tarfile(out.read_bytes())]


@pytest.mark.parametrize("form", FORMATS[1:])
def test_a_long_name(form: str) -> None:
    data = written(form, 10, [(4, b"data")], LONG) + END
    assert parse(data) == by_tarfile(data) == [(LONG.decode(), b"\0\0\0\0data\0\0", 0)]


@pytest.mark.parametrize("form", FORMATS)
def test_the_limit_is_for_what_is_expanded(form: str) -> None:
    good = pack(some(2)).data
    large = outcome(good[:-1024] + written(form, 4 << 30, [(1 << 30, b"x" * 600)]) + good)
    assert large.found == some(2) * 2
    assert [type(error) for error in large.errors] == [FieldTooLarge]
    assert "has 4294967296 bytes" in str(large.errors[0])
    assert parse(written(form, 4 << 30, []) + header() + END, admit=lambda n: n if n == "a.txt" else None)[0][1] == b""


WRONG = [
    ([(1024, b"x" * 512), (512, b"x" * 512)], 4096, "does not fit"),  # back
    ([(0, b"x" * 1024), (512, b"x" * 512)], 4096, "does not fit"),  # over each other
    ([(4000, b"x" * 512)], 4096, "does not fit"),  # beyond the end
]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("pieces", "size", "why"), WRONG)
def test_a_map_that_does_not_fit_costs_its_member(form: str, pieces: Pieces, size: int, why: str) -> None:
    good = pack(some(2)).data
    got = outcome(good[:-1024] + written(form, size, pieces) + good)
    assert got.found == some(2) * 2
    (error,) = got.errors
    assert isinstance(error, CorruptShard)
    assert (error.offset, error.last_member) == (3072, "holes.bin")
    assert why in str(error)


@pytest.mark.parametrize(
    "records",
    [
        [b"GNU.sparse.size=10", b"GNU.sparse.map=0"],
        [b"GNU.sparse.size=10", b"GNU.sparse.map=0,-5"],
        [b"GNU.sparse.size=10", b"GNU.sparse.map=0,"],
        [b"GNU.sparse.size=10", b"GNU.sparse.map=0,99"],
        [b"GNU.sparse.size=-1", b"GNU.sparse.map=0,1"],
        [b"GNU.sparse.size=10", b"GNU.sparse.offset=0"],
        [b"GNU.sparse.map=0,1"],
        [b"GNU.sparse.major=2", b"GNU.sparse.minor=0", b"GNU.sparse.realsize=10"],
        [b"GNU.sparse.major=1", b"GNU.sparse.minor=0", b"GNU.sparse.realsize=10"],  # no map before the data
        [b"GNU.sparse.size=10", b"GNU.sparse.map=" + b"0,0," * (1 << 20) + b"0,0,0"],
    ],
    ids=lambda records: b" ".join(records)[:60].decode(),
)
def test_records_that_tell_nothing_good_cost_their_member(records: list[bytes]) -> None:
    good = pack(some(2)).data
    member = header(name=b"GNUSparseFile.0/x\0", size=b"%011o\0" % 5) + padded(b"hello")
    got = outcome(good[:-1024] + pax(b"x", *records) + member + good)
    assert got.found == some(2) * 2
    assert [type(error) for error in got.errors] == [CorruptShard]
    assert "sparse" in str(got.errors[0])


def test_maps_are_bounded() -> None:
    block = bytearray(_old(10, [(0, 1)], b"x", b"holes.bin")[:512])
    block[482] = 1
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    endless = memoryview(b"\0" * 504 + b"\1" + bytes(7))
    pieces = iter([memoryview(bytes(block)), *[endless] * 100_000])
    tracemalloc.start()
    try:
        with pytest.raises(CorruptShard, match="sparse map of more than 1048576 pieces"):
            list(members(lambda: next(pieces, None), URL))
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(CorruptShard, match="as a global PAX header says"):
        parse(pax(b"g", b"GNU.sparse.size=10", b"GNU.sparse.map=0,1") + header() + END)


@pytest.mark.parametrize("form", FORMATS)
def test_a_cut_sparse_member(form: str) -> None:
    data = written(form, 20_000, [(n * 1024, b"x" * 512) for n in range(12)])
    for cut in range(512, len(data), 61):
        with pytest.raises(TruncatedShard):
            list(members(Feed(data[:cut], [1 << 22]), URL))


def test_an_index_refuses_them_by_name() -> None:
    with pytest.raises(CorruptShard, match=r"holes\.bin.*stored sparse"):
        list(scan(Feed(written("1.0", 10, [(0, b"x")]) + END, [1 << 22]), URL))
