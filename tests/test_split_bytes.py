"""``split="bytes"`` over a real HTTP server: every sample comes once, with fewer shards than workers too."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import logging
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin
from wds_async.checkpoint.merge import merge_states
from wds_async.dataset import WebDataset
from wds_async.errors import ConfigError, ObjectChanged, ShardCutError, ShardNotFound
from wds_async.handlers import warn_and_continue
from wds_async.indexed.scan import scan_shards
from wds_async.shardlists import split_by_node

KEYS = [f"{n:05d}" for n in range(600)]


def archive(keys: list[str], fields: dict[str, bytes] | None = None, format: int = tarfile.GNU_FORMAT) -> bytes:
    """A shard whose samples differ in size: from nothing to some kilobytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as tar:
        for n, key in enumerate(keys):
            for field, data in (fields or {"bin": key.encode() * (n % 7 * 100), "cls": b"1"}).items():
                info = tarfile.TarInfo(f"{key}.{field}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


SHARDS = [archive(KEYS[:100]), archive(KEYS[100:500]), archive(KEYS[500:])]


@pytest.fixture
def shards(origin: Origin) -> str:
    """Three shards of different sizes."""
    for n, content in enumerate(SHARDS):
        origin.add(f"/{n}.tar", content)
    return f"{origin.base}/{{0..2}}.tar"


def each(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], urls: Any, **kw: Any) -> list[list[str]]:
    """The keys that each worker of each rank gets."""
    found = []
    kw = {"shardshuffle": False, "empty_check": False, **kw}
    for rank, worker in itertools.product(range(shape[0]), range(shape[1])):
        place = {"RANK": rank, "WORLD_SIZE": shape[0], "WORKER": worker, "NUM_WORKERS": shape[1]}
        for name, value in place.items():
            monkeypatch.setenv(name, str(value))
        with WebDataset(urls, split="bytes", **kw) as dataset:
            found.append([sample["__key__"] for sample in dataset])
    return found


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 2), (3, 5), (8, 8), (40, 5)], ids=str)
def test_every_sample_comes_once(shape: tuple[int, int], shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = each(monkeypatch, shape, shards)
    assert list(itertools.chain(*found)) == KEYS
    if len(found) <= 64:
        assert all(found)


@pytest.mark.parametrize("number", [1, 2])
def test_fewer_shards_than_workers(number: int, shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads its own bytes, and little more."""
    urls = [shards.replace("{0..2}", str(n)) for n in range(number)]
    found = each(monkeypatch, (2, 4), urls, empty_check=True)
    assert list(itertools.chain(*found)) == KEYS[: 100 + 400 * (number - 1)]
    sizes = [len(keys) for keys in found]
    assert max(sizes) <= 2 * min(sizes)


def test_no_byte_is_fetched_for_nothing(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the span: 64 KiB before it, and behind it 1 MiB, and 2 MiB where that is not enough."""
    origin.add("/0.tar", archive(KEYS[:16], {"bin": bytes(1 << 20)}))
    monkeypatch.setenv("WDS_PART_SIZE", "1M")
    each(monkeypatch, (1, 1), f"{origin.base}/0.tar")
    origin.forget()
    found = each(monkeypatch, (1, 4), f"{origin.base}/0.tar")
    assert list(map(len, found)) == [6, 4, 4, 2]  # the sample at a cut is the left one's
    assert sum(sent.body_bytes for sent in origin.sent) < (16 + 3 * 4) << 20


@pytest.mark.parametrize("shuffle", [3])
def test_an_epoch_is_cut_in_its_own_order(shuffle: int, shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = []
    for epoch in range(3):
        monkeypatch.setenv("WDS_EPOCH", str(epoch))
        found = each(monkeypatch, (2, 2), shards, shardshuffle=shuffle, seed=4)
        assert Counter(itertools.chain(*found)) == Counter(KEYS)
        orders.append(found)
    assert orders[0] != orders[1] or orders[1] != orders[2]


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
def test_local_files(format: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0.tar").write_bytes(archive([f"{'d' * 60}/{key}" for key in KEYS[:50]], format=format))
    found = each(monkeypatch, (2, 3), str(tmp_path / "0.tar"))
    assert [key[-5:] for key in itertools.chain(*found)] == KEYS[:50]


def test_the_members_and_keys_that_a_program_chooses(shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of the cut goes by the same names and keys as the samples."""
    chosen: Any = {
        "select_files": lambda name: not name.endswith(".cls"),
        "rename_files": lambda name: "x" + name,
        "keys": lambda name: (name[:5], name[5:]),  # ten members a sample
    }
    found = each(monkeypatch, (2, 3), shards, **chosen)
    assert list(itertools.chain(*found)) == [f"x{n:04d}" for n in range(60)]


def test_two_epochs_and_workers_of_torch(shards: str) -> None:
    from torch.utils.data import DataLoader

    dataset = WebDataset(shards, split="bytes", shardshuffle=3, seed=1)
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    for _ in range(2):
        assert Counter(sample["__key__"] for sample in loader) == Counter(KEYS)


# -- sizes ----------------------------------------------------------------------------------------------------------


def test_an_index_saves_the_look_at_the_sizes(
    shards: str, origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shardlist = [{"url": f"{origin.base}/{n}.tar", "nsamples": 1, "filesize": len(s)} for n, s in enumerate(SHARDS)]
    index = tmp_path / "index.json"
    index.write_text(json.dumps({"wids_version": 1, "shardlist": shardlist}))
    WebDataset(str(index), split="bytes", shardshuffle=False).close()
    assert not origin.requests
    found = each(monkeypatch, (2, 2), str(index))
    assert list(itertools.chain(*found)) == KEYS


def test_sizes_are_looked_up_once(shards: str, origin: Origin) -> None:
    with WebDataset(shards, split="bytes", shardshuffle=False) as dataset:
        list(dataset)
        list(dataset)
    assert [request.headers.get("range") for request in origin.requests].count("bytes=0-511") == 3


def test_shards_of_the_programs_own_list(shards: str, origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sizes are looked up when they come."""

    class Own:
        def __iter__(self) -> Any:
            return ({"url": f"{origin.base}/{n}.tar"} for n in range(3))

    assert list(itertools.chain(*each(monkeypatch, (2, 2), Own()))) == KEYS


def test_a_shard_that_is_not_there(shards: str, origin: Origin) -> None:
    """Ranks that know other sizes would cut elsewhere: so no handler is asked."""
    with pytest.raises(ShardNotFound, match=r"3\.tar"):
        WebDataset(shards.replace("..2", "..3"), split="bytes", shardshuffle=False, handler=warn_and_continue)


def test_a_shard_without_a_size() -> None:
    with pytest.raises(ConfigError, match="split by whole shards"):
        WebDataset("pipe:cat x.tar", split="bytes", shardshuffle=False)


@pytest.mark.parametrize(
    "kw",
    [{"nodesplitter": None}, {"resampled": True}, {"workersplitter": split_by_node}, {"split": "shards"}],
    ids=" ".join,
)
def test_what_does_not_go_together(kw: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(SHARDS[0])
    with pytest.raises(ConfigError, match="split="):
        WebDataset(str(tmp_path / "0.tar"), **{"split": "bytes", "shardshuffle": False, **kw})


# -- shards that cannot be cut --------------------------------------------------------------------------------------


def test_a_compressed_shard_is_read_whole(
    shards: str, origin: Origin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    origin.add("/1.tar", gzip.compress(SHARDS[1]))
    found = each(monkeypatch, (2, 3), shards)
    assert list(itertools.chain(*found)) == KEYS
    assert sum(any(key in keys for key in KEYS[100:500]) for keys in found) == 1


def test_a_compressed_shard_that_an_index_does_not_show(
    shards: str, origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin.add("/1.tar", packed := gzip.compress(SHARDS[1], 0))
    index = tmp_path / "index.json"
    shard = {"url": f"{origin.base}/1.tar", "nsamples": 1, "filesize": len(packed)}
    index.write_text(json.dumps({"wids_version": 1, "shardlist": [shard]}))
    with pytest.raises(ShardCutError, match="compressed"):
        each(monkeypatch, (1, 2), str(index), handler=warn_and_continue)


@pytest.mark.parametrize("handler", [None, warn_and_continue])
def test_tars_within_a_tar(handler: Any, origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    """No handler hides it, since samples would be missing or come twice."""
    inner = archive(KEYS[300:340])
    origin.add("/0.tar", archive(KEYS[:9], {"tar": inner, "cls": b"1"}))
    kw = {} if handler is None else {"handler": handler}
    with pytest.raises(ShardCutError, match=r"0\.tar.*cannot be cut at byte \d+.*wds-async index"):
        each(monkeypatch, (2, 4), f"{origin.base}/0.tar", **kw)
    assert list(itertools.chain(*each(monkeypatch, (1, 1), f"{origin.base}/0.tar"))) == KEYS[:9]


def test_damage_costs_the_span_that_it_is_in(shards: str, origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(fileobj=io.BytesIO(SHARDS[1])) as tar:
        at = tar.getmember("00250.bin").offset
    origin.add("/1.tar", SHARDS[1][: at + 30] + b"\xff\xfe" + SHARDS[1][at + 32 :])
    found = each(monkeypatch, (2, 3), shards, handler=warn_and_continue, on_corrupt="resync")
    keys = list(itertools.chain(*found))
    assert keys == [key for key in KEYS if key in keys]  # none twice, and in order
    assert "00250" not in keys
    assert len(keys) >= len(KEYS) - 3


def test_a_sample_that_is_longer_than_what_is_requested_behind_a_span(
    origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 7 MB, and then one whose members reach over several spans."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, size in [("a.x", 7 << 20), ("b.x", 1), *[(f"c.{n}", 1 << 20) for n in range(6)], ("d.x", 5)]:
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, io.BytesIO(bytes(size)))
    origin.add("/0.tar", out.getvalue())
    for shape in [(1, 2), (2, 4), (5, 5)]:
        found = each(monkeypatch, shape, f"{origin.base}/0.tar")
        assert list(itertools.chain(*found)) == ["a", "b", "c", "d"]


def test_a_worker_without_a_sample_is_an_error_that_says_so(
    origin: Origin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    origin.add("/0.tar", archive(KEYS[:2]))
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match=r"no sample.*fewer samples"):
        each(monkeypatch, (2, 4), f"{origin.base}/0.tar", empty_check=True)


# -- states ---------------------------------------------------------------------------------------------------------


def stand(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))


def taken_from(urls: str, count: int, state: Any = None) -> tuple[list[str], Any]:
    """The keys of ``count`` samples behind a state, and the state behind them."""
    with WebDataset(urls, split="bytes", shardshuffle=3, seed=2, empty_check=False) as dataset:
        if state is not None:
            dataset.load_state_dict(json.loads(json.dumps(state)))
        keys = [sample["__key__"] for sample in itertools.islice(dataset, count)]
        return keys, dataset.state_dict()


def test_a_span_goes_on_at_any_sample(shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(5):
        stand(monkeypatch, rank, 5)
        whole, _ = taken_from(shards, 1000)
        for count in (1, 17, len(whole) // 2, len(whole) - 2, len(whole) - 1):
            head, state = taken_from(shards, count)
            middle, state = taken_from(shards, 1, state)
            assert head + middle + taken_from(shards, 1000, state)[0] == whole, (rank, count)


def test_the_rest_of_an_epoch_on_other_ranks(shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    states = []
    for rank in range(5):
        stand(monkeypatch, rank, 5)
        head, state = taken_from(shards, 10 + 17 * rank)
        found += head
        states.append(state)
    for count in (3, 2):
        merged, states = merge_states(states), []
        for rank in range(count):
            stand(monkeypatch, rank, count)
            head, state = taken_from(shards, 21 if count == 3 else 1000, merged)
            found += head
            states.append(state)
    assert Counter(found) == Counter(KEYS)


# -- by an index ----------------------------------------------------------------------------------------------------


@pytest.fixture
def indexed(tmp_path: Path) -> str:
    """Local shards with their indexes beside them: small samples, large ones, and one of tars."""
    inner = archive(KEYS[300:310])
    shards = [archive(KEYS[:100]), archive(KEYS[100:109], {"bin": bytes(90_000)}), archive(KEYS[109:120], {"x": inner})]
    for n, content in enumerate(shards):
        (tmp_path / f"{n}.tar").write_bytes(content)
    urls = [str(tmp_path / f"{n}.tar") for n in range(3)]
    for scanned in scan_shards(urls):
        assert scanned.index is not None
        Path(f"{scanned.url}.index").write_bytes(scanned.index.to_bytes())
    return str(tmp_path / "{0..2}.tar")


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (3, 5), (1, 60)], ids=str)
def test_an_index_cuts_tars_of_tars(shape: tuple[int, int], indexed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = each(monkeypatch, shape, indexed, index=True)
    assert list(itertools.chain(*found)) == KEYS[:120]


@pytest.mark.parametrize("equal", ["drop", "pad", "repeat"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (7, 1), (5, 9)], ids=str)
def test_an_index_gives_every_worker_as_many_samples(
    equal: str, shape: tuple[int, int], indexed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = shape[0] * shape[1]
    found = each(monkeypatch, shape, indexed, index=True, equal=equal, shardshuffle="epoch", seed=1)
    samples = Counter(itertools.chain(*found))
    assert {len(keys) for keys in found} == {120 // workers if equal == "drop" else -(-120 // workers)}
    if equal == "drop":
        assert max(samples.values()) == 1
    else:
        assert set(samples) == set(KEYS[:120])
        assert all(len(keys) - len(set(keys)) <= 1 for keys in found)


def test_indexes_that_do_not_fit(indexed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="120 samples for 200 workers"):
        each(monkeypatch, (20, 10), indexed, index=True, equal="drop")
    with pytest.raises(ConfigError, match="split="):
        WebDataset(indexed, shardshuffle=False, index=True)
    shard = Path(indexed.replace("{0..2}", "1"))
    shard.write_bytes(shard.read_bytes() + bytes(1024))
    with pytest.raises(ObjectChanged, match="wds-async index"):
        WebDataset(indexed, shardshuffle=False, index=True, split="bytes")
    shard.with_suffix(".tar.index").unlink()
    with pytest.raises(ShardNotFound, match=r"1\.tar has no index"):
        WebDataset(indexed, shardshuffle=False, index=True, split="bytes")


def test_an_index_in_another_folder_over_http(
    shards: str, origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for scanned in scan_shards([f"{origin.base}/{n}.tar" for n in range(3)]):
        assert scanned.index is not None
        (tmp_path / f"{scanned.url.rpartition('/')[2]}.index").write_bytes(scanned.index.to_bytes())
    found = each(monkeypatch, (2, 4), shards, index=tmp_path)
    assert list(itertools.chain(*found)) == KEYS
    origin.add("/1.tar", SHARDS[2])
    with pytest.raises(ObjectChanged):
        each(monkeypatch, (2, 4), shards, index=str(tmp_path))
