"""Several services that share the work: each chunk comes from the store once, whoever asks, and a member that does not
answer costs no error."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin, Tls
from tests.service.serving import Inside, ask, until
from tests.transfer.reading import MIB, data
from wds_async.service.cache.index import CHUNK_BYTES, key_of
from wds_async.service.peers import PEER_PATH, pack_facts, unpack_facts
from wds_async.transfer.ranges import Facts

SIZE = 7 * CHUNK_BYTES + 12345
Start = Callable[..., list[Inside]]


PORTS = range(20_000, 32_000)
"""Below those that a system gives out by itself, so that no connection of another test takes one meanwhile."""


def free_ports(count: int) -> list[int]:
    """So many ports of loopback that are free now, chosen at random."""
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no port is free")


@pytest.fixture
def cluster(origin: Origin, tmp_path: Path) -> Iterator[Start]:
    """``cluster(count, **settings)`` starts services that know each other; each has a folder of its own."""
    running: list[Inside] = []

    def start(count: int, *, listed: int | None = None, **settings: Any) -> list[Inside]:
        ports = free_ports(listed or count)
        members = tuple(f"127.0.0.1:{port}" for port in ports)
        for number in range(count):
            given = {"allow": (origin.base,), "private": True, "peers": members, "port": ports[number]}
            # A slow machine's requests are late, and no second ones are to be counted.
            given |= {"peer_timeout_s": 5, "grace_s": 1, "transfer": {"hedge_share": 0}}
            given |= {"folder": tmp_path / f"cache{number}", **settings}
            running.append(Inside(**given).__enter__())
        return running

    yield start
    for one in running:
        one.stop()


def get(service: Inside, url: str, **headers: str) -> tuple[int, bytes]:
    """The object at ``url`` by ``service``: status and body."""
    status, _, body = ask(f"{service.base}/url/{urllib.parse.quote(url, safe='')}", **headers)
    return status, body


def bodies(origin: Origin) -> int:
    """Bytes of bodies that the store has sent."""
    return sum(sent.body_bytes for sent in origin.sent)


def peer_url(service: Inside, url: str) -> str:
    return f"{service.base}{PEER_PATH}{urllib.parse.quote(url, safe='')}"


def owned_by(service: Inside, url: str, count: int = 8) -> list[int]:
    return [n for n in range(count) if service.context.peers.owns(key_of(url), n)]  # type: ignore[union-attr]


def test_each_chunk_comes_from_the_store_once(cluster: Start, origin: Origin) -> None:
    """Four services, whose clients all read all objects, each in its own order, at once."""
    shards = {origin.add(f"d/{n}.tar", data(SIZE - n)): data(SIZE - n) for n in range(5)}
    services, errors = cluster(4), []

    def read(number: int) -> None:
        urls = list(shards)
        random.Random(number).shuffle(urls)
        for url in urls:
            status, body = get(services[number], url)
            if status != 200 or body != shards[url]:
                errors.append((number, url, status, len(body)))

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = sum(map(len, shards.values()))
    assert not errors
    assert bodies(origin) <= 1.02 * total
    stats = [service.context.peers.stats for service in services]  # type: ignore[union-attr]
    assert sum(one.received_bytes for one in stats) >= 2 * total
    assert sum(one.passed for one in stats) == 0
    before = bodies(origin)
    for service in services:
        for url, content in shards.items():
            assert get(service, url) == (200, content)
    assert bodies(origin) == before, "and the second time nothing comes from the store"


def test_a_range_brings_the_chunks_that_it_needs(cluster: Start, origin: Origin) -> None:
    content = data(SIZE)
    url = origin.add("d/x.tar", content)
    first, second, _ = cluster(3)
    start = 5 * CHUNK_BYTES + 100
    for service in (first, second):
        assert get(service, url, Range=f"bytes={start}-{start + 999}") == (206, content[start : start + 1000])
    assert bodies(origin) <= 2 * CHUNK_BYTES
    assert get(second, url) == (200, content)
    assert bodies(origin) <= SIZE * 1.02


def test_a_member_that_was_killed_costs_no_error(cluster: Start, origin: Origin) -> None:
    """Its port is closed, or it accepts and never says a word."""
    services = cluster(2, listed=4, peer_timeout_s=0.3)
    ports = [int(member.rpartition(":")[2]) for member in services[0].config.peers]
    with socket.create_server(("127.0.0.1", ports[3])):
        for n in range(3):
            content = data(SIZE + n)
            url = origin.add(f"d/{n}.tar", content)
            assert [get(service, url) for service in services] == [(200, content)] * 2
        peers = services[0].context.peers
        assert peers is not None
        assert peers.down == 2
        passed = peers.stats.passed
        assert get(services[0], origin.add("d/more.tar", data(SIZE))) == (200, data(SIZE))
        assert peers.stats.passed - passed <= 1, "they are asked no more, unless a probe finds them"


def test_a_member_that_comes_back_is_asked_again(cluster: Start, origin: Origin, tmp_path: Path) -> None:
    (service,) = cluster(1, listed=2)
    peers, content = service.context.peers, data(SIZE)
    assert peers is not None
    assert get(service, origin.add("d/0.tar", content)) == (200, content)
    assert peers.down == 1
    other = {"port": int(service.config.peers[1].rpartition(":")[2]), "folder": tmp_path / "other"}
    with Inside(**{"allow": (origin.base,), "private": True, "peers": service.config.peers, **other}):
        until(lambda: peers.down == 0)
        assert get(service, origin.add("d/1.tar", content)) == (200, content)
        assert peers.stats.received_bytes > 0


def test_what_a_member_asks_for_is_never_asked_of_another(cluster: Start, origin: Origin) -> None:
    services, url = cluster(3), origin.add("d/x.tar", data(SIZE))
    asked = services[0]
    peers, key = asked.context.peers, key_of(url)
    assert peers is not None
    mine = next(n for n in range(8) if peers.accepts(key, n))
    other = next(n for n in range(100) if not peers.accepts(key, n))

    def of(number: int) -> str:
        return f"bytes={number * CHUNK_BYTES}-{(number + 1) * CHUNK_BYTES - 1}"

    status, fields, body = ask(peer_url(asked, url), Range=of(mine))
    assert (status, body) == (206, data(SIZE)[mine * CHUNK_BYTES :][:CHUNK_BYTES])
    assert unpack_facts(fields["wds-facts"]).size == SIZE
    assert ask(peer_url(asked, url), Range=of(other))[0] == 421
    for one in services:
        assert one.context.peers.stats.received_bytes == 0  # type: ignore[union-attr]


def test_members_that_differ_about_who_they_are_do_not_wait_for_each_other(cluster: Start, origin: Origin) -> None:
    """Each takes the other for the owner of every chunk, which no list can make so; their readers come at once."""
    first, second = services = cluster(2)
    for service, other in ((first, second), (second, first)):
        peers = service.context.peers
        assert peers is not None
        there = f"http://127.0.0.1:{other.port}"
        peers.candidates = lambda key, number, there=there: [there]  # type: ignore[method-assign]
    content, got = data(SIZE), []
    url = origin.add("d/x.tar", content)
    threads = [threading.Thread(target=lambda s=s: got.append(get(s, url))) for s in services for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [(200, content)] * 6, "a wait for each other would end with the clients' patience"


def test_a_replaced_object_is_never_mixed_with_the_former(cluster: Start, origin: Origin) -> None:
    services, old, new = cluster(3, freshness_s=0.2), data(SIZE), data(SIZE + 1)[1:]
    url = origin.add("d/x.tar", old)
    assert get(services[0], url) == (200, old)
    origin.add("d/x.tar", new)
    time.sleep(0.3)
    answers = [get(service, url) for service in services for _ in range(3)]
    assert {body for status, body in answers if status == 200} <= {old, new}
    assert get(services[2], url, Cache_Control="no-cache") == (200, new)


@pytest.mark.parametrize("given", ["", "wrong"])
def test_members_need_a_token_as_clients_do(given: str, cluster: Start, origin: Origin, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("right tenant\n")
    services, url = cluster(2, tokens=tmp_path / "tokens"), origin.add("d/x.tar", data(SIZE))
    headers = {"Authorization": f"Bearer {given}"} if given else {}
    for service in services:
        assert ask(peer_url(service, url), Range=f"bytes=0-{CHUNK_BYTES - 1}", **headers)[0] == 401
    for service in services:
        assert get(service, url, Authorization="Bearer right") == (200, data(SIZE))
    assert sum(one.context.peers.stats.received_bytes for one in services) > 0  # type: ignore[union-attr]


def test_members_speak_tls_and_show_their_certificates(cluster: Start, origin: Origin, tls: Tls) -> None:
    """As clients have to; what a loader announces goes the same way."""
    files = {"certificate": str(tls.cert), "key": str(tls.key), "client_ca": str(tls.ca), "peer_ca": str(tls.ca)}
    first, second = cluster(2, **files)
    url, content = origin.add("d/x.tar", data(SIZE)), data(SIZE)
    context = ssl.create_default_context(cafile=str(tls.ca))
    context.load_cert_chain(tls.cert, tls.key)

    def asked(service: Inside, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        connection = http.client.HTTPSConnection("127.0.0.1", service.port, timeout=30, context=context)
        with contextlib.closing(connection):
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.read()

    order = {"kind": "epoch", "shards": [[f"{origin.base}/d/", 3, 0, 9, ".tar"]], "id": "x"}
    assert asked(first, "POST", "/v1/plan", json.dumps({"order": order}).encode())[0] == 200
    until(lambda: len(second.context.orders) == 1)
    for service in (first, second):
        assert asked(service, "GET", f"/url/{urllib.parse.quote(url, safe='')}") == (200, content)
        stats = service.context.peers.stats  # type: ignore[union-attr]
        assert stats.received_bytes + stats.sent_bytes > 0
        assert stats.passed == 0
    assert bodies(origin) <= 1.02 * SIZE


def test_members_may_read_what_clients_may(cluster: Start, origin: Origin) -> None:
    (service,) = cluster(1)
    for url, status in [
        ("http://127.0.0.1:1/other.tar", 403),
        ("file:///etc/passwd", 400),
        ("/etc/passwd", 400),
        ("pipe:cat /etc/passwd", 400),
        (f"{origin.base}/d/../x", 403),
    ]:
        assert ask(peer_url(service, url), Range="bytes=0-99")[0] == status, url
    assert ask(peer_url(service, origin.add("d/x.tar", b"1")), Range="bytes=5-99")[0] == 400


def test_without_peers_there_is_no_such_path(serve: Callable[..., Inside], origin: Origin) -> None:
    assert ask(peer_url(serve(), origin.add("d/x.tar", b"1")), Range="bytes=0-0")[0] == 404


def test_bandwidth_to_members_is_bounded(cluster: Start, origin: Origin) -> None:
    first, second = cluster(2, peer_bytes_per_s=4 * MIB, peer_timeout_s=5)
    url = origin.add("d/x.tar", data(SIZE))
    assert get(first, url) == (200, data(SIZE))
    sent = first.context.peers.stats  # type: ignore[union-attr]
    before, began = sent.sent_bytes, time.monotonic()
    assert get(second, url) == (200, data(SIZE))
    took = time.monotonic() - began
    assert sent.sent_bytes - before <= 4 * MIB * (took + 1)


def test_hot_objects_are_copied(cluster: Start, origin: Origin) -> None:
    """What clients of a node read again stays there whole, where there is room, and can be handed over as a file. Again
    is after more bytes than are kept on probation, of this node's own: 5 MiB of about 21, whoever owns what."""
    services, urls = cluster(2, cache_size="128M"), [origin.add(f"d/{n}.tar", data(SIZE - n)) for n in range(4)]
    first, second = services
    for _ in range(2):
        for n, url in enumerate(urls):
            assert get(first, url) == (200, data(SIZE - n))
        first.stored()
    before = second.context.peers.stats.sent_bytes  # type: ignore[union-attr]
    for n, url in enumerate(urls):
        assert get(first, url) == (200, data(SIZE - n))
        with first.context.cache.peek(url) as held:  # type: ignore[union-attr]
            assert held.whole
    assert second.context.peers.stats.sent_bytes == before  # type: ignore[union-attr]


def test_facts_go_over_the_wire_as_they_are() -> None:
    facts = Facts(5, 'etag "a b"', {"etag": '"a"', "content-type": "x/y"})
    assert unpack_facts(pack_facts(facts)) == facts
    for text in ("", "x", "bnVsbA==", pack_facts(Facts(None, "v")), pack_facts(Facts(5, ""))):
        with pytest.raises(ValueError, match=r".*"):
            unpack_facts(text)
