"""What is answered at once, and what the slow way is to say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.shelf import Held, Shelf
from wds_async.service.door import Door, Warm
from wds_async.service.heads import Head


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    (tmp_path / "x.tar").write_bytes(bytes(range(100)))
    found = Shelf(tmp_path)
    yield found
    found.close()


def head(method: str = "GET", target: bytes = b"/gs/b/x.tar", **fields: bytes) -> Head:
    named = {name.replace("_", "-").encode(): value for name, value in fields.items()}
    return Head(method, target, {b"host": b"h", **named}, True)


def warm(shelf: Shelf, asked: Head) -> Warm | None:
    """The answer; whatever it is, no reference and no request is left over."""
    door = Door(shelf, clock=lambda: 0.0)
    answer = door.warm(asked, "127.0.0.1")
    if answer is not None:
        assert shelf.under_way[answer.client] == 1
        door.over(answer)
    assert [one.references for one in shelf.held.values()] == [0]
    assert not any(shelf.under_way.values())
    return answer


def held(shelf: Shelf) -> Held:
    return shelf.held["x.tar"]


def test_the_whole_object(shelf: Shelf) -> None:
    answer = warm(shelf, head(wds_client=b"me"))
    assert answer is not None
    assert (answer.status, answer.at, answer.stop, answer.client) == (200, 0, 100, "me")
    assert answer.head == (
        b'HTTP/1.1 200 OK\r\nServer: wds-async/0\r\nETag: "100"\r\nAccept-Ranges: bytes\r\nContent-Length: 100\r\n'
        b"Date: Thu, 01 Jan 1970 00:00:00 GMT\r\n\r\n"
    )
    assert shelf.heard_of == [("me", "gs://b/x.tar")]


def test_a_range_of_it(shelf: Shelf) -> None:
    answer = warm(shelf, head(range=b"bytes=10-19"))
    assert answer is not None
    assert (answer.status, answer.at, answer.stop) == (206, 10, 20)
    assert b"\r\nContent-Range: bytes 10-19/100\r\nContent-Length: 10\r\n" in answer.head


def test_its_head(shelf: Shelf) -> None:
    held(shelf).ready_to = 0  # no byte of it is needed
    answer = warm(shelf, head("HEAD"))
    assert answer is not None
    assert (answer.at, answer.stop) == (0, 0)
    assert b"Content-Length: 100\r\n" in answer.head
    assert shelf.heard_of == []


def test_who_closes_is_told(shelf: Shelf) -> None:
    asked = head()
    asked.keep_alive = False
    answer = warm(shelf, asked)
    assert answer is not None
    assert answer.head.endswith(b"Connection: close\r\n\r\n")


def test_only_what_is_there(shelf: Shelf) -> None:
    held(shelf).ready_to = 50
    assert warm(shelf, head(range=b"bytes=0-49")) is not None
    assert warm(shelf, head(range=b"bytes=0-50")) is None
    assert warm(shelf, head()) is None


def test_a_condition_that_holds_and_others(shelf: Shelf) -> None:
    assert warm(shelf, head(if_match=b'"100"')) is not None
    for other in (b'"99"', b"*", b'W/"100"', b'"100", "99"', b"100"):
        assert warm(shelf, head(if_match=other)) is None


def test_other_conditions_are_for_the_slow_way(shelf: Shelf) -> None:
    assert warm(shelf, head(if_none_match=b'"99"')) is None


@pytest.mark.parametrize("odd", [b"bytes=-5", b"bytes=100-", b"bytes=0-1,2-3"])
def test_odd_ranges_are_for_the_slow_way(shelf: Shelf, odd: bytes) -> None:
    assert warm(shelf, head(range=odd)) is None


def test_a_range_of_a_head_is_a_doubt(shelf: Shelf) -> None:
    assert warm(shelf, head("HEAD", range=b"bytes=0-1")) is None


def test_what_is_not_known_not_allowed_or_too_much(shelf: Shelf) -> None:
    assert warm(shelf, head(target=b"/gs/b/y.tar")) is None
    shelf.token = b"Bearer good"
    assert warm(shelf, head()) is None
    assert warm(shelf, head(authorization=b"Bearer bad")) is None
    assert warm(shelf, head(authorization=b"Bearer good")) is not None
    shelf.most = 0
    assert warm(shelf, head(authorization=b"Bearer good")) is None


def test_an_object_of_unknown_size_or_without_a_file(shelf: Shelf) -> None:
    one = held(shelf)
    size, one.size = one.size, None
    assert warm(shelf, head()) is None
    one.size, fd, one.fd = size, one.fd, -1
    assert warm(shelf, head()) is None
    one.fd = fd


def test_what_it_remembers_has_an_end(shelf: Shelf) -> None:
    door = Door(shelf)
    for i in range(10_000):
        answer = door.warm(head(target=b"/gs/b/x.tar?%d" % i), "")
        assert answer is not None
        door.over(answer)
    assert len(door._names) <= 4096
    answer = door.warm(head(target=b"/gs/b/x.tar?" + b"a" * 2000), "")
    assert answer is not None
    door.over(answer)
    assert max(map(len, door._names)) < 100


def test_what_fails_leaves_no_reference(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(start: int, stop: int) -> int:
        raise OSError("a disk")

    monkeypatch.setattr(held(shelf), "ready", broken)
    with pytest.raises(OSError, match="a disk"):
        Door(shelf).warm(head(), "")
    assert held(shelf).references == 0


def test_another_object_of_that_name_has_another_head(shelf: Shelf) -> None:
    door, one = Door(shelf), held(shelf)
    assert door.fields(one, "ais")[1] == b'"100"'
    one.size, one.facts = 99, object()
    assert door.fields(one, "ais")[1] == b'"99"'
