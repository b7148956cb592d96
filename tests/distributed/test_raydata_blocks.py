"""Arrow tables of shards, without Ray: their rows are the samples that the reader gives, whatever is wrong there."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.packages import need_package
from tests.servers import Origin
from tests.servers.shards import make_shard, make_tar
from wds_async.distributed.raydata.blocks import BlockOptions, TableBuilder, read_blocks
from wds_async.distributed.raydata.source import balanced
from wds_async.distributed.tasks import Input
from wds_async.errors import ConfigError, CorruptShard, FieldTooLarge, MissingField, ShardFormatError, TruncatedShard
from wds_async.handlers import ignore_and_continue
from wds_async.reading.samples import tarfile_samples
from wds_async.tar.group import expected, samples
from wds_async.tar.parse import member_views
from wds_async.tar.source import ByteSource
from wds_async.writer import TarWriter

need_package("pyarrow")

BLOCK = 64 << 10


def rows_of(urls: list[str], **options: Any) -> list[dict[str, Any]]:
    """The rows of all tables, after a look at the size of each."""
    options = {"block_bytes": BLOCK, **options}
    rows = []
    for table in read_blocks([{"url": url} for url in urls], BlockOptions(**options)):
        assert table.nbytes <= options["block_bytes"] or table.num_rows == 1
        table.validate(full=True)
        rows += table.to_pylist()
    return rows


def samples_of(urls: list[str], **options: Any) -> list[dict[str, Any]]:
    """What the reader gives, as rows."""
    samples = []
    for sample in tarfile_samples(urls, **options):
        fields = {name: value for name, value in sample.items() if name != "__local_path__"}
        samples.append({**fields, "__offset__": sample.offset})  # type: ignore[attr-defined]
    return samples


def without_nulls(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


FIELDS = st.dictionaries(
    st.sampled_from(["jpg", "cls", "seg.png", "JSON", "txt"]),
    st.integers(0, 1500) | st.sampled_from([0, 512, 3000, 9000]),
    min_size=1,
)


@settings(max_examples=60)
@given(shards=st.lists(st.lists(FIELDS, max_size=12), min_size=1, max_size=3), block=st.integers(300, 20_000))
def test_rows_are_the_samples(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[Mapping[str, int]]], block: int
) -> None:
    folder, rng = tmp_path_factory.mktemp("shards"), random.Random(block)
    urls = []
    for number, shard in enumerate(shards):
        content = {
            f"a/{number}.d/{key:04d}": {name: rng.randbytes(size) for name, size in fields.items()}
            for key, fields in enumerate(shard)
        }
        urls.append(str(folder / f"{number}.tar"))
        Path(urls[-1]).write_bytes(make_shard(content))
    transfer = {"budget_bytes": 256 << 10, "part_bytes": 64 << 10}
    rows = rows_of(urls, block_bytes=block, transfer=transfer)
    assert without_nulls(rows) == samples_of(urls)
    rows = rows_of(urls, block_bytes=block, fields=("json", "cls"))
    wanted = {"__key__", "__url__", "__offset__", "json", "cls"}
    assert [list(row) for row in rows] == [["__key__", "__url__", "__offset__", "json", "cls"]] * len(rows)
    assert without_nulls(rows) == [{k: v for k, v in one.items() if k in wanted} for one in samples_of(urls)]


def members(count: int, size: int = 700) -> list[tuple[str, bytes]]:
    """Members of two fields for each of ``count`` samples."""
    fields = ((number, field) for number in range(count) for field in ("bin", "txt"))
    return [(f"{number:05d}.{field}", random.Random(number).randbytes(size)) for number, field in fields]


def damaged(kind: str) -> bytes:
    """A shard of 300 samples with something wrong in its middle."""
    parts = members(300)
    if kind == "duplicate":
        parts[301:301] = [("00150.bin", b"again"), ("00150.BIN", b"and again")]
    elif kind == "missing field":
        del parts[300:303:2]
    elif kind == "names without fields":
        parts[300:300] = [("README", b"x" * 5000), ("__index__.json", b"{}"), ("dir.d/.jpg", b"y")]
    shard = make_tar(parts)
    if kind == "header":
        shard = shard[:307_200] + b"\xff" * 512 + shard[307_712:]
    return shard[:300_000] if kind == "cut" else shard


@pytest.mark.parametrize("kind", ["duplicate", "missing field", "names without fields", "header", "cut"])
@pytest.mark.parametrize("on_corrupt", ["raise", "skip_shard", "resync"])
@pytest.mark.parametrize("block", [3000, BLOCK, 1 << 20])
def test_what_is_dropped_leaves_nothing_behind(tmp_path: Path, kind: str, on_corrupt: str, block: int) -> None:
    urls = [str(tmp_path / f"{number}.tar") for number in range(3)]
    for number, url in enumerate(urls):
        Path(url).write_bytes(damaged(kind) if number == 1 else make_tar(members(40)))
    options: dict[str, Any] = {"handler": ignore_and_continue, "on_corrupt": on_corrupt, "expect": ("bin", "txt")}
    samples = samples_of(urls, **options)
    assert 80 < len(samples) <= 380
    assert rows_of(urls, block_bytes=block, **options) == samples


@pytest.mark.parametrize(
    ("kind", "error"), [("header", CorruptShard), ("cut", TruncatedShard), ("missing field", MissingField)]
)
def test_errors_end_the_tables(tmp_path: Path, kind: str, error: type[Exception]) -> None:
    url = str(tmp_path / "x.tar")
    Path(url).write_bytes(damaged(kind))
    tables = read_blocks([{"url": url}], BlockOptions(3000, expect=("bin", "txt")))
    rows: list[int] = []
    with pytest.raises(error):
        rows.extend(table.num_rows for table in tables)
    assert sum(rows) > 90


def test_a_table_holds_the_memory_that_the_members_were_copied_to() -> None:
    shard = make_tar(members(20))
    pieces = iter([memoryview(shard)])
    builder = TableBuilder(1 << 20)
    list(builder.positions(member_views(ByteSource(lambda: next(pieces, None), "x.tar"))))
    column = builder.columns["bin"]
    column.append(0, 0, 700)
    address = column.memory.obj.ctypes.data
    assert column.cut(1).buffers()[2].address == address
    column.begin(700)
    assert (column.base, column.filled) == (700, 19 * 700)


def test_dropped_samples_take_no_memory(tmp_path: Path) -> None:
    url = str(tmp_path / "x.tar")
    parts: list[tuple[str, bytes]] = []
    for n in range(400):
        parts += (
            [(f"{n:03d}.bin", b"b" * 900), (f"{n:03d}.txt", b"")] if n % 4 == 0 else [(f"{n:03d}.junk", b"j" * 9000)]
        )
    Path(url).write_bytes(make_tar(parts))
    builder = TableBuilder(5000)
    pieces = iter([memoryview(Path(url).read_bytes())])
    members = builder.positions(member_views(ByteSource(lambda: next(pieces, None), url)))
    rows = 0
    for sample in samples(members, url, expect=expected(("bin",)), on_error=lambda _: True):
        table = builder.add(sample)
        rows += 0 if table is None else table.num_rows
        junk = builder.columns.get("junk")
        assert junk is None or junk.filled <= 20 * 9000
    last = builder.cut()
    assert last is not None
    assert rows + last.num_rows == 100


def test_bytes_that_cross_pieces_of_the_engine(origin: Origin) -> None:
    content = {f"{n:03d}": {"bin": random.Random(n).randbytes(n * 3001), "cls": b"1"} for n in range(40)}
    url = origin.add("x.tar", make_shard(content))
    rows = rows_of([url], transfer={"budget_bytes": 256 << 10, "part_bytes": 64 << 10})
    assert {row["__key__"]: {"bin": row["bin"], "cls": row["cls"]} for row in rows} == content


@pytest.mark.parametrize("size", [900, 100_000])
def test_one_503_at_a_random_place_loses_nothing(size: int) -> None:
    samples = 4_000_000 // max(size, 4000)
    content = {f"{n:05d}": {"bin": bytes(size)} for n in range(samples)}
    shards = {f"/{number}.tar": make_shard(content) for number in range(2)}
    transfer = {"budget_bytes": 1 << 20, "part_bytes": 256 << 10}
    for run in range(12):
        with Origin(shards, seed=run) as origin:
            origin.behave(status=503, skip=random.Random(run).randrange(8), times=1)
            rows = rows_of([origin.url("0.tar"), origin.url("1.tar")], block_bytes=1 << 20, transfer=transfer)
        assert [row["__key__"] for row in rows] == [*content, *content], f"run {run}"
        assert all(row["bin"] == bytes(size) for row in rows)
        assert any(sent.status == 503 for sent in origin.sent)


_PEAK = """\
import sys
from pathlib import Path
from wds_async.distributed.raydata.blocks import BlockOptions, read_blocks

