"""Spans of shards: bytes ``[start, stop)``, and no others, by every way in which a shard can be read."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.servers import Behaviour, Origin
from tests.transfer.reading import KIB, bytes_of, data, outcomes, quick, snapshot, spans
from wds_async.config import RetryPolicy, TransferConfig
from wds_async.errors import ConfigError, ObjectChanged, TransferError, TruncatedShard, WdsError
from wds_async.storage.base import Growing, Location
from wds_async.transfer.reader import open_shards
from wds_async.transfer.stats import Counters

CONTENT = data(700 * KIB + 3)
SIZE = len(CONTENT)
PATIENT = RetryPolicy(max_attempts=20, refusal_timeout_s=0.0, base_s=0.001, cap_s=0.01)


def wanted(content: bytes, start: int, stop: int | None) -> tuple[bytes, type[WdsError] | None]:
    """What a span gives: the bytes of the object in it, or an error where it begins behind them."""
    size = len(content)
    behind = start != stop and (start > size or (start == size and stop is not None))
    return content[start:stop], TruncatedShard if behind else None


def check(shards: list[dict[str, Any]], config: TransferConfig | None = None, content: bytes = CONTENT) -> None:
    """Read the spans in one reader, and compare each with the content."""
    for shard, (got, error) in zip(shards, outcomes(shards, config), strict=True):
        right, kind = wanted(content, shard.get("start", 0), shard.get("stop"))
        assert got == right, (shard, len(got), error)
        assert type(error) is (kind or type(None)), (shard, error)


# -- kinds of access --------------------------------------------------------------------------------------------------


class HalfWritten:
    """A shard cache whose file another process is writing: of ``there`` bytes, after which its writer dies."""

    hit, local_path, check = False, None, False

    def __init__(self, there: int) -> None:
        self.there = there
        self.lost = False
        self.awaited, self.patience_s, self.patience_lost = True, 1.0, False

    def entry(self, location: Location, *, whole: bool = True) -> HalfWritten:
        return HalfWritten(self.there)

    def begin(self) -> Growing | None:
        return None if self.lost else self

    def read(self, into: memoryview, offset: int) -> int:
        piece = CONTENT[offset : self.there][: min(len(into), 100_000)]
        into[: len(piece)] = piece
        return len(piece)

    def ended(self, offset: int) -> bool | None:
        self.lost = self.there < SIZE
        return not self.lost

    def nothing(self, *args: Any, **kw: Any) -> None:
        pass

    open = close = want = write = over = reject = lose = replaced = nothing


def served(**behaviour: Any) -> Callable[[Origin, Path], str]:
    def put(origin: Origin, folder: Path) -> str:
        origin.behave(**behaviour)
        return origin.add("x.tar", CONTENT)

    return put


def local(origin: Origin, folder: Path) -> str:
    (folder / "x.tar").write_bytes(CONTENT)
    return str(folder / "x.tar")


def pipe(origin: Origin, folder: Path) -> str:
    return f"pipe:cat {local(origin, folder)}"


def memory(origin: Origin, folder: Path) -> str:
    fsspec.filesystem("memory").pipe_file("/spans/x.tar", CONTENT)
    return "memory://spans/x.tar"


KINDS: dict[str, tuple[Callable[[Origin, Path], str], dict[str, Any]]] = {
    "ranges": (served(), {}),
    "aiohttp": (served(), {"direct": False}),
    "whole answers": (served(ignore_range=True), {}),
    "whole answers by aiohttp": (served(ignore_range=True), {"direct": False}),
    "chunked": (served(ignore_range=True, chunked=True), {}),
    "gzip": (served(gzip=True), {}),
    "no length": (served(ignore_range=True, no_length=True), {}),
    "weak": (served(etag='W/"x"'), {}),
    "no identity": (served(headers={"etag": None, "last-modified": None}), {}),
    "a silent 416": (served(when=lambda r: _start(r) >= SIZE, status=416, body=b""), {}),
    "file": (local, {}),
    "pipe": (pipe, {}),
    "memory": (memory, {}),
}


def _start(request: Any) -> int:
    return int((request.range or "bytes=0-").removeprefix("bytes=").partition("-")[0])


offsets = st.one_of(
    st.sampled_from([0, 1, 511, 512, 64 * KIB, SIZE - 1, SIZE, SIZE + 1, 3 * SIZE]), st.integers(0, SIZE)
)


@st.composite
def some_spans(draw: st.DrawFn) -> list[dict[str, Any]]:
    found = []
    for start in draw(st.lists(offsets, min_size=1, max_size=5)):
        stop = draw(st.none() | offsets.map(lambda length, start=start: start + length))  # type: ignore[misc]
        found.append({"start": start, "stop": stop})
    return found


configs = st.builds(
    lambda part, parts, connections: quick(
        part_bytes=part, budget_bytes=parts * part, first_part_bytes=part, connections=connections, hedge_share=0
    ),
    part=st.sampled_from([64 * KIB, 128 * KIB, 512 * KIB]),
    parts=st.integers(4, 8),
    connections=st.sampled_from([1, 2, 8]),
)
BEGINNING: list[dict[str, Any]] = [{"start": 0, "stop": 1}, {"start": 0, "stop": SIZE}, {"start": 0, "stop": 2 * SIZE}]
END: list[dict[str, Any]] = [{"start": at, "stop": stop} for at, stop in
                             ((SIZE, None), (SIZE, SIZE), (SIZE, SIZE + 1), (SIZE + 1, None))]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_span_has_the_bytes_of_its_object(kind: str, origin: Origin, tmp_path: Path) -> None:
    put, more = KINDS[kind]
    url = put(origin, tmp_path)

    @settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
    @given(asked=some_spans(), config=configs)
    @example(asked=BEGINNING, config=quick())
    @example(asked=END, config=quick())
    @example(asked=[{"start": 300_000}], config=quick(part_bytes=64 * KIB, budget_bytes=256 * KIB))
    def examples(asked: list[dict[str, Any]], config: TransferConfig) -> None:
        check([{"url": url, **span} for span in asked], replace(config, **more))

    examples()


@pytest.mark.parametrize("there", [0, 100 * KIB, 300 * KIB, SIZE])
def test_a_span_of_a_file_that_grows(there: int, origin: Origin) -> None:
    """Where its writer dies, the rest comes from the store."""
    url = origin.add("x.tar", CONTENT)
    asked = [(0, 200 * KIB), (200 * KIB, None), (200 * KIB, 500 * KIB), (SIZE, None), (5, 5)]
    shards = [{"url": url, "start": start, "stop": stop} for start, stop in asked]
    with open_shards(shards, config=quick(), cache=HalfWritten(there)) as reader:  # type: ignore[arg-type]
        for shard in reader:
            got = bytearray()
            while (piece := shard.read()) is not None:
                got += piece
            assert got == CONTENT[shard.start : shard.stop]
    assert bool(origin.requests) == (there < SIZE)


# -- what is requested ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
def test_no_byte_outside_of_a_span_is_requested(origin: Origin, direct: bool) -> None:
    url, counters = origin.add("x.tar", CONTENT), Counters()
    span = {"url": url, "start": 100_001, "stop": 600_002}
    config = quick(direct=direct, hedge_share=0)
    assert bytes_of([span], config, counters) == [CONTENT[100_001:600_002]]
    parts = [part for part in spans(origin.requests) if direct or part != (0, 1)]  # the first byte tells the size
    assert min(parts)[0] == 100_001
    assert max(stop for _, stop in parts) == 600_002
    assert sum(stop - start for start, stop in parts) == snapshot(counters).wire_bytes == 500_001


def test_an_empty_span_is_not_requested(origin: Origin) -> None:
    url = origin.add("x.tar", CONTENT)
    assert bytes_of([{"url": url, "start": at, "stop": at} for at in (0, 5, 2 * SIZE)]) == [b""] * 3
    assert not origin.requests


def test_many_spans_of_one_shard_at_once(origin: Origin) -> None:
    url = origin.add("x.tar", CONTENT)
    cuts = [0, *sorted(random.Random(0).sample(range(1, SIZE), 120)), SIZE]
    shards = [{"url": url, "start": start, "stop": stop} for start, stop in itertools.pairwise(cuts)]
    pieces = bytes_of(shards, quick(hedge_share=0))
    assert b"".join(pieces) == CONTENT
    assert sorted(spans(origin.requests)) == sorted(set(spans(origin.requests)))
    assert origin.most_in_flight > 1


def test_a_pipe_is_left_where_its_span_ends(tmp_path: Path) -> None:
    shards: list[Any] = [{"url": "pipe:yes", "start": 100_000, "stop": 300_000}] * 2
    assert bytes_of(shards) == [b"y\n" * 100_000] * 2


def test_a_span_whose_stop_is_far_behind_the_end(origin: Origin) -> None:
    small = data(1000)
    url = origin.add("small.tar", small)
    check([{"url": url, "start": 10, "stop": 1 << 60}] * 5, content=small)
    assert len(origin.requests) < 100


# -- faults -----------------------------------------------------------------------------------------------------------

FAULTS: dict[str, list[Behaviour]] = {
    "resets": [Behaviour(probability=0.2, cut_after=5000)],
    "ends": [Behaviour(probability=0.2, cut_after=50_000, cut="fin")],
    "no answers": [Behaviour(probability=0.2, cut_after=-1)],
    "errors": [Behaviour(probability=0.2, status=503)],
    "whole answers now and then": [Behaviour(probability=0.2, ignore_range=True)],
    "whole answers that break": [Behaviour(probability=0.5, ignore_range=True, cut_after=400_000)],
    "shifted": [Behaviour(probability=0.2, shift=1)],
    "slow": [Behaviour(probability=0.2, delay_s=0.15)],
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_healed_byte_for_byte(fault: str, streamed: bool) -> None:
    for seed in range(3):
        rng = random.Random(f"{fault} {seed}")
        with Origin(seed=seed) as server:
            url = server.add("x.tar", CONTENT)
            for behaviour in FAULTS[fault]:
                server.behave(behaviour, **({"ignore_range": True} if streamed else {}))
            if streamed:
                server.behave(ignore_range=True)
            asked = [
                {"url": url, "start": (start := rng.randrange(SIZE)), "stop": rng.choice([None, start + 250_000])}
                for _ in range(8)
            ]
            check(asked, quick(retry=PATIENT))


def test_the_rest_is_read_from_where_it_broke(origin: Origin) -> None:
    url = origin.add("x.tar", CONTENT)
    origin.behave(times=1, cut_after=10_000)
    check([{"url": url, "start": 100_000, "stop": 150_000}], quick(hedge_share=0))
    assert spans(origin.requests) == [(100_000, 150_000), (110_000, 150_000)]


def test_an_error_comes_behind_the_good_bytes(origin: Origin) -> None:
    url = origin.add("x.tar", CONTENT)
    origin.behave(when=lambda r: _start(r) == 100_000, cut_after=10_000)
    origin.behave(status=500)
    ((got, error),) = outcomes([{"url": url, "start": 100_000, "stop": 150_000}])
    assert got == CONTENT[100_000:110_000]
    assert isinstance(error, TransferError)
    assert "at byte 110000: the server answered 500" in str(error)


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "pipe"])
def test_a_span_behind_the_end_says_what_is_there(kind: str, origin: Origin, tmp_path: Path) -> None:
    put, more = KINDS[kind]
    url = put(origin, tmp_path)
    ((got, error), following) = outcomes(
        [{"url": url, "start": SIZE + 5}, {"url": url, "start": SIZE - 5}], quick(**more)
    )
    assert got == b""
    assert isinstance(error, TruncatedShard)
    assert f"{url}: bytes from {SIZE + 5} on were requested, and it has {SIZE} bytes" in str(error)
    assert (error.shard, error.offset) == (url, SIZE)
    assert following == (CONTENT[-5:], None)


# -- versions ---------------------------------------------------------------------------------------------------------


def version_of(shard: Any, **config: Any) -> str:
    with open_shards([shard], config=quick(**config)) as reader:
        stream = next(reader)
        assert stream.version == ""
        while stream.read() is not None:
            pass
        return stream.version


@pytest.mark.parametrize("kind", KINDS)
def test_the_version_that_is_expected(kind: str, origin: Origin, tmp_path: Path) -> None:
    put, more = KINDS[kind]
    url = put(origin, tmp_path)
    version = version_of(url, **more)
    assert (version == "") == (kind == "pipe")
    span = {"url": url, "start": 100_000, "stop": 500_000}
    assert version_of(span, **more) == version
    check([{**span, "version": version}] * 3, quick(**more))
    if kind in ("pipe", "memory"):
        return
    changed = CONTENT[::-1] + b"more"
    if kind == "file":
        Path(url).write_bytes(changed)
    else:
        origin.add("x.tar", changed)
    ((got, error),) = outcomes([{**span, "version": version}], quick(**more))
    if kind == "weak":  # the server says that it is the same
        return
    assert got == b""
    assert isinstance(error, ObjectChanged)
    assert str(error).startswith(f"{url} at byte ")
    assert f"since the state was saved or the job was planned: it was {version} and is now " in str(error)
    assert version_of(url, **more) in str(error)


@pytest.mark.parametrize(
    ("expected", "fits"),
    [
        ("etag one", False),
        (f"{SIZE} bytes", True),
        (f"{SIZE + 1} bytes", False),
        (f"inode 7, {SIZE} bytes, modified 5", True),  # another way to read it: only the size can be compared
        (f"inode 7, {SIZE - 1} bytes, modified 5", False),
        ("modified Tue, 14 Nov 2023 22:13:20 GMT, unknown size", True),
        ("", True),
    ],
)
@pytest.mark.parametrize("way", [{}, {"ignore_range": True}, {"ignore_range": True, "chunked": True}], ids=str)
def test_versions_of_different_kinds(origin: Origin, expected: str, fits: bool, way: dict[str, Any]) -> None:
    fits = fits or ("chunked" in way and "bytes" in expected)  # such an answer tells no size
    origin.behave(**way)
    ((got, error),) = outcomes([{"url": origin.add("x.tar", CONTENT), "version": expected}])
    assert (got, type(error)) == ((CONTENT, type(None)) if fits else (b"", ObjectChanged))


def test_a_file_that_was_copied_is_the_same_if_it_has_its_date(tmp_path: Path) -> None:
    version = version_of(local(None, tmp_path))  # type: ignore[arg-type]
    shutil.copy2(tmp_path / "x.tar", tmp_path / "y.tar")
    assert version_of(str(tmp_path / "y.tar")) != version  # another inode
    assert bytes_of([{"url": str(tmp_path / "y.tar"), "version": version}]) == [CONTENT]
    (tmp_path / "y.tar").write_bytes(CONTENT)
    ((_, error),) = outcomes([{"url": str(tmp_path / "y.tar"), "version": version}])
    assert isinstance(error, ObjectChanged)


def test_a_span_of_an_object_that_is_replaced_meanwhile_is_no_mixture(origin: Origin) -> None:
    url = origin.add("x.tar", CONTENT)
    config = quick(part_bytes=64 * KIB, budget_bytes=256 * KIB, connections=1)
    span = {"url": url, "start": 100_000, "stop": 650_000}
    ((got, error),) = outcomes([span], config, after=lambda: origin.add("x.tar", CONTENT[::-1]))
    assert isinstance(error, ObjectChanged)
    assert CONTENT[100_000:].startswith(got)


# -- the dict ---------------------------------------------------------------------------------------------------------


def test_a_stream_tells_its_span(origin: Origin) -> None:
    url = origin.add("x.tar", CONTENT)
    with open_shards([{"url": url, "start": np.int64(5), "stop": 10}, url, {"url": url, "stop": None}]) as reader:
        first = next(reader)
        assert (first.start, first.stop, first.size) == (5, 10, None)
        assert first.read() == CONTENT[5:10]
        assert first.size == SIZE
        assert [(shard.start, shard.stop) for shard in reader] == [(0, None), (0, None)]


@pytest.mark.parametrize(
    "span",
    [{"start": -1}, {"start": 2, "stop": 1}, {"start": 1.0}, {"start": True}, {"start": "0"}, {"start": None},
     {"stop": -1}, {"stop": 2.5}, {"version": 7}],
    ids=str,
)  # fmt: skip
def test_what_is_no_span_is_told_in_its_place(origin: Origin, span: dict[str, Any]) -> None:
    url, read = origin.add("x.tar", CONTENT), []
    with open_shards([url, {"url": url, **span}, url]) as reader:
        with pytest.raises(ConfigError, match=r"x\.tar: start=.*0 <= start <= stop"):
            read.extend(len(shard.read() or b"") for shard in reader)
        assert reader.closed
    assert len(read) == 1


@pytest.mark.parametrize("verify", ["auto", "always"])
def test_a_span_is_not_compared_with_the_checksum_of_its_object(tmp_path: Path, verify: str) -> None:
    url = local(None, tmp_path)  # type: ignore[arg-type]
    (tmp_path / "x.tar.sha256").write_text(f"{'0' * 64}  x.tar\n")
    counters = Counters()
    assert bytes_of([{"url": url, "start": 5}], quick(verify=verify), counters) == [CONTENT[5:]]
    assert snapshot(counters).verified_shards == 0


@pytest.fixture(autouse=True)
def clean_memory() -> Iterator[None]:
    yield
    with_files = fsspec.filesystem("memory")
    if with_files.exists("/spans"):
        with_files.rm("/spans", recursive=True)
