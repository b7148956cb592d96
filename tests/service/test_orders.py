"""Orders of epochs: how they are announced, what the cache makes of them, and that a cluster fetches by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import wds_async as wds
from benchmarks.cachepolicy import Simulation, ahead, announced, epochs, known, ours
from tests.servers import Origin
from tests.servers.shards import make_shard, sample_fields
from tests.service.serving import Inside, ask, until
from tests.service.test_peers import Start, bodies, cluster, get  # noqa: F401 (a fixture)
from tests.transfer.reading import data
from wds_async.filters.shuffling import detshuffle, permutation
from wds_async.service.cache.index import CHUNK_BYTES
from wds_async.service.orders import EpochOrder, OrderRule
from wds_async.storage.order import packed, unpacked

NAMES = [f"s3://b/{number:03}.tar" for number in range(100)]


def order_of(rule: OrderRule, epoch: int = 0, now: float = 1e6) -> EpochOrder:
    return EpochOrder(NAMES, NAMES, rule, epoch, lambda: now)


def begin(order: EpochOrder, epoch: int) -> None:
    order.begin(epoch, order.prepared(epoch))


def orders_of(service: Inside) -> list[EpochOrder]:
    return list(service.context.orders._orders.values())


def announce(service: Inside, **message: Any) -> int:
    return ask(f"{service.base}/v1/plan", "POST", {"order": message})[0]


# -- one order


def test_an_order_is_that_of_the_loader() -> None:
    assert list(OrderRule("epoch", 7).order(100, 3)) == permutation(100, 7, 3)
    assert list(OrderRule("buffer", 7, 20, 5).order(100, 3)) == list(detshuffle(20, 5, seed=7, epoch=2).run(range(100)))
    assert list(OrderRule("listed").order(5, 9)) == [0, 1, 2, 3, 4]


def test_what_was_read_is_needed_in_the_next_epoch() -> None:
    order, now = order_of(OrderRule("epoch", 1)), permutation(100, 1, 0)
    following = permutation(100, 1, 1)
    for item in now[:30]:
        order.heard(NAMES[item])
    assert order.position == 29
    assert order.need(NAMES[now[40]], running=True) == 11
    read = now[5]
    assert order.need(NAMES[read], running=True) == 0, "it is being read"
    assert order.need(NAMES[read], running=False) == 100 - 29 + following.index(read)
    assert order.need("s3://b/other", running=True) is None
    assert next(order.ahead()) == now[30]
    begin(order, 1)
    assert order.position == 0
    assert order.need(NAMES[read], running=False) == following.index(read)


def test_of_one_node_only_its_ranks_count() -> None:
    order = order_of(OrderRule("listed"))
    order.ranks = {4: {1: (0, "")}}
    assert list(order.ahead()) == list(range(1, 100, 4))


def test_what_nobody_comes_for_is_not_waited_for() -> None:
    """A rank that died leaves what was fetched for it: once the others are far ahead, that counts no longer."""
    names = [f"s3://b/{number}" for number in range(400)]
    order = EpochOrder(names, names, OrderRule("listed"), 0, lambda: 1e6)
    order.fetched[3] = 1000
    order.heard(names[20])
    assert next(order.ahead()) == 0
    assert order.fetched
    order.heard(names[200])
    assert next(order.ahead()) == 200 - 64
    assert not order.fetched


# -- lists on their way


@given(st.lists(st.text(st.characters(codec="ascii", min_codepoint=32), max_size=12), max_size=30))
def test_lists_survive_the_way(urls: list[str]) -> None:
    assert unpacked(packed(urls), 1000) == urls


def test_a_list_is_short_on_the_way() -> None:
    assert len(packed(NAMES)) == 1
    assert packed([f"{number}-{number}" for number in range(100)], 1000) == [], "or is not sent"
    for runs in (
        [["a", 3, 0, 1001, ""]], [["a", 3, 0]], ["a"], [["a", 3, -1, 1, ""]], [["a", 30, 0, 1, ""]],
        [["a", 0, 0, 5, ""]], [[1, 3, 0, 1, ""]], [["a", True, 0, 1, ""]],
    ):  # fmt: skip
        with pytest.raises(ValueError, match="has"):
            unpacked(runs, 1000)


# -- the policy


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_a_known_order_is_never_worse_than_learned_intervals(share: float) -> None:
    objects = dict.fromkeys(range(100), 16_000)
    limit = int(sum(objects.values()) * share)
    learned, told = (sum(policy(limit, objects, 4, 1)[1:]) for policy in (ours, known))
    assert told >= 0.99 * learned
    assert told / 3 >= 0.9 * share


def test_what_is_fetched_in_the_order_of_need_is_there() -> None:
    """With half of the data, though no more bytes come from the store than without."""
    objects = dict.fromkeys(range(200), 16_000)
    hits, fetched = ahead(sum(objects.values()) // 2, objects, 4, 1)
    assert sum(hits[1:]) / 3 > 0.9
    assert sum(fetched[1:]) / 3 < 0.6


def test_what_is_in_no_order_gets_room_as_ever() -> None:
    """A data set that nobody announced takes the place of one that was, and is read no more."""
    simulation, first = Simulation(800_000), dict.fromkeys(range(100), 16_000)
    order = announced(simulation, first, 1)
    for epoch in range(4):
        order.begin(epoch, order.prepared(epoch))
        for item in order.order:
            order.heard(f"o{item}")
            simulation.read(item, 16_000)
    second = dict.fromkeys(range(1000, 1100), 16_000)
    ratios = [simulation.epoch(order) for order in epochs(second, 6, 2)]
    assert ratios[-1] > 0.4


# -- messages


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ([], 400),
        ({"kind": "other"}, 400),
        ({"kind": "epoch"}, 400),
        ({"kind": "epoch", "epoch": "1"}, 400),
        ({"kind": "epoch", "world": 0}, 400),
        ({"kind": "buffer", "size": 0}, 400),
        ({"kind": "epoch", "shards": [["s3://b/", 3, 0, 1 << 40, ""]]}, 400),
        ({"kind": "epoch", "epoch": 1 << 31, "shards": [["s3://b/", 3, 0, 100, ".tar"]]}, 400),
        ({"kind": "epoch", "name": "unknown"}, 404),
        (
            {
                "kind": "buffer",
                "size": 250_000,
                "initial": 2**31 - 1,
                "epoch": 2**31 - 1,
                "seed": -1 << 128,
                "shards": [["s3://b/", 3, 0, 100, ".tar"]],
            },
            200,
        ),
        ({"kind": "epoch", "seed": 1 << 64, "shards": [["s3://b/", 3, 0, 100, ".tar"]]}, 200),
    ],
)
def test_messages(message: Any, status: int, serve: Callable[..., Inside]) -> None:
    service = serve()
    assert ask(f"{service.base}/v1/plan", "POST", {"order": message})[0] == status
    assert len(service.context.orders) == (status == 200)


def test_a_plan_is_taken_whatever_comes_of_the_order(serve: Callable[..., Inside], origin: Origin) -> None:
    service = serve()
    plan = {"shards": [origin.add("a.tar", b"a")], "order": {"kind": "other"}}
    assert ask(f"{service.base}/v1/plan", "POST", plan)[0] == 200
    assert len(service.context.plans) == 1


def test_orders_are_bounded(serve: Callable[..., Inside]) -> None:
    service = serve()
    answers = [announce(service, kind="epoch", seed=seed, shards=[["s3://b/", 3, 0, 9, ""]]) for seed in range(20)]
    assert answers == 16 * [200] + 4 * [429]


def test_epochs_go_on_and_begin_again(serve: Callable[..., Inside]) -> None:
    service = serve()
    runs = [["s3://b/", 3, 0, 9, ""]]
    for rank, epoch, own, expected in [
        (0, 0, "a", 0), (1, 0, "b", 0), (0, 1, "c", 1),
        (1, 0, "b", 1),  # the same message again
        (1, 1, "d", 1), (1, 2, "e", 2),
        (0, 2, "f", 2),  # later than the other
        (0, 0, "g", 0),  # it was started again
        (1, 0, "h", 0), (0, 1, "i", 1),
    ]:  # fmt: skip
        assert announce(service, kind="epoch", shards=runs, rank=rank, world=2, epoch=epoch, id=own) == 200
        assert [order.epoch for order in orders_of(service)] == [expected]
    assert announce(service, kind="epoch", shards=runs, rank=0, world=1, epoch=2, id="j") == 200
    (order,) = orders_of(service)
    assert order.ranks == {1: {0: (2, "j")}}, "another number of ranks, another job"


def test_ranks_are_bounded(serve: Callable[..., Inside]) -> None:
    service = serve()
    for world in range(1, 100):
        assert announce(service, kind="epoch", shards=[["s3://b/", 3, 0, 9, ""]], world=world, id=str(world)) == 200
    (order,) = orders_of(service)
    assert len(order.ranks) <= 16


def test_epochs_of_a_list_as_it_is_are_counted(serve: Callable[..., Inside]) -> None:
    service = serve()
    for own, epoch in (("a", 0), ("a", 0), ("b", 1), ("c", 2)):
        assert announce(service, kind="listed", shards=[["s3://b/", 3, 0, 9, ""]], id=own) == 200
        assert [order.epoch for order in orders_of(service)] == [epoch]


# -- loaders


@pytest.mark.parametrize(("shuffle", "local"), [("epoch", False), (3, False), (False, False), ("epoch", True)])
def test_a_loader_announces_its_epochs(
    shuffle: Any, local: bool, serve: Callable[..., Inside], origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order that the service then expects is the one in which the samples come."""
    for number in range(8):
        origin.add(f"d/{number:03}.tar", make_shard({f"{number}": sample_fields(number)}))
    service = serve(folder="cache", socket="socket")
    monkeypatch.setenv("AIS_ENDPOINT", f"unix:{service.config.socket}" if local else service.base)
    dataset = wds.WebDataset("ais://b/{000..007}.tar", shardshuffle=shuffle, seed=5)
    for epoch in range(2):
        samples = iter(dataset)
        keys = [next(samples)["__key__"]]
        until(lambda epoch=epoch: [order.epoch for order in orders_of(service)] == [epoch])
        keys += [sample["__key__"] for sample in samples]
        (order,) = orders_of(service)
        assert [str(item) for item in order.order] == keys
    assert list(order._items) == [f"{origin.base}/d/{number:03}.tar" for number in range(8)]
    assert list(order.ranks) == [1]


