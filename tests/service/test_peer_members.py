"""Members of a cluster as a name, a list or a file tells them, while they come and go."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin
from tests.service.serving import Inside, until
from tests.service.test_peers import bodies, free_ports, get
from tests.transfer.reading import data
from wds_async.errors import ConfigError
from wds_async.service import peers as peers_module
from wds_async.service.cache.index import CHUNK_BYTES
from wds_async.service.peer_members import Ring, check_member, find_own, members_of

SIZE = 8 * CHUNK_BYTES + 99
NAME = "wds-async-peers.example"


@pytest.fixture(autouse=True)
def refreshed_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "_REFRESH_EVERY_S", 0.1)


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that `NAME` has, as a headless Service's: those of ready pods at this moment."""
    known: list[str] = []
    real = socket.getaddrinfo

    def resolve(host: Any, port: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if host != NAME:
            return real(host, port, *args, **kwargs)
        if not known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in known]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


@contextlib.contextmanager
def service_at(
    host: str, port: int, peers: str, origin: Origin, folder: Path, *, peer_name: str = ""
) -> Iterator[Inside]:
    own: dict[str, Any] = {"host": host, "port": port, "peers": (peers,), "peer_address": f"{host}:{port}"}
    own |= {"folder": folder, "peer_name": peer_name, "transfer": {"hedge_share": 0}}
    with Inside(**own, allow=(origin.base,), private=True, peer_timeout_s=5, grace_s=1) as service:
        yield service


def members(service: Inside) -> int:
    assert service.context.peers is not None
    return len(service.context.peers.ring.members)


def test_a_name_with_many_addresses(addresses: list[str], origin: Origin, tmp_path: Path) -> None:
    """Its addresses change while the services run. All is read, and what stays its owner's is not fetched again."""
    (port,), hosts = free_ports(1), ["127.0.0.11", "127.0.0.12", "127.0.0.13"]
    contents = {origin.add(f"d/{n}.tar", data(SIZE - n)): data(SIZE - n) for n in range(3)}
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(service_at(host, port, f"dns:{NAME}:{port}", origin, tmp_path / host)) for host in hosts
        ]
        assert [members(one) for one in started] == [0, 0, 0], "the name is not there yet"
        assert [get(started[0], url) == (200, content) for url, content in contents.items()] == [True] * 3
        addresses += hosts[:2]
        until(lambda: [members(one) for one in started] == [2, 2, 2])
        for service in started:
            for url, content in contents.items():
                assert get(service, url) == (200, content)
        addresses.append(hosts[2])
        until(lambda: [members(one) for one in started] == [3, 3, 3])
        before = bodies(origin)
        for service in started:
            for url, content in contents.items():
                assert get(service, url) == (200, content)
        moved = bodies(origin) - before
        assert moved <= 0.7 * sum(map(len, contents.values())), "a third of the chunks has another owner"
        addresses.clear()
        until(lambda: bool(started[0].context.peers._refresh_failed))  # type: ignore[union-attr]
        assert members(started[0]) == 3, "a name that cannot be resolved changes nothing"


def test_a_file_that_changes_while_clients_read(origin: Origin, tmp_path: Path) -> None:
    """Members come and go, the last one by a kill; no reader sees an error."""
    ports, listed = free_ports(3), tmp_path / "members"
    urls = [origin.add(f"d/{n}.tar", data(SIZE - n)) for n in range(4)]
    wrong: list[Any] = []
    ended = threading.Event()

    def write(*some: int) -> None:
        listed.write_text("".join(f"127.0.0.1:{ports[number]}  # node {number}\n" for number in some))

    def read() -> None:
        while not ended.is_set():
            for n, url in enumerate(urls):
                if (answer := get(started[0], url, Cache_Control="no-cache")) != (200, data(SIZE - n)):
                    wrong.append((url, answer[0], answer[1][:100]))

    write(0, 1)
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(service_at("127.0.0.1", port, str(listed), origin, tmp_path / str(port)))
            for port in ports[:2]
        ]
        reader = threading.Thread(target=read)
        reader.start()
        try:
            third = stack.enter_context(service_at("127.0.0.1", ports[2], str(listed), origin, tmp_path / "third"))
            assert third.context.peers is not None
            assert third.context.peers.ring.own == "", "it is not in the list yet"
            write(0, 1, 2)
            until(lambda: [members(one) for one in (*started, third)] == [3, 3, 3])
            until(lambda: third.context.peers.stats.sent_bytes > 0)  # type: ignore[union-attr]
            write(0, 2)
            until(lambda: members(started[0]) == 2)
            started[1].stop()
            listed.write_text("not an address at all:x:y\n")
            until(lambda: bool(started[0].context.peers._refresh_failed))  # type: ignore[union-attr]
            assert members(started[0]) == 2, "a list that cannot be read changes nothing"
        finally:
            ended.set()
            reader.join()
    assert not wrong


