"""Commands for a service that runs, by the control socket in its folder: what `wds-async cache` does there."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.servers import Origin
from tests.service.serving import Inside, ask
from tests.transfer.reading import MIB, data
from wds_async.cli.cache import command
from wds_async.service.cache import upkeep
from wds_async.service.control import socket_path

BODY = data(2 * MIB + 100)
SETTINGS = {"folder": "cache", "scrub_bytes_per_s": 0}


@pytest.fixture
def filled(origin: Origin, serve: Callable[..., Inside]) -> Callable[..., Inside]:
    """``filled(**settings)`` starts a service that has three objects."""
    for number in range(3):
        origin.add(f"/d/{number}.tar", BODY + bytes([number]))

    def start(**settings: Any) -> Inside:
        service = serve(**settings)
        for number in range(3):
            assert ask(f"{service.base}/ais/b/{number}.tar")[0] == 200
        service.stored()
        service.call(service.context.cache.flush())
        return service

    return start


def cache(folder: Path, *arguments: str) -> Any:
    return CliRunner().invoke(command, [*arguments, "--folder", str(folder)])


def held(service: Inside) -> list[str]:
    service.stored()
    service.call(service.context.cache.flush())
    return [row.key.rpartition("/")[2] for row in upkeep.listed(Path(service.config.folder))]


def test_objects_are_removed(filled: Callable[..., Inside], origin: Origin, tmp_path: Path) -> None:
    service = filled()
    assert held(service) == ["0.tar", "1.tar", "2.tar"]
    result = cache(tmp_path / "cache", "rm", f"{origin.base}/d/1.tar", f"{origin.base}/none/")
    assert result.exit_code == 0, result.output
    assert "1 object removed, 2.1 MB" in result.output
    assert held(service) == ["0.tar", "2.tar"]
    assert len([path for path in (tmp_path / "cache" / "data").rglob("*") if path.is_file()]) == 2
    origin.forget()
    assert ask(f"{service.base}/ais/b/1.tar")[2] == BODY + b"\1"
    assert len(origin.requests) == 2
    assert "3 objects" in cache(tmp_path / "cache", "rm", "--all").output
    assert held(service) == []
    assert service.context.cache.statistics().bytes == 0


def test_chunks_are_compared_with_their_checksums(filled: Callable[..., Inside], tmp_path: Path) -> None:
    service = filled()
    result = cache(tmp_path / "cache", "verify")
    assert (result.exit_code, result.output) == (0, "6 chunks are good, 0 were bad\n")
    paths = sorted(path for path in (tmp_path / "cache" / "data").rglob("*") if path.is_file())
    with paths[0].open("r+b") as file:
        file.write(b"?" * 10)
    result = cache(tmp_path / "cache", "verify", "--json")
    assert result.exit_code == 1
    found = [json.loads(line) for line in result.output.splitlines() if line.startswith("{")]
    assert sorted(one["bad"] for one in found) == [0, 0, 1]
    assert sorted(ask(f"{service.base}/ais/b/{number}.tar")[2] for number in range(3)) == [
        BODY + bytes([number]) for number in range(3)
    ]
    assert cache(tmp_path / "cache", "verify").exit_code == 0


def test_what_is_pinned_stays_and_displaces_others(
    filled: Callable[..., Inside], origin: Origin, tmp_path: Path
) -> None:
    service = filled(cache_size="11M")  # for five objects of three chunks each: less than a chunk is counted as blocks
    for number in range(3, 9):
        origin.add(f"/d/{number}.tar", BODY + bytes([number]))
    result = cache(tmp_path / "cache", "pin", f"{origin.base}/d/0.tar", f"{origin.base}/d/8.tar")
    assert result.output.splitlines() == [f"{origin.base}/d/0.tar", f"{origin.base}/d/8.tar"]
    for number in range(3, 9):
        assert ask(f"{service.base}/ais/b/{number}.tar")[2] == BODY + bytes([number])
    assert {"0.tar", "8.tar"} <= set(held(service))
    lines = cache(tmp_path / "cache", "ls").output.splitlines()
    assert {line.split("/")[-1] for line in lines if "pinned" in line} == {"0.tar  pinned", "8.tar  pinned"}
    service.stop()
    assert cache(tmp_path / "cache", "pin").output.splitlines() == result.output.splitlines()
    assert cache(tmp_path / "cache", "unpin", f"{origin.base}/d/0.tar").output == f"{origin.base}/d/8.tar\n"


def test_a_prefix_is_pinned_before_anything_of_it_comes(
    filled: Callable[..., Inside], origin: Origin, tmp_path: Path
) -> None:
    service = filled(cache_size="11M")
    origin.add("/d/val/0.tar", BODY)
    assert cache(tmp_path / "cache", "pin", f"{origin.base}/d/val/").exit_code == 0
    ask(f"{service.base}/ais/b/val/0.tar")
    for number in range(3, 9):
        origin.add(f"/d/{number}.tar", BODY + bytes([number]))
        ask(f"{service.base}/ais/b/{number}.tar")
    policy = service.context.cache.fetching.policy
    assert policy.is_pinned(f"{origin.base}/d/val/0.tar")
    assert not policy.is_pinned(f"{origin.base}/d/0.tar")
    assert "0.tar" in held(service)
    assert cache(tmp_path / "cache", "unpin", f"{origin.base}/d/val/").output == ""
    assert not policy.is_pinned(f"{origin.base}/d/val/0.tar")


def test_quotas_change(origin: Origin, tmp_path: Path) -> None:
    for number in range(3):
        origin.add(f"/d/{number}.tar", BODY)
    (tmp_path / "tokens").write_text("one vision\ntwo speech\n")
    service = Inside(
        allow=(origin.base,), buckets={"b": f"{origin.base}/d/"}, private=True, tokens=str(tmp_path / "tokens"),
        folder=tmp_path / "cache", cache_size="64M", quotas={"vision": 0.5},
    )  # fmt: skip
    with service:
        for number in range(3):
            assert ask(f"{service.base}/ais/b/{number}.tar", Authorization="Bearer one")[0] == 200
        output = cache(tmp_path / "cache", "quota").output
        assert output.split() == ["6.3", "MB", "50%", "vision"]
        cache(tmp_path / "cache", "quota", "vision=0.505")
        assert "50.5%" in cache(tmp_path / "cache", "quota").output
        result = cache(tmp_path / "cache", "quota", "vision=0.05", "speech=0.9", "--json")
        assert [json.loads(line) for line in result.output.splitlines()] == [
            {"tenant": "speech", "bytes": 0, "quota": 0.9},
            {"tenant": "vision", "bytes": 2 * MIB + 4096, "quota": 0.05},
        ]
        assert "1 together at most" in str(cache(tmp_path / "cache", "quota", "vision=0.2").exception)
        assert "write TENANT=SHARE" in cache(tmp_path / "cache", "quota", "vision").output
        result = cache(tmp_path / "cache", "quota", "vision=0", "--json")
        assert json.loads(result.output.splitlines()[-1])["quota"] is None


def test_the_socket_is_its_users_own_and_goes_with_the_service(filled: Callable[..., Inside], tmp_path: Path) -> None:
    service = filled()
    path = tmp_path / "cache" / "control.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    service.stop()
    assert not path.exists()
    left = socket.socket(socket.AF_UNIX)  # as one that was killed leaves it
    left.bind(str(path))
    left.close()
    assert "6 chunks are good" in cache(tmp_path / "cache", "verify").output  # on the folder itself
    service = filled()
    assert "6 chunks are good" in cache(tmp_path / "cache", "verify").output


def test_a_long_path(filled: Callable[..., Inside], tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 100) / ("e" * 100)
    folder.mkdir(parents=True)
    filled(folder=folder)
    assert "6 chunks are good" in cache(folder, "verify").output
    with socket_path(folder) as path:
        assert len(os.fsencode(path)) < 107


def test_what_makes_no_sense_is_refused(filled: Callable[..., Inside], tmp_path: Path) -> None:
    import http.client

    filled()
    for body in (b"[1]", b"{", b'{"urls": 5}', b'{"quotas": {"a": "b"}}'):
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(tmp_path / "cache" / "control.sock"))
        connection.request("POST", "/quotas" if b"quotas" in body else "/rm", body)
        answer = connection.getresponse()
        assert answer.status == 400
        assert json.loads(answer.read())["error"]
        connection.close()
