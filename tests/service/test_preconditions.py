"""Conditions and byte ranges of a request: as text, and as nginx answers each of them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.servers import Nginx
from tests.servers.process import required
from tests.service.serving import Inside, ask
from tests.transfer.reading import MIB, data
from wds_async.service.preconditions import RANGES_LIMIT, Validators, first_byte, must_send, ranges_of
from wds_async.service.refusals import Refusal

OLD, NOW, NEW = (f"Tue, {day} Nov 2023 22:13:20 GMT" for day in ("07", "14", "21"))


HAS = Validators('"a"', NOW)


WEAK = Validators('W/"a"', NOW)


def test_the_origins_own_validators_pass_unchanged() -> None:
    fields = {"etag": 'W/"x-1"', "last-modified": NOW}
    assert Validators.of(fields, "etag x") == Validators('W/"x-1"', NOW)


def test_an_etag_is_made_of_the_identity() -> None:
    one, same, other = (Validators.of({}, identity).etag for identity in ("version 1", "version 1", "version 2"))
    assert one == same != other
    assert one.startswith('"wds-')
    assert "version" not in one  # an identity may hold what is nobody's business
    assert Validators.of({}, "").etag == ""


@pytest.mark.parametrize(
    ("asked", "has", "wanted"),
    [
        ({}, HAS, True),
        ({"if-none-match": '"a"'}, HAS, False),
        ({"if-none-match": 'W/"a"'}, HAS, False),
        ({"if-none-match": '"b", "a"'}, HAS, False),
        ({"if-none-match": "*"}, HAS, False),
        ({"if-none-match": '"b"'}, HAS, True),
        ({"if-none-match": '"b"', "if-modified-since": NEW}, HAS, True),  # the date is not looked at
        ({"if-modified-since": NOW}, HAS, False),
        ({"if-modified-since": OLD}, HAS, True),
        ({"if-modified-since": "yesterday"}, HAS, True),
        ({"if-modified-since": NOW}, Validators('"a"'), True),
        ({"if-match": '"a"'}, HAS, True),
        ({"if-match": '"b", "a"'}, HAS, True),
        ({"if-match": "*"}, WEAK, True),
        ({"if-match": "a"}, Validators("a"), True),  # some servers send them without quotes
        ({"if-unmodified-since": NOW}, HAS, True),
        ({"if-match": '"a"', "if-unmodified-since": OLD}, HAS, True),
    ],
)
def test_whether_it_is_sent(asked: dict[str, str], has: Validators, wanted: bool) -> None:
    assert must_send(asked, has) is wanted


@pytest.mark.parametrize(
    ("asked", "has"),
    [
        ({"if-match": '"b"'}, HAS),
        ({"if-match": 'W/"a"'}, WEAK),  # RFC 9110: only strong ones match here
        ({"if-match": '"a"'}, Validators()),
        ({"if-unmodified-since": OLD}, HAS),
    ],
)
def test_another_object_is_refused(asked: dict[str, str], has: Validators) -> None:
    with pytest.raises(Refusal) as caught:
        must_send(asked, has)
    assert caught.value.status == 412


BODY = data(5 * MIB + 17)


SIZE = len(BODY)


LARGEST = (1 << 63) - 1


# Of an object of SIZE bytes; {etag} and {modified} stand for its validators.
ODD = [
    "bytes=0-0", "bytes=0-", "bytes=5-5", "bytes=-5", f"bytes=-{SIZE}", f"bytes=-{SIZE + 1}", f"bytes={SIZE - 1}-",
    f"bytes={SIZE}-", f"bytes={SIZE}-{SIZE}", f"bytes=5-{SIZE}", f"bytes=0-{LARGEST}", f"bytes=0-{LARGEST + 1}",
    f"bytes={LARGEST}-", f"bytes={LARGEST + 1}-", f"bytes=-{LARGEST}", f"bytes=-{LARGEST + 1}",
    "bytes=0-" + "9" * 400, "bytes=" + "9" * 400 + "-", "bytes=" + "0" * 400 + "7-9", "bytes=-0", "bytes=-00",
    "bytes=5-4", "bytes=1-0", "bytes=", "bytes", "bytes=-", "bytes=--5", "bytes=a-b", "bytes=0-b", "bytes=0x10-",
    "bytes=+5-9", "bytes=5", "bytes=5-9-", "bytes=5-9;", "bytes=1.5-9", "bytes=1\u0662-9", "bytes= 5 - 9 ",
    "bytes=5- 9", "bytes=- 5", "bytes= -5", "bytes=-5 ", "bytes=5\t-9", "bytes =5-9", "BYTES=5-9", "Bytes=5-9",
    "lines=5-9", "none=5-9", "items=", "5-9", "=5-9", "bytes:5-9", "bytes=0-0,2-3", "bytes=0-0, 2-3",
    "bytes=0-0 ,2-3", "bytes=2-3,0-0", "bytes=0-9,5-14", "bytes=0-4,0-4", f"bytes=0-0,{SIZE}-", f"bytes={SIZE}-,0-0",
    f"bytes={SIZE}-,{SIZE + 5}-", "bytes=0-0,-1", "bytes=5-4,0-0", "bytes=0-0,5-4", "bytes=0-0,-0", "bytes=0-0,",
    "bytes=,0-0", "bytes=0-0,,2-2", "bytes=0-0,a", "bytes=0-,0-", f"bytes=0-{SIZE // 2},{SIZE // 2}-",
    f"bytes=0-{SIZE // 2},{SIZE // 2 + 1}-", "bytes=0-0,2-3;4-5", "bytes=1000000-1999999,3000000-3999999,10-19",
    f"bytes=0-0,5-{LARGEST + 1}", "bytes=" + ",".join(f"{n}-{n}" for n in range(0, 2 * RANGES_LIMIT, 2)),
    "bytes=" + ",".join(f"{n}-{n}" for n in range(0, 2 * RANGES_LIMIT + 2, 2)),
    "bytes=" + ",".join(["0-0"] * RANGES_LIMIT + [f"{SIZE}-"]),
]  # fmt: skip


CONDITIONS = ["{etag}", "W/{etag}", '"other"', "{modified}", "Thu, 01 Jan 1970 00:00:00 GMT", "tomorrow", ""]


EMPTY = ["bytes=0-", "bytes=-5", "bytes=-0", "bytes=0-0", "bytes=5-", "bytes=5-9", "bytes=0-0,5-9", "bytes=5-,0-0",
         "bytes=a", "bytes=0-,a", "lines=0-1"]  # fmt: skip


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    folder = tmp_path_factory.mktemp("ranges")
    (folder / "x.tar").write_bytes(BODY)
    (folder / "none.tar").write_bytes(b"")
    with required(), Nginx(folder, extra=f"max_ranges {RANGES_LIMIT};") as server:
        yield server


@pytest.fixture(params=["disk", "memory"])
def service(request: pytest.FixtureRequest, nginx: Nginx, tmp_path: Path) -> Iterator[Inside]:
    folder = tmp_path if request.param == "disk" else ""
    with Inside(allow=(f"{nginx.base}/",), buckets={"b": f"{nginx.base}/"}, private=True, folder=folder) as running:
        yield running


Answer = tuple[int, str, list[tuple[str, str, bytes]]]


def answer(url: str, **fields: str) -> Answer:
    """Status, ``Content-Range`` and what the body holds: each part with its type and range, or the whole."""
    status, got, body = ask(url, **fields)
    if status == 416:
        return status, got["content-range"], []
    assert int(got["content-length"]) == len(body)
    kind = got["content-type"]
    if (found := re.fullmatch(r"multipart/byteranges; boundary=(\w+)", kind)) is None:
        return status, got.get("content-range", ""), [(kind, "", body)]
    assert "content-range" not in got
    before, *parts, after = body.split(f"\r\n--{found[1]}".encode())
    assert (before, after) == (b"", b"--\r\n")
    held = []
    for part in parts:
        head, _, piece = part.partition(b"\r\n\r\n")
        lines = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
        held.append((lines.pop("Content-Type"), lines.pop("Content-Range"), piece))
        assert not lines
    return status, "", held


def test_odd_ranges_are_answered_as_nginx_answers_them(nginx: Nginx, service: Inside) -> None:
    has = ask(nginx.url("x.tar"), "HEAD")[1]
    conditions = [one.format(etag=has["etag"], modified=has["last-modified"]) for one in CONDITIONS]
    ranged = ["bytes=5-9", "bytes=0-0,5-9", f"bytes={SIZE}-", "bytes=a"]
    asked_for = [("x.tar", {"Range": wanted.encode().decode("latin-1")}) for wanted in ODD]
    asked_for += [("x.tar", {"Range": wanted, "If_Range": one}) for wanted in ranged for one in conditions]
    asked_for += [("none.tar", {"Range": wanted}) for wanted in EMPTY]
    others = []
    for name, fields in asked_for:
        expected = answer(nginx.url(name), **fields)
        for _ in range(2):  # cold and warm, where there is a cache
            if (got := answer(f"{service.base}/ais/b/{name}", **fields)) != expected:
                others.append((name, fields, got[:2], expected[:2]))
    assert others == []


def test_a_range_has_no_meaning_for_head(service: Inside) -> None:
    status, fields, _ = ask(f"{service.base}/ais/b/x.tar", "HEAD", Range="bytes=5-9")
    assert (status, fields["content-length"]) == (200, str(SIZE))


@pytest.mark.parametrize(
    ("header", "first"),
    [(None, 0), ("bytes=7-", 7), ("Bytes= 7 - 9", 7), ("bytes=-7", 0), ("bytes=7-8,9-9", 7), ("items=7-8", 0)],
)
def test_where_it_begins_as_far_as_one_can_tell_without_the_size(header: str | None, first: int) -> None:
    assert first_byte(header) == first


@given(st.text(max_size=30) | st.text("0123456789-, ", max_size=30), st.integers(0, 1 << 50))
def test_whatever_comes_is_spans_within_or_the_whole_or_416(text: str, size: int) -> None:
    for header in (text, f"bytes={text}"):
        with contextlib.suppress(Refusal):
            spans = ranges_of(header, size)
            assert all(0 <= span.start < span.stop <= size for span in spans)
            assert sum(span.stop - span.start for span in spans) <= size


@pytest.mark.parametrize("text", [" " * 100_000, "9" * 100_000, "0" * 100_000, "0-" + " " * 100_000, "0-0," * 30_000])
def test_long_headers_cost_little(text: str) -> None:
    """Linear in their length: a regular expression that goes back and forth would take minutes."""
    for header in (f"bytes={text}", f"bytes={text}x"):
        first_byte(header)
        with contextlib.suppress(Refusal):
            ranges_of(header, 10)