def test_a_node_whose_address_changes_keeps_its_chunks(origin: Origin, tmp_path: Path) -> None:
    """As a pod's does that is replaced: the disk is the node's, and its chunks are found there. The former address is
    listed for a while yet."""
    (port, moved), hosts = free_ports(2), ["127.0.0.21", "127.0.0.22", "127.0.0.23"]
    listed, names = tmp_path / "members", ["node a", "node b", "node c"]
    contents = {origin.add(f"d/{n}.tar", data(SIZE - n)): data(SIZE - n) for n in range(3)}

    def start(node: int, port: int, stack: contextlib.ExitStack) -> Inside:
        at = service_at(hosts[node], port, str(listed), origin, tmp_path / hosts[node], peer_name=names[node])
        return stack.enter_context(at)

    def known(service: Inside) -> list[str]:
        return sorted(service.context.peers.ring.names.values())  # type: ignore[union-attr]

    listed.write_text("".join(f"{host}:{port}\n" for host in hosts))
    with contextlib.ExitStack() as stack:
        started = [start(node, port, stack) for node in range(3)]
        until(lambda: [known(one) for one in started] == [names] * 3)
        for service in started:
            for url, content in contents.items():
                assert get(service, url) == (200, content)
        before = bodies(origin)
        started[2].stop()
        listed.write_text("".join(f"{host}:{port}\n" for host in hosts) + f"{hosts[2]}:{moved}\n")
        started[2] = start(2, moved, stack)
        assert members(started[2]) == 3, "its former address is none of the members for it"
        until(lambda: all(f"http://{hosts[2]}:{moved}" in one.context.peers.ring.names for one in started))  # type: ignore[union-attr]
        for service in started:
            for url, content in contents.items():
                assert get(service, url) == (200, content)
        listed.write_text("".join(f"{host}:{port}\n" for host in hosts[:2]) + f"{hosts[2]}:{moved}\n")
        until(lambda: [members(one) for one in started] == [3, 3, 3])
        assert [known(one) for one in started] == [names] * 3
        for url, content in contents.items():
            assert get(started[0], url) == (200, content)
        assert bodies(origin) == before


def test_a_member_that_comes_or_goes_moves_its_share_only() -> None:
    names = [f"http://10.0.0.{number}:51080" for number in range(9)]
    before, after = Ring(names[:8], names[0]), Ring(names, names[0])
    chunks = [(f"s3://b/{shard}", number) for shard in range(20) for number in range(50)]
    owners = [(before.ranked(*chunk)[0], after.ranked(*chunk)[0]) for chunk in chunks]
    moved = [new for old, new in owners if new != old]
    assert set(moved) == {names[8]}
    assert 0.07 < len(moved) / len(chunks) < 0.16
    shares = [sum(old == name for old, _ in owners) / len(chunks) for name in names[:8]]
    assert 0.08 < min(shares) <= max(shares) < 0.18


def test_entries(tmp_path: Path, addresses: list[str]) -> None:
    addresses += ["10.0.0.1", "10.0.0.1", "fd00::7", "169.254.169.254", "224.0.0.1"]
    (tmp_path / "members").write_text("# all\nnode-1\nhttps://node-2:7000\n\n10.1.1.1:9\n")
    assert members_of([f"dns:{NAME}", str(tmp_path / "members"), "node-3"], 51080, "http") == [
        "http://10.0.0.1:51080", "http://[fd00::7]:51080", "http://node-1:51080", "https://node-2:7000",
        "http://10.1.1.1:9", "http://node-3:51080",
    ]  # fmt: skip
    assert find_own(["http://10.255.255.1:51080", "http://127.0.0.1:51080"], 51080) == "http://127.0.0.1:51080"
    assert find_own(["http://127.0.0.1:51081"], 51080) == ""
    for entry in ("dns:", "a b", "http://x/y", "http://user@x", "x:0x", ""):
        with pytest.raises(ConfigError, match="peers"):
            check_member(entry)