def peak():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10

options = BlockOptions(8 << 20, transfer={"budget_bytes": 32 << 20})
small, big = sys.argv[1:]
list(read_blocks([{"url": small}], options))
before, rows = peak(), sum(table.num_rows for table in read_blocks([{"url": big}], options))
print(rows, peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_shard(tmp_path: Path) -> None:
    for name, count in (("small", 2), ("big", 400)):
        with TarWriter(tmp_path / f"{name}.tar") as writer:
            for n in range(count):
                writer.write({"__key__": f"{n:03d}", "bin": bytes(1 << 20)})
    paths = [str(tmp_path / "small.tar"), str(tmp_path / "big.tar")]
    done = subprocess.run([sys.executable, "-c", _PEAK, *paths], capture_output=True, text=True, check=True)
    rows, grown = map(int, done.stdout.split())
    assert rows == 400
    assert grown < 100 << 20  # the budget and a few blocks, of a shard of 400 MiB


def test_a_url_that_is_no_text_is_named(tmp_path: Path) -> None:
    url = tmp_path / "x\udcff.tar"
    url.write_bytes(make_tar([("a.txt", b"1")]))
    with pytest.raises(ShardFormatError, match=r"the URL '.*x\\udcff\.tar' is not UTF-8"):
        rows_of([str(url)])


def test_urls_and_keys_in_other_scripts_count_as_their_bytes(tmp_path: Path) -> None:
    url = tmp_path / ("数" * 60 + ".tar")
    url.write_bytes(make_tar((f"{'鍵' * 20}{n}.txt", b"1") for n in range(100)))
    assert len(rows_of([str(url)], block_bytes=2000)) == 100  # it compares the bytes of each table


def test_a_key_that_is_no_text_is_named(tmp_path: Path) -> None:
    url = tmp_path / "x.tar"
    url.write_bytes(make_tar([("a.txt", b"1"), ("b\udcff.txt", b"2")]))
    with pytest.raises(ShardFormatError, match=r"x\.tar: the key 'b\\udcff' is not UTF-8"):
        rows_of([str(url)])


def test_too_many_columns_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    url = tmp_path / "x.tar"
    url.write_bytes(make_tar((f"a{n}.x{n}", b"1") for n in range(1100)))
    with pytest.raises(ShardFormatError, match="name the fields"):
        rows_of([str(url)])
    assert len(rows_of([str(url)], fields=("x7",))) == 1100


def test_a_field_that_is_too_large_is_an_error(tmp_path: Path) -> None:
    url = tmp_path / "x.tar"
    url.write_bytes(make_tar(members(3)))
    with pytest.raises(FieldTooLarge):
        rows_of([str(url)], max_field_bytes=699)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_bytes": 0}, "block_bytes=0"),
        ({"fields": ("JPG",)}, "'JPG' is no field"),
        ({"fields": ("__key__",)}, "is no field"),
        ({"fields": ("jpg", "jpg")}, "named twice"),
        ({"max_field_bytes": 1 << 31}, "less than 2 GiB"),
        ({"on_corrupt": "hope"}, "on_corrupt"),
        ({"verify": "sometimes"}, "verify"),
        ({"fields": ("jpg",), "expect": ("cls",)}, "no sample has the field"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BlockOptions(**{"block_bytes": BLOCK, **options}).check()


def _sums(sizes: list[int | None], count: int) -> list[int]:
    groups = balanced([Input(str(number), size) for number, size in enumerate(sizes)], count)
    assert [entry.url for group in groups for entry in group] == [str(number) for number in range(len(sizes))]
    assert all(groups)
    return [sum(entry.size or 0 for entry in group) for group in groups]


@pytest.mark.parametrize(
    ("sizes", "count", "sums"),
    [
        ([5, 5, 5, 5], 2, [10, 10]),
        ([1, 1, 1, 9], 2, [3, 9]),
        ([9, 1, 1, 1], 3, [9, 3]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 3, [15, 13, 17]),
        ([0, 0, 0], 3, [0]),
        ([3], 7, [3]),
    ],
)
def test_groups_are_balanced(sizes: list[int | None], count: int, sums: list[int]) -> None:
    assert _sums(sizes, count) == sums


def test_shards_of_unknown_size_count_as_the_mean() -> None:
    assert len(_sums([10, None, 10, None], 4)) == 4
    assert len(_sums([None] * 6, 3)) == 3


def test_the_largest_group_is_as_small_as_it_can_be() -> None:
    rng = random.Random(5)
    for _ in range(200):
        sizes = [rng.randrange(1, 20) for _ in range(rng.randrange(1, 8))]
        count = rng.randrange(1, 5)
        best = min(_largest(sizes, count))
        assert max(_sums(list(sizes), count)) == best


def _largest(sizes: list[int], count: int) -> list[int]:
    """The largest sum of each way to cut ``sizes`` into at most ``count`` runs."""
    if count == 1 or len(sizes) == 1:
        return [sum(sizes)]
    cuts = [max(sum(sizes[:at]), rest) for at in range(1, len(sizes)) for rest in _largest(sizes[at:], count - 1)]
    return [sum(sizes), *cuts]