def test_a_dataset_of_equal_steps_announces_too(
    serve: Callable[..., Inside], origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        origin.add(f"d/{number:03}.tar", make_shard({f"{number}": sample_fields(number)}))
    service = serve(folder="cache")
    monkeypatch.setenv("AIS_ENDPOINT", service.base)
    samples = iter(wds.WebDataset("ais://b/{000..003}.tar", shardshuffle="epoch", seed=5, equal="drop", steps=3))
    next(samples)
    until(lambda: len(orders_of(service)) == 1)
    assert sum(1 for _ in samples) == 2


# -- a cluster


def test_a_cluster_fetches_in_the_order_of_need(cluster: Start, origin: Origin) -> None:  # noqa: F811
    """Half of the data fits. Each member fetches its chunks before they are read; so more than half is there when it
    is, and no more than half again comes from the store in the second epoch."""
    size, count = 3 * CHUNK_BYTES, 16
    urls = [origin.add(f"d/{number:03}.tar", data(size, number)) for number in range(count)]
    services = cluster(2, cache_size=count * size // 4 + 4 * CHUNK_BYTES, freshness_s=1e6)
    runs, sent = [[f"{origin.base}/d/", 3, 0, count, ".tar"]], []
    for epoch in range(2):
        before = bodies(origin)
        message = {"kind": "epoch", "seed": 3, "epoch": epoch, "shards": runs, "id": str(epoch)}
        assert announce(services[0], **message) == 200
        until(lambda epoch=epoch: all([o.epoch for o in orders_of(service)] == [epoch] for service in services))
        for item in permutation(count, 3, epoch):
            until(lambda item=item: all(item in o.fetched for service in services for o in orders_of(service)))
            for service in services:
                service.stored()
            assert get(services[0], urls[item]) == (200, data(size, item))
        sent.append(bodies(origin) - before)
    total = count * size
    assert sum(service.context.orders.fetched_bytes for service in services) >= 0.5 * total
    stats = [service.context.cache.statistics() for service in services]
    assert stats[0].hit_bytes + stats[0].miss_bytes == 2 * total
    asked = [service.context.peers.stats for service in services]  # type: ignore[union-attr]
    assert stats[0].hit_bytes + asked[1].sent_bytes > 0.75 * 2 * total
    assert sent[0] <= 1.05 * total
    assert sent[1] <= 0.75 * total


def test_members_are_told_the_list_once(cluster: Start, origin: Origin) -> None:  # noqa: F811
    first, second = cluster(2)
    told: list[int] = []
    post = first.context.peers._post  # type: ignore[union-attr]

    async def counted(member: str, path: str, message: Any) -> int:
        status = await post(member, path, message)
        told.append(status if "shards" in message["order"] else -status)
        return status

    first.context.peers._post = counted  # type: ignore[union-attr, method-assign]
    for epoch in range(3):
        shards = [[f"{origin.base}/d/", 3, 0, 9, ".tar"]]
        assert announce(first, kind="epoch", epoch=epoch, shards=shards, id=str(epoch)) == 200
        until(lambda epoch=epoch: [order.epoch for order in orders_of(second)] == [epoch])
    until(lambda: told == [-404, 200, -200, -200])
    assert announce(second, kind="epoch", epoch=3, shards=shards, relayed=True, id="x") == 200


def test_nothing_is_fetched_that_may_not_be_read(cluster: Start, origin: Origin) -> None:  # noqa: F811
    """Nor what does not exist, nor this machine's files: orders are hints, and rights are those of any client."""
    (service,) = cluster(1)
    for seed, prefix in enumerate(("http://127.0.0.1:1/", "file:///etc/", "/etc/", "pipe:cat ", f"{origin.base}/no/")):
        assert announce(service, kind="epoch", seed=seed, shards=[[prefix, 3, 0, 3, ""]], id="x") == 200
        until(lambda: len(orders_of(service)[-1].fetched) == 3)
    service.stored()
    assert service.context.orders.fetched_bytes == 0
    assert service.context.cache.statistics().entries == 0
    assert {request.path.rpartition("/")[0] for request in origin.requests} <= {"/no"}
