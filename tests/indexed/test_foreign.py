"""Indexes of other programs, as `IndexedDataset` and ``WebDataset(index=True)`` read them and ``wds-async index``
writes them, held against DALI's and Energon's own code where that is installed (neither is in the test extra)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.servers import Nginx, make_tar
from wds_async.errors import ConfigError, ObjectChanged, ShardFormatError, ShardNotFound
from wds_async.indexed import places
from wds_async.indexed.scan import scan_shards

SHARDS, SAMPLES = 3, 22


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WIDS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Shards without an index, with names that need headers of their own, and empty fields."""
    (tmp_path / "d").mkdir()
    with wds.ShardWriter(f"{tmp_path}/d/s-%03d.tar", maxcount=8, verbose=0) as sink:
        for n in range(SAMPLES):
            key = f"{n:03d}/{'k' * 120 if n % 5 == 4 else n}"
            sink.write({"__key__": key, "txt": "t" * (n * 90), "seg.png": bytes(n), "cls": n})
    paths = sorted((tmp_path / "d").glob("*.tar"))
    assert len(paths) == SHARDS
    return paths


def write_indexes(paths: list[Path], kind: str) -> None:
    """Write indexes beside ``paths``, as `wds-async index` does; "dali 1.1": those of DALI without names."""
    scanned = {one.url: one for one in scan_shards(map(str, paths), dali=True)}
    kind, _, version = kind.partition(" ")
    for path, place in zip(paths, places.places([str(path) for path in paths], kind), strict=True):
        one = scanned[str(path)]
        assert one.index is not None
        data = places.file_bytes(kind, one.index, str(path), one.dali)
        if version:
            words = [line.split(b" ") for line in data.splitlines()[1:]]
            lines = [b" ".join(word for n, word in enumerate(line) if n % 4 != 3) for line in words]
            data = b"\n".join([b"v1.1 %d" % len(lines), *lines, b""])
        Path(place).write_bytes(data)


def without_place(samples: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in sample.items() if name != "__local_path__"} for sample in samples]


def streamed(urls: list[str]) -> list[dict[str, Any]]:
    with wds.WebDataset(urls, shardshuffle=False) as dataset:
        return without_place(dataset)


@pytest.mark.parametrize("kind", ["dali", "dali 1.1", "energon"])
def test_an_index_of_another_program_is_found_and_is_enough(kind: str, shards: list[Path]) -> None:
    urls = [str(path) for path in shards]
    with pytest.raises(ShardNotFound, match=r"s-000\.tar has no index"):
        wds.IndexedDataset(urls)
    write_indexes(shards, kind)
    expected = streamed(urls)
    with wds.IndexedDataset(urls) as dataset:
        assert dataset[::-1] == expected[::-1]
    with wds.WebDataset(urls, index=True, canonical=4, shardshuffle=False, equal="pad") as canonical:
        assert without_place(canonical)[:SAMPLES] == expected
    with wds.WebDataset(urls, index=True, split="bytes", shardshuffle=False) as cut:
        assert without_place(cut) == expected


def test_our_own_index_comes_first_and_each_shard_may_have_another(shards: list[Path]) -> None:
    urls = [str(path) for path in shards]
    for path, kind in zip(shards, ("dali", "energon", "wds"), strict=True):
        write_indexes([path], kind)
    shards[2].with_suffix(".idx").write_text("v1.2 7\n")  # never read
    with wds.IndexedDataset(urls) as dataset:
        assert dataset[:] == streamed(urls)


@pytest.mark.parametrize("kind", ["dali", "energon"])
def test_a_shard_replaced_while_it_is_read_is_an_error(
    kind: str, shards: list[Path], nginx: Callable[..., Nginx], tmp_path: Path
) -> None:
    write_indexes(shards, kind)
    server = nginx(shards[0].parent)
    urls = [server.url(path.name) for path in shards]
    with wds.IndexedDataset(urls) as dataset:
        assert dataset[0]["cls"] == b"0"
        shards[0].write_bytes(shards[0].read_bytes() + bytes(512))
        with pytest.raises(ObjectChanged, match=r"s-000\.tar"):
            dataset[[1, 7]]


@pytest.mark.parametrize(("kind", "where"), [("dali", r"s-001\.idx, line 9"), ("energon", r"s-001\.tar\.idx, byte 64")])
def test_an_index_of_a_longer_shard_is_refused_with_its_line(kind: str, where: str, shards: list[Path]) -> None:
    write_indexes(shards, kind)
    (index,) = (one.index for one in scan_shards([str(shards[1])]))
    assert index is not None
    shards[1].write_bytes(shards[1].read_bytes()[: index.stop(7) - 512])
    urls = [str(path) for path in shards]
    why = rf"{where}: a sample ends at byte .* index of another shard"
    with pytest.raises(ShardFormatError, match=why):
        wds.IndexedDataset(urls)
    with pytest.raises(ShardFormatError, match=why):
        wds.WebDataset(urls, index=True, canonical=2, shardshuffle=False)


