"""Samples drawn from several open shards (``interleave=``): their order, faults, memory, and closing."""

from __future__ import annotations

import hashlib
import itertools
import json
import statistics
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.reading.test_recover import COUNT, GOOD, damaged
from tests.servers import Nginx, Origin, make_shards
from wds_async.errors import ConfigError, CorruptShard, ReaderClosed, ShardNotFound, TooMuchLost
from wds_async.handlers import ignore_and_continue, ignore_and_stop
from wds_async.indexed.places import cached_index
from wds_async.shardlists import DirectoryShardList

SHARDS, SAMPLES = 24, 11


def dataset(urls: Any, interleave: Any = 4, **kw: Any) -> wds.WebDataset:
    return wds.WebDataset(urls, interleave=interleave, **{"shardshuffle": False, "seed": 1, **kw})


def keys(samples: Any) -> list[str]:
    return [sample["__key__"] for sample in samples]


def every_key(shards: int = SHARDS, samples: int = SAMPLES) -> list[str]:
    return [f"{number:06d}" for number in range(shards * samples)]


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    return [str(path) for path in make_shards(tmp_path / "shards", shards=SHARDS, samples=SAMPLES)]


# ------------------------------------------------------------------ order


def test_every_sample_comes_once_and_those_of_a_shard_in_order(urls: list[str]) -> None:
    samples = list(dataset(urls))
    assert sorted(keys(samples)) == every_key()
    for url in urls:
        of_shard = [sample["__key__"] for sample in samples if sample["__url__"] == url]
        assert of_shard == sorted(of_shard)


def test_no_more_than_so_many_are_open_at_once(urls: list[str]) -> None:
    left, most = Counter(dict.fromkeys(urls, SAMPLES)), 0
    for sample in dataset(urls, 4):
        left[sample["__url__"]] -= 1
        most = max(most, sum(0 < count < SAMPLES for count in left.values()))
    assert most == 4


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("interleave", [1, 2, 24, 99])
def test_any_number(interleave: int, ordered: bool, urls: list[str]) -> None:
    assert sorted(keys(dataset(urls, interleave, ordered=ordered))) == every_key()
    nothing = wds.DataPipeline(tuple, wds.tarfile_to_samples(interleave=interleave, ordered=ordered))
    assert keys(nothing) == []


def test_the_order_follows_from_seed_and_epoch(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first, again, other = dataset(urls), dataset(urls), dataset(urls, seed=2)
    epochs = [keys(first), keys(first)]
    assert epochs == [keys(again), keys(again)]
    assert epochs[0] != epochs[1]
    assert keys(other) != epochs[0]
    late = dataset(urls)
    late.set_epoch(1)
    assert keys(late) == epochs[1]
    monkeypatch.setenv("WDS_EPOCH", "1")
    assert keys(dataset(urls)) == epochs[1]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert keys(dataset(urls, nodesplitter=None)) != epochs[1]


def test_wds_seed_is_the_seed_of_a_stage_without_one(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def order(**kw: Any) -> list[str]:
        return keys(wds.DataPipeline(wds.SimpleShardList(urls), wds.tarfile_to_samples(interleave=5, **kw)))

    assert order() != order()  # each draws its own
    monkeypatch.setenv("WDS_SEED", "7")
    assert order() == order() == order(seed=7)


def distances(order: list[str]) -> list[int]:
    numbers = [int(key) for key in order]
    return [abs(after - before) for before, after in itertools.pairwise(numbers)]


def test_neighbours_are_far_apart_with_a_small_buffer(tmp_path: Path) -> None:
    """With the same buffer, two samples in a row come from the same shard eight times less often, and the median
    distance of their numbers grows from a part of the buffer to several shards."""
    urls = [str(path) for path in make_shards(tmp_path, shards=40, samples=50)]
    plain = distances(keys(dataset(urls, None).shuffle(20, initial=20, seed=1)))
    mixed = distances(keys(dataset(urls, 16).shuffle(20, initial=20, seed=1)))
    assert statistics.median(plain) < 50
    assert statistics.median(mixed) > 150
    assert 8 * sum(distance < 50 for distance in mixed) < sum(distance < 50 for distance in plain) * 2


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [1, 3])
def test_workers(workers: int, urls: list[str]) -> None:
    pytest.importorskip("torch")
    loaders = [wds.WebLoader(dataset(urls), batch_size=None, num_workers=workers) for _ in range(2)]
    orders = [[keys(loader) for _ in range(2)] for loader in loaders]
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]
    assert all(sorted(order) == every_key() for order in orders[0])


