"""Side by side with webdataset 1.0.2: the same stages over the same input give the same stream."""

from __future__ import annotations

import inspect
import io
import pickle
import random
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wds_async as ours
from tests.servers import make_shards, make_tar

theirs = pytest.importorskip("webdataset")

URLS = [f"{i:03}.tar" for i in range(30)]


def same(a: Any, b: Any) -> bool:
    """Equal, in type too, arrays and tensors included."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray):
        return type(b) is np.ndarray and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return type(a) is type(b) and bool(a == b)


def outcome(iterator: Any) -> list[Any]:
    """What came out, and the builtin kind of the error that ended it."""
    seen: list[Any] = []
    try:
        for item in iterator():
            seen.append(item)
    except (ValueError, KeyError, AssertionError) as exn:
        seen.append("KeyError" if isinstance(exn, KeyError) else "error")
    return seen


def samples() -> list[dict[str, Any]]:
    rng = random.Random(0)
    return [
        {
            "__key__": f"k{i}",
            "__url__": "u.tar",
            "jpg": rng.randbytes(3),
            "cls": i,
            "w": i / 2,
            "ok": i % 2 == 0,
            "v": np.full((2, 2), i, "f4"),
        }
        for i in range(47)
    ]


def tuples() -> list[tuple[Any, ...]]:
    return [(s["cls"], s["w"], s["jpg"], s["v"]) for s in samples()]


def odd_fails(x: Any) -> Any:
    if x["cls"] % 2:
        raise ValueError(x["cls"])
    return x


STAGES: dict[str, tuple[Any, Any]] = {
    "shuffle": (samples, lambda w: w.shuffle(10, seed=3)),
    "shuffle, initial 1": (samples, lambda w: w.shuffle(20, initial=1, seed=3)),
    "shuffle, larger than the data": (samples, lambda w: w.shuffle(1000, seed=0)),
    "shuffle, rng": (samples, lambda w: w.shuffle(10, rng=random.Random(5))),
    "shuffle of one": (samples, lambda w: w.shuffle(1, seed=3)),
    "detshuffle": (samples, lambda w: w.detshuffle(10, seed=3)),
    "detshuffle, later epoch": (samples, lambda w: w.detshuffle(10, 5, seed=3, epoch=6)),
    "select": (samples, lambda w: w.select(lambda s: s["ok"])),
    "map": (samples, lambda w: w.map(lambda s: {"n": s["cls"]})),
    "map, dropping": (samples, lambda w: w.map(lambda s: s["cls"] if s["ok"] else None)),
    "map, a dict without a key": (lambda: [{"a": 1}], lambda w: w.map(dict)),
    "map, handler": (samples, lambda w: w.map(odd_fails, handler=w.ignore_and_continue)),
    "map, stopping": (samples, lambda w: w.map(odd_fails, handler=w.ignore_and_stop)),
    "map, raising": (samples, lambda w: w.map(odd_fails)),
    "map_dict": (samples, lambda w: w.map_dict(cls=str, w=int)),
    "map_dict, missing": (samples, lambda w: w.map_dict(nothing=str)),
    "map_tuple": (tuples, lambda w: w.map_tuple(str, None, len)),
    "map_tuple, too many": (tuples, lambda w: w.map_tuple(None, None, None, None, str)),
    "to_tuple": (samples, lambda w: w.to_tuple("png;jpg", "cls")),
    "to_tuple, one string": (samples, lambda w: w.to_tuple("__key__ png;jpg cls")),
    "to_tuple, missing": (samples, lambda w: w.to_tuple("png", "cls")),
    "to_tuple, missing is fine": (samples, lambda w: w.to_tuple("png", "cls", missing_is_error=False)),
    "to_tuple, none": (lambda: [{"a": None}], lambda w: w.to_tuple("a")),
    "to_tuple, handler": (
        lambda: [{"a": i} if i % 3 else {"b": i} for i in range(9)],
        lambda w: w.to_tuple("a", handler=w.ignore_and_continue),
    ),
    "rename": (samples, lambda w: w.rename(image="png;jpg", label="cls")),
    "rename, dropping the rest": (samples, lambda w: w.rename(image="jpg", keep=False)),
    "rename, missing": (samples, lambda w: w.rename(image="png")),
    "rename, swapping": (samples, lambda w: w.rename(jpg="cls", cls="jpg")),
    "rename_keys": (samples, lambda w: w.rename_keys(image="j*")),
    "rename_keys, keeping": (samples, lambda w: w.rename_keys(("image", "j*"), keep_unselected=True)),
    "rename_keys, no match": (samples, lambda w: w.rename_keys(image="x*")),
    "rename_keys, duplicates": (samples, lambda w: w.rename_keys(x="[a-z]*")),
    "rename_keys, first stays": (samples, lambda w: w.rename_keys(x="[a-z]*", duplicate_is_error=False)),
    "extract_keys": (samples, lambda w: w.extract_keys("*.jpg", "png;cls")),
    "extract_keys, missing": (samples, lambda w: w.extract_keys("png")),
    "extract_keys, ignoring": (samples, lambda w: w.extract_keys("png", "cls", ignore_missing=True)),
    "extract_keys, several": (samples, lambda w: w.extract_keys("*")),
    "associate": (samples, lambda w: w.associate({"k1": {"t": 1}})),
    "batched dicts": (samples, lambda w: w.batched(10)),
    "batched tuples": (tuples, lambda w: w.batched(10)),
    "batched, no partial": (tuples, lambda w: w.batched(10, partial=False)),
    "batched, exact": (lambda: tuples()[:40], lambda w: w.batched(10, partial=False)),
    "batched, lists": (samples, lambda w: w.batched(10, collation_fn=None)),
    "batched, unequal shapes": (lambda: [(np.zeros(2),), (np.zeros(3),)], lambda w: w.batched(2)),
    "batched, other fields": (lambda: [{"a": 1}, {"b": 1}], lambda w: w.batched(2)),
    "slice": (samples, lambda w: w.slice(3)),
    "slice, stepping": (samples, lambda w: w.slice(3, 30, 4)),
    "unbatched": (lambda: [((1, 2), ["a", "b"]), {"x": [1, 2], "y": "ab"}], lambda w: w.unbatched()),
    "unbatched, unequal": (lambda: [{"x": [1, 2], "y": "a"}], lambda w: w.unbatched()),
    "unlisted": (lambda: [[1, 2], [3]], lambda w: w.filters.unlisted()),
    "non_empty": (samples, lambda w: w.non_empty),
    "non_empty, empty": (list, lambda w: w.non_empty),
}


@pytest.mark.parametrize("name", STAGES)
def test_stage(name: str) -> None:
    make, stage = STAGES[name]

    def run(wds: Any) -> list[Any]:
        pipeline = wds.DataPipeline(lambda: iter(make()), stage(wds))
        return [outcome(lambda: pipeline) for _ in range(2)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, got = run(theirs), run(ours)
    assert expected[0], "a comparison of nothing with nothing holds nothing"
    assert same(expected, got)


@settings(max_examples=150)
@given(st.integers(0, 80), st.integers(1, 90), st.integers(0, 90), st.integers(0, 1 << 40))
def test_shuffle_orders(n: int, bufsize: int, initial: int, seed: int) -> None:
    def run(wds: Any) -> list[int]:
        return list(wds.filters._shuffle(iter(range(n)), bufsize, initial, seed=seed))

    assert run(ours) == run(theirs)


@pytest.mark.parametrize("combine", [{}, {"combine_tensors": False}, {"combine_scalars": False}])
def test_collation(combine: dict[str, bool]) -> None:
    import torch

    rows = [(i, i / 2, i > 1, str(i), np.full(3, i), np.int64(i), None, [i]) for i in range(4)]
    dicts = [{"x": i, "k": str(i)} for i in range(4)]
    for batch in (rows, [list(r) for r in rows], dicts):
        assert same(ours.default_collation_fn(batch, **combine), theirs.filters.default_collation_fn(batch, **combine))
    tensors = [(torch.full((2,), i),) for i in range(3)]
    mine, other = (f(tensors, **combine)[0] for f in (ours.default_collation_fn, theirs.filters.default_collation_fn))
    assert type(mine) is type(other)
    assert all(bool((a == b).all()) for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize("seed", [None, 0, 17, "text"])
def test_simple_shard_list(seed: Any) -> None:
    assert list(ours.SimpleShardList(URLS, seed=seed)) == list(theirs.SimpleShardList(URLS, seed=seed))


@pytest.mark.parametrize("seed", [0, 5])
def test_deterministic_resampling(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, worker in ((0, 0), (3, 2)):
        for name, value in {"RANK": rank, "WORLD_SIZE": 4, "WORKER": worker, "NUM_WORKERS": 4}.items():
            monkeypatch.setenv(name, str(value))
        lists = [w.ResampledShards(URLS, nshards=50, seed=seed, deterministic=True) for w in (ours, theirs)]
        for _ in range(3):
            assert list(lists[0]) == list(lists[1])
        assert lists[0].epoch == lists[1].epoch == 2


@pytest.mark.parametrize("splitter", ["split_by_node", "split_by_worker"])
def test_splitters(splitter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": 3, "WORKER": 2, "NUM_WORKERS": 4}.items():
        monkeypatch.setenv(name, str(value))
    assert list(getattr(ours, splitter)(iter(URLS))) == list(getattr(theirs, splitter)(iter(URLS)))
    assert ours.utils.pytorch_worker_info() == theirs.utils.pytorch_worker_info()
    assert ours.utils.pytorch_worker_seed() == theirs.utils.pytorch_worker_seed()


@given(st.lists(st.integers(0, 1 << 60), min_size=1))
def test_seeds_of_integers(values: list[int]) -> None:
    assert ours.utils.make_seed(*values) == theirs.utils.make_seed(*values)


def test_stages_look_alike() -> None:
    for make in (
        lambda w: w.shuffle(10, seed=1),
        lambda w: w.map(print),
        lambda w: w.batched(3, partial=False),
        lambda w: w.slice(3),
        lambda w: w.to_tuple("a", "b"),
    ):
        assert str(make(ours)) == str(make(theirs)) == str(pickle.loads(pickle.dumps(make(ours))))


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p,
        lambda p: p.with_epoch(193),
        lambda p: p.with_epoch(5),
        lambda p: p.with_epoch(nbatches=50),
        lambda p: p.repeat(3),
        lambda p: p.repeat(3, nbatches=100),
        lambda p: p.repeat(nbatches=60),
        lambda p: p.compose(lambda source: (2 * x for x in source)),
    ],
)
def test_epochs(change: Any) -> None:
    runs = []
    for wds in (ours, theirs):
        pipeline = change(wds.DataPipeline(lambda: iter(range(47)), lambda source: (x + 1 for x in source)))
        runs.append([list(pipeline) for _ in range(3)])
    assert runs[0] == runs[1]


def read(wds: Any, urls: Any, steps: Any = lambda d: d, **kw: Any) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # webdataset leaves streams open
        return list(steps(wds.WebDataset(urls, **kw)))


@pytest.fixture
def shards(tmp_path: Path) -> str:
    make_shards(tmp_path, 5, 9)
    return str(tmp_path / "shard-{000000..000004}.tar")


@pytest.mark.parametrize(
    "steps",
    [
        lambda d: d,
        lambda d: d.decode(),
        lambda d: d.decode("rgb8"),
        lambda d: d.decode("rgb").to_tuple("png", "cls").batched(4),
        lambda d: d.shuffle(20, seed=1).decode("l8").rename(image="png").slice(30),
        lambda d: d.decode("torchrgb8", partial=True).map_dict(png=lambda x: x.numpy()).batched(7, partial=False),
        lambda d: d.shuffle(5, seed=2).to_tuple("__key__", "json").with_epoch(193),
        lambda d: d.batched(4).unbatched().select(lambda s: s["cls"] != b"3"),
    ],
)
def test_datasets(shards: str, steps: Any) -> None:
    expected, got = read(theirs, shards, steps, shardshuffle=False), read(ours, shards, steps, shardshuffle=False)
    assert len(expected) > 5
    assert all(same(dict(a) if isinstance(a, dict) else a, dict(b) if isinstance(b, dict) else b)
               for a, b in zip(without_path(expected), without_path(got), strict=True))  # fmt: skip


def without_path(items: list[Any]) -> Iterator[Any]:
    for item in items:
        yield {k: v for k, v in item.items() if k != "__local_path__"} if isinstance(item, dict) else item


def test_local_path(shards: str) -> None:
    mine, other = read(ours, shards, shardshuffle=False), read(theirs, shards, shardshuffle=False)
    assert [s.get("__local_path__") for s in mine] == [s.get("__local_path__") for s in other]


@pytest.mark.parametrize("detshuffle", [True, False])
def test_shard_order_of_a_seed(shards: str, detshuffle: bool) -> None:
    first = [
        [s["__key__"] for s in read(w, shards, shardshuffle=3, seed=11, detshuffle=detshuffle)] for w in (ours, theirs)
    ]
    assert first[0] == first[1]


def test_file_selection(shards: str) -> None:
    arguments = {
        "select_files": lambda name: name.endswith((".label", ".json")),
        "rename_files": lambda name: name.replace(".cls", ".label"),
        "shardshuffle": False,
    }
    assert list(without_path(read(ours, shards, **arguments))) == list(without_path(read(theirs, shards, **arguments)))


ODD_NAMES = [
    "a/b.c/001.x.JPG", "a/b.c/001.cls", "./002.cls", "noext", ".hidden", "d/.hidden", "__meta__/a.json", "__k__.txt",
    "003.", "004..x", "005.TXT", "005.cls", "006.a.b.c", "dir/007.x", "007.x", "007.y", "__index__", "0 8.txt",
    "é.txt",
]  # fmt: skip


def test_odd_names(tmp_path: Path) -> None:
    (tmp_path / "odd.tar").write_bytes(make_tar([(n, n.encode()) for n in ODD_NAMES], format=tarfile.PAX_FORMAT))
    runs = [list(without_path(read(w, str(tmp_path / "odd.tar"), shardshuffle=False))) for w in (ours, theirs)]
    assert runs[0] == runs[1]


def test_links_and_folders_are_passed_over(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind in (
            ("d", tarfile.DIRTYPE),
            ("d/a.txt", None),
            ("d/a.lnk", tarfile.SYMTYPE),
            ("d/a.cls", None),
        ):
            info = tarfile.TarInfo(name)
            info.type = kind or tarfile.REGTYPE
            info.linkname = "d/a.txt" if kind == tarfile.SYMTYPE else ""
            info.size = 0 if kind else 3
            archive.addfile(info, io.BytesIO(b"abc"))
    (tmp_path / "x.tar").write_bytes(buffer.getvalue())
    runs = [list(without_path(read(w, str(tmp_path / "x.tar"), shardshuffle=False))) for w in (ours, theirs)]
    assert runs[0] == runs[1]
    assert len(runs[0]) == 1


def test_signatures_accept_what_theirs_accept() -> None:
    compared = 0
    for name in ours.__all__:
        mine, other = (getattr(getattr(w, name, None), "f", getattr(w, name, None)) for w in (ours, theirs))
        if not callable(mine) or not callable(other) or name in ("DecodingError", "slice"):
            continue
        accepted, wanted = inspect.signature(mine).parameters, inspect.signature(other).parameters
        if any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
            continue
        names = {p.name for p in wanted.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} - {"src"}
        assert names <= set(accepted), name
        compared += 1
    assert compared > 30


LATER = {"lmdb_cached", "xdecode"}
INNER = {"create_url_iterator", "update_cache_info"}  # steps of WebDataset's constructor
OF_TORCH = {"functions", "register_datapipe_as_function", "register_function"}  # of older IterableDatasets
METHODS = {n for n in dir(theirs.WebDataset) if not n.startswith("_")} - LATER - INNER - OF_TORCH


@pytest.mark.parametrize("name", sorted(METHODS))
def test_methods(name: str) -> None:
    mine, other = getattr(ours.WebDataset, name), getattr(theirs.WebDataset, name)
    assert set(inspect.signature(other).parameters) - {"args", "kw"} <= set(inspect.signature(mine).parameters)