def test_members_that_are_samples_for_dali_only(tmp_path: Path) -> None:
    """Its tool takes files without a dot, and those that describe the shard, for samples."""
    path = tmp_path / "x.tar"
    path.write_bytes(make_tar([("a.txt", b"1"), ("__meta__/x.json", b"{}"), ("README", b"2"), ("b.txt", b"3")]))
    rows = ["txt 512 1 a.txt", "json 1536 2 __meta__/x.json", "README 2560 1 README", "txt 3584 1 b.txt"]
    path.with_suffix(".idx").write_text("\n".join(["v1.2 4", *rows, ""]))
    with wds.IndexedDataset(path) as dataset:
        assert [sample["txt"] for sample in dataset[:]] == [b"1", b"3"]


# ------------------------------------------------------------------ JSON lists of shards


def list_of(shards: list[Path], **changed: int) -> Path:
    counts = dict(zip((path.name for path in shards), (8, 8, 6), strict=True)) | changed
    place = shards[0].parent / "train.json"
    entries = [{"url": name, "nsamples": count} for name, count in counts.items()]
    place.write_text(json.dumps({"wids_version": 1, "shardlist": entries}, indent=1))
    return place


def test_a_list_alone_has_headers_read_once(shards: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    write_indexes(shards[:1], "dali")
    expected = streamed([str(path) for path in shards])
    for logged in (1, 0):  # the second time from the cache folder
        caplog.clear()
        with wds.IndexedDataset(list_of(shards)) as dataset:
            assert dataset[:] == expected
        assert sum("reading the headers of 2 shards" in text for text in caplog.messages) == logged


def test_a_list_with_other_counts_is_refused(shards: list[Path]) -> None:
    place = list_of(shards, **{"s-001.tar": 9})
    with pytest.raises(ShardFormatError, match=r"train\.json: it has 9 samples of .*s-001\.tar, whose index has 8"):
        wds.IndexedDataset(place)
    place.write_text('{"wids_version": 1, "shardlist": [\n{"url": 3}]}')
    with pytest.raises(ConfigError, match=r"train\.json.*line 2"):
        wds.IndexedDataset(str(place))


# ------------------------------------------------------------------ their own code


def test_wds2idx_of_dali_writes_the_same_bytes(shards: list[Path], tmp_path: Path) -> None:
    wds2idx = pytest.importorskip("wds2idx", reason="wds2idx.py of nvidia-dali-cuda120 is not on the path")
    if shutil.which("tar") is None:
        pytest.skip("wds2idx runs tar")
    folders = make_tar([("a/1.txt", b"1"), ("a/1.cls", b"2" * 600), ("b/ü.seg.png", b""), ("b/3.txt", b"4")])
    (tmp_path / "d" / "t.tar").write_bytes(folders)
    shards = [*shards, tmp_path / "d" / "t.tar"]
    with wds.TarWriter(tmp_path / "d" / "w.tar", index="dali") as sink:
        sink.write({"__key__": "1", "txt": "text", "cls": 3})
        sink.write({"__key__": "2", "txt": "t" * 600})
    write_indexes(shards, "dali")
    for path in (*shards, tmp_path / "d" / "w.tar"):
        ours = path.with_suffix(".idx").read_bytes()
        with wds2idx.IndexCreator(str(path), str(path.with_suffix(".idx")), verbose=False) as creator:
            creator.create_index()
        assert path.with_suffix(".idx").read_bytes() == ours


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["dali", "dali 1.1"])
def test_dali_reads_our_index_without_a_gpu(kind: str, shards: list[Path]) -> None:
    dali = pytest.importorskip("nvidia.dali", reason="nvidia-dali-cuda120 is not installed")
    write_indexes(shards, kind)

    @dali.pipeline_def(batch_size=SAMPLES, num_threads=1, device_id=None)
    def pipeline() -> Any:
        files = {"paths": list(map(str, shards)), "index_paths": [str(path.with_suffix(".idx")) for path in shards]}
        return dali.fn.readers.webdataset(**files, ext=["cls"], missing_component_behavior="error")

    (labels,) = pipeline().run()
    assert [bytes(labels.at(n)) for n in range(SAMPLES)] == [str(n).encode() for n in range(SAMPLES)]


@pytest.mark.filterwarnings("ignore")
def test_energon_prepares_the_same_bytes_and_reads_ours(shards: list[Path]) -> None:
    pytest.importorskip("megatron.energon", reason="megatron-energon is not installed")
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.webdataset.itar import CachedItarOffsetReader, open_itar
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    names = [path.name for path in shards]
    WebdatasetPreparator.prepare_dataset(EPath(shards[0].parent), names, split_parts_ratio=[("train", 1.0)], workers=1)
    with wds.IndexedDataset([str(path) for path in shards]) as dataset:
        expected = dataset[:]
    assert expected == streamed([str(path) for path in shards])
    theirs = [Path(f"{path}.idx").read_bytes() for path in shards]
    write_indexes(shards, "energon")
    assert [Path(f"{path}.idx").read_bytes() for path in shards] == theirs
    reader = CachedItarOffsetReader(cache_size=4)
    for number in (0, 3, 7):
        start, size = reader.get_itar_byte_offset(EPath(shards[1]), number)
        with open_itar(EPath(shards[1]), start, size) as tar:
            fields = {}
            for _ in range(3):
                member = tar.next()
                fields[member.name.partition(".")[2]] = tar.extractfile(member).read()
        assert fields == {name: expected[8 + number][name] for name in ("seg.png", "cls", "txt")}