def test_what_is_ready_comes_first_where_the_order_does_not_matter(origin: Origin, tmp_path: Path) -> None:
    """One shard hangs: the others are read to their end meanwhile. In order, the draw that hits it waits."""
    paths = make_shards(tmp_path, shards=6, samples=20)
    urls = [origin.add(path.name, path.read_bytes()) for path in paths]
    origin.behave(path="*000001.tar", stall_after=0)
    samples = iter(dataset(urls, 3, ordered=False, transfer={"hedge_share": 0.0}))
    first = list(itertools.islice(samples, 100))
    assert urls[1] not in {sample["__url__"] for sample in first}
    origin.forget()
    origin.release()
    assert sorted(keys([*first, *samples])) == every_key(6, 20)


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize("value", [0, -1, True, False, 2.5, "4"], ids=repr)
def test_a_bad_number_of_shards(value: Any, urls: list[str]) -> None:
    with pytest.raises(ConfigError, match="interleave="):
        dataset(urls, value)
    with pytest.raises(ConfigError, match="interleave="):
        wds.tarfile_to_samples(interleave=value)


def test_arguments_that_do_not_go_together(urls: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="interleave="):
        wds.WebDataset(urls, shardshuffle=False, ordered=False)
    with pytest.raises(ConfigError, match="ordered="):
        dataset(urls, ordered=0)
    with pytest.raises(ConfigError, match="mode='keep'"):
        dataset(str(tmp_path), mode="keep")
    with pytest.raises(ConfigError, match="canonical="):
        dataset(urls, canonical=4, index=str(tmp_path), ordered=False)
    with pytest.raises(ConfigError, match="returns a pipeline"):
        dataset("tests.reading.test_interleave:dataset")
    stage = wds.tarfile_to_samples(interleave=2)
    with pytest.raises(ConfigError, match="directory"):
        list(wds.DataPipeline(DirectoryShardList(str(Path(urls[0]).parent), mode="keep"), stage))


def test_a_budget_that_is_too_small_for_so_many(urls: list[str]) -> None:
    small = {"budget_bytes": 1 << 20, "part_bytes": 1 << 18}
    assert sorted(keys(dataset(urls, 4, transfer=small))) == every_key()
    with pytest.raises(ConfigError, match="WDS_BUDGET"):
        list(dataset(urls, 5, transfer=small))


# ------------------------------------------------------------------ memory, connections


@pytest.mark.parametrize("ordered", [True, False])
def test_memory_and_connections_are_those_of_one_reader(
    ordered: bool, tmp_path: Path, nginx: Callable[..., Nginx]
) -> None:
    make_shards(tmp_path, shards=12, samples=60, payload=100_000)
    server = nginx(tmp_path)
    urls = [server.url(f"shard-{number:06d}.tar") for number in range(12)]
    samples = dataset(
        urls, 12, ordered=ordered, transfer={"budget_bytes": 4 << 20, "part_bytes": 1 << 20, "connections": 5}
    )
    assert sorted(keys(samples)) == every_key(12, 60)
    stats = samples.statistics()
    assert stats.window_peak_bytes <= 4 << 20
    assert stats.connections_peak <= 7
    assert stats.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_few_samples_fetch_little(tmp_path: Path, nginx: Callable[..., Nginx]) -> None:
    make_shards(tmp_path, shards=4, samples=300, payload=100_000)
    server = nginx(tmp_path)
    samples = dataset([server.url(f"shard-{number:06d}.tar") for number in range(4)])
    assert len(list(itertools.islice(samples, 4))) == 4
    samples.close()
    assert samples.statistics().bytes < 12e6


