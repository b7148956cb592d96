"""Eight services on eight nodes with networks of their own: what comes from the store, and nodes that die."""

from __future__ import annotations

import contextlib
import http.client
import signal
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.servers import Origin
from tests.servers.nodes import Nodes
from tests.servers.process import required
from tests.service.serving import Process
from tests.transfer.reading import data
from wds_async.service.cache.index import CHUNK_BYTES

NODES, PORT = 8, 51080
SIZE = 8 * CHUNK_BYTES + 777
GROUPS = {name: [f"{name}/{number}.tar" for number in range(6)] for name in ("all", "killed", "cut")}
CONTENTS = {name: data(SIZE, seed) for seed, name in enumerate(name for names in GROUPS.values() for name in names)}
TOTAL = 6 * SIZE


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with required(), Nodes(NODES) as built:
        yield built


@pytest.fixture(scope="module")
def store(nodes: Nodes) -> Iterator[Origin]:
    with Origin({f"/{name}": content for name, content in CONTENTS.items()}, host=nodes.here) as origin:
        yield origin


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all services: a folder for each by its node's number."""
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def services(nodes: Nodes, store: Origin, place: Path) -> Iterator[list[Process]]:
    """One on each node; their members are in a file, as a headless Service's addresses would be."""
    (place / "members").write_text("".join(f"{address}:{PORT}\n" for address in nodes.addresses))
    with contextlib.ExitStack() as stack:
        started = []
        for node, address in enumerate(nodes.addresses):
            own = place / str(node)
            service = Process(
                own,
                before=nodes.inside(node),
                host=address,
                port=PORT,
                socket=own / "socket",
                folder=own / "cache",
                cache_size="512M",
                allow=(store.base,),
                private=True,
                peers=(str(place / "members"),),
                peer_timeout_s=3,  # eight services on two cores that have other work
                grace_s=1,
            )
            started.append(service)
            stack.callback(service.__exit__)
            service.launch()
        for service in started:
            service.listening()
        yield started


def get(folder: Path, url: str) -> bytes:
    """The object at ``url`` by the service whose Unix socket is in ``folder``."""
    return asked(folder, f"/url/{urllib.parse.quote(url, safe='')}")


def hedged(folder: Path) -> int:
    """Bytes that this service may have requested twice, because a busy machine was late."""
    lines = asked(folder, "/metrics").decode().splitlines()
    return CHUNK_BYTES * sum(
        int(float(line.split()[1])) for line in lines if line.startswith("wds_origin_hedges_total")
    )


def asked(folder: Path, path: str) -> bytes:
    """What is at ``path`` of the service whose Unix socket is in ``folder``: it reaches into every namespace."""
    connection = http.client.HTTPConnection("localhost", timeout=60)
    connection.sock = socket.socket(socket.AF_UNIX)
    try:
        connection.sock.settimeout(60)
        connection.sock.connect(str(folder / "socket"))
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, body[:300]
        return body
    finally:
        connection.close()


def read(
    place: Path,
    store: Origin,
    plan: Mapping[int, Sequence[str]],
    wrong: list[str],
    then: Callable[[], None] | None = None,
) -> int:
    """Have the services of these nodes read objects at once, each in its order, and return how many bytes the store has
    sent. What is not right goes to ``wrong``. ``then`` is called when some of it was sent."""
    store.forget()

    def of_node(node: int, names: Sequence[str]) -> None:
        for name in names:
            try:
                right = get(place / str(node), store.url(name)) == CONTENTS[name]
            except (OSError, http.client.HTTPException, AssertionError) as exn:
                wrong.append(f"node {node}, {name}: {exn!r}")
            else:
                if not right:
                    wrong.append(f"node {node}, {name}: other bytes")

    threads = [threading.Thread(target=of_node, args=item) for item in plan.items()]
    for thread in threads:
        thread.start()
    if then is not None:
        store.wait_until(lambda store: len(store.sent) > 12)
        then()
    for thread in threads:
        thread.join()
    return sum(one.body_bytes for one in store.sent)


def test_eight_nodes_download_each_byte_once(services: list[Process], store: Origin, place: Path) -> None:
    """All of them read everything, at the same time and in different orders."""
    wrong: list[str] = []
    names = GROUPS["all"]
    everything = {node: [*names[node % 6 :], *names[: node % 6]] for node in range(NODES)}
    sent = read(place, store, everything, wrong)
    assert not wrong
    assert sent - sum(hedged(place / str(node)) for node in range(NODES)) <= 1.02 * TOTAL


@pytest.mark.parametrize("how", ["killed", "cut"])
def test_a_node_that_dies_costs_no_error(
    how: str, services: list[Process], nodes: Nodes, store: Origin, place: Path
) -> None:
    """In the middle of the others' reading: it is killed, or its cable is taken out, of which no other node is told."""
    wrong: list[str] = []

    def die() -> None:
        if how == "killed":
            services[5].signal(signal.SIGKILL)
        else:
            nodes.cut(6)

    sent = read(place, store, dict.fromkeys((0, 1, 2), GROUPS[how]), wrong, die)
    assert not wrong
    assert sent <= 2 * TOTAL, "what was the dead node's comes once more, or so"