def test_two_in_one_process_share_the_budget(tmp_path: Path) -> None:
    paths = make_shards(tmp_path, shards=16, samples=30, payload=50_000)
    urls = [str(path) for path in paths]
    small = {"budget_bytes": 4 << 20, "part_bytes": 1 << 20}
    both = [dataset(part, 8, transfer=small) for part in (urls[::2], urls[1::2])]
    came = [sample["__key__"] for pair in zip(*both, strict=True) for sample in pair]
    assert sorted(came) == every_key(16, 30)


# ------------------------------------------------------------------ faults


@pytest.mark.parametrize("ordered", [True, False])
def test_a_missing_shard_and_a_handler(ordered: bool, urls: list[str]) -> None:
    Path(urls[5]).unlink()
    with pytest.raises(ShardNotFound):
        list(dataset(urls, ordered=ordered))
    left = dataset(urls, ordered=ordered, handler=ignore_and_continue)
    assert len(keys(left)) == (SHARDS - 1) * SAMPLES
    assert [entry.shard for entry in left.ledger] == [urls[5]]
    assert left.statistics().epochs == 1


def test_a_handler_that_stops_ends_all(urls: list[str]) -> None:
    Path(urls[5]).unlink()
    stopped = dataset(urls, handler=ignore_and_stop)
    assert 0 < len(keys(stopped)) < (SHARDS - 1) * SAMPLES
    assert stopped.statistics().epochs == 0


@pytest.mark.parametrize("policy", ["skip_shard", "resync"])
def test_damage_in_several_open_shards(policy: str, put: Any) -> None:
    at = [None, 10 * 2048 + 1024, 30 * 2048 + 1024, None, 3 * 2048 + 1024]
    urls = put(*(GOOD if place is None else damaged(place) for place in at))
    samples = dataset(urls, 5, on_corrupt=policy)
    came = [(sample["__url__"], int(sample["__key__"])) for sample in samples]
    for url, place in zip(urls, at, strict=True):
        bad = COUNT if place is None else place // 2048
        rest = range(bad + 2, COUNT) if policy == "resync" else ()
        assert [number for of, number in came if of == url] == [*range(bad), *rest]
    assert {entry.shard for entry in samples.ledger} == {urls[1], urls[2], urls[4]}
    with pytest.raises(CorruptShard):
        list(dataset(urls, 5))


def test_too_much_is_lost(put: Any) -> None:
    urls = put(*(damaged(2048 * number + 1024) for number in range(1, 9)))
    with pytest.raises(TooMuchLost):
        list(dataset(urls, 3, on_corrupt="skip_shard", repeat=True, max_bad_fraction=0.01))


def test_an_error_of_the_list_of_shards_is_raised(urls: list[str]) -> None:
    def shards() -> Any:
        yield from ({"url": url} for url in urls[:8])
        raise ZeroDivisionError

    came = iter(wds.DataPipeline(shards, wds.tarfile_to_samples(interleave=3)))
    assert len(list(itertools.islice(came, 5 * SAMPLES))) == 5 * SAMPLES
    with pytest.raises(ZeroDivisionError):
        list(came)


def test_resets_over_http(tmp_path: Path, origin: Origin) -> None:
    paths = make_shards(tmp_path, shards=6, samples=20, payload=30_000)
    urls = [origin.add(path.name, path.read_bytes()) for path in paths]
    origin.behave(every=3, cut_after=40_000)
    assert sorted(keys(dataset(urls, 4))) == every_key(6, 20)


# ------------------------------------------------------------------ closing, caches, checksums, indexes


def test_close_in_the_middle(urls: list[str]) -> None:
    samples = dataset(urls)
    iterator = iter(samples)
    assert len(list(itertools.islice(iterator, 20))) == 20
    samples.close()
    with pytest.raises(ReaderClosed):
        list(iterator)
    left = dataset(urls)
    for number, _ in enumerate(left):
        if number == 20:
            break
    assert sorted(keys(left)) == every_key()


def test_another_thread_closes_what_waits(origin: Origin, tmp_path: Path) -> None:
    paths = make_shards(tmp_path, shards=3, samples=20)
    urls = [origin.add(path.name, path.read_bytes()) for path in paths]
    origin.behave(stall_after=0)
    samples = dataset(urls, 3, transfer={"hedge_share": 0.0})
    closer = threading.Thread(target=lambda: (origin.wait_until(lambda server: server.in_flight > 0), samples.close()))
    closer.start()
    with pytest.raises(ReaderClosed):
        list(samples)
    closer.join()


def test_shards_are_kept_in_a_cache(tmp_path: Path, origin: Origin) -> None:
    paths = make_shards(tmp_path / "data", shards=6, samples=20)
    urls = [origin.add(path.name, path.read_bytes()) for path in paths]
    first = dataset(urls, cache_dir=tmp_path / "cache")
    assert sorted(keys(first)) == every_key(6, 20)
    again = dataset(urls, cache_dir=tmp_path / "cache")
    order = keys(again)
    assert sorted(order) == every_key(6, 20)
    assert (again.statistics().cache_hits, again.statistics().cache_misses) == (6, 0)
    assert order == keys(dataset(urls))


def test_shards_are_held_until_they_are_verified(tmp_path: Path) -> None:
    paths = make_shards(tmp_path, shards=6, samples=20, payload=10_000)
    for path in paths:
        path.with_name(path.name + ".sha256").write_text(
            f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}"
        )
    samples = dataset([str(path) for path in paths], 3, verify="always", transfer={"budget_bytes": 8 << 20})
    assert sorted(keys(samples)) == every_key(6, 20)
    assert samples.statistics().verified_shards == 6


def test_indexes_are_learnt(urls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_LEARN_INDEX", "1")
    monkeypatch.setenv("WIDS_CACHE", str(tmp_path / "cache"))
    samples = dataset(urls)
    list(samples)
    assert len(samples) == SHARDS * SAMPLES
    assert all(len(cached_index(url) or ()) == SAMPLES for url in urls)


def test_equal_steps_take_their_share_again(urls: list[str]) -> None:
    order = keys(dataset(urls, steps=SHARDS * SAMPLES + 50))
    assert order[: SHARDS * SAMPLES] != every_key()
    assert order[SHARDS * SAMPLES :] == order[:50]


# ------------------------------------------------------------------ states


def going_on(samples: Any, state: Any) -> Any:
    samples.load_state_dict(state)
    return next(iter(samples))


def test_a_state_is_for_as_many_open_shards(urls: list[str]) -> None:
    samples = dataset(urls)
    next(iter(samples))
    state = json.loads(json.dumps(samples.state_dict()))
    for other, match in ((dataset(urls, 5), "interleave=4"), (dataset(urls, None), "stages")):
        with pytest.raises(wds.StateError, match=match):
            going_on(other, state)


def test_a_list_that_has_changed_is_an_error(urls: list[str]) -> None:
    samples = dataset(urls)
    list(itertools.islice(samples, 30))
    iterator = iter(samples)
    list(itertools.islice(iterator, 30))
    state = samples.state_dict()
    other = dataset(urls[::-1])
    other.load_state_dict(state)
    with pytest.raises(wds.StateError, match="list of shards"):
        next(iter(other))


def test_a_state_of_open_shards_fetches_their_rest_only(tmp_path: Path) -> None:
    urls = [str(path) for path in make_shards(tmp_path, shards=3, samples=100, payload=50_000)]
    samples = dataset(urls, 3)
    list(itertools.islice(iter(samples), 1))
    iterator = iter(samples)
    list(itertools.islice(iterator, 270))
    state = samples.state_dict()
    resumed = dataset(urls, 3)
    resumed.load_state_dict(state)
    assert len(list(resumed)) == 30
    assert resumed.statistics().bytes < 4e6


def test_not_in_order_every_sample_comes_once_behind_a_state(urls: list[str]) -> None:
    samples = dataset(urls, ordered=False)
    for count in (1, 30, 100, 230):
        iterator = iter(samples)
        came = keys(itertools.islice(iterator, count))
        state = json.loads(json.dumps(samples.state_dict()))
        for _ in range(3):  # from a state that was taken right after going on, too
            resumed = dataset(urls, ordered=False)
            resumed.load_state_dict(state)
            rest = iter(resumed)
            came += keys(itertools.islice(rest, 7))
            state = resumed.state_dict()
        assert sorted(came + keys(rest)) == every_key()
