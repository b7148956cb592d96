"""Cuts of a tar: each sample is in exactly one span, wherever the cuts are, or there is an error."""

from __future__ import annotations

import functools
import io
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tar.test_parse import END, FORMATS, URL, Feed, header, pax
from wds_async.errors import ShardCutError, ShardFormatError
from wds_async.tar import cut
from wds_async.tar.cut import LOOKBACK_BYTES, CutSpan, SpanMembers
from wds_async.tar.group import base_plus_ext, key_of, samples
from wds_async.tar.parse import members, members_of
from wds_async.tar.source import ByteSource

Sample = tuple[str, tuple[tuple[str, bytes], ...], int]
BLOCK = 512
SMALL_LOOKBACK = 4 * BLOCK


def whole(data: bytes) -> list[Sample]:
    return grouped(members(Feed(data, [1 << 22]), URL))


def grouped(found: Iterator[tuple[str, bytes, int]]) -> list[Sample]:
    return [
        (s["__key__"], tuple((k, v) for k, v in s.items() if not k.startswith("__")), s.offset)
        for s in samples(found, URL)
    ]


def owned(data: bytes, span: CutSpan, sizes: list[int]) -> list[Sample]:
    """What a reader gives that has ``span``, and no byte before those that it needs."""
    feed = Feed(data[span.first_byte :], sizes)
    reading = SpanMembers(span, functools.partial(key_of, keys=base_plus_ext))
    source = ByteSource(reading.watched(feed), URL)
    source.base = span.first_byte
    found = grouped(reading.members(source, members_of))
    source.drop()
    feed.check()
    return found


def spans_of(cuts: Sequence[int]) -> list[CutSpan]:
    edges = [0, *cuts]
    return [CutSpan(start, tuple(edges[n + 1 :])) for n, start in enumerate(edges)]


def together(data: bytes, cuts: Sequence[int], sizes: list[int] | None = None) -> list[Sample]:
    return [sample for span in spans_of(cuts) for sample in owned(data, span, sizes or [1 << 22])]


def pack(pairs: Sequence[tuple[str, bytes]], format: int = tarfile.USTAR_FORMAT, mtime: float = 0) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as tar:
        for name, data in pairs:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), mtime  # type: ignore[assignment]
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def shard(*sizes: int, format: int = tarfile.USTAR_FORMAT, mtime: float = 0, name: str = "{:03}") -> bytes:
    pairs = [
        (f"{name.format(n)}.{field}", bytes([65 + n % 26]) * size)
        for n, size in enumerate(sizes)
        for field in ("a", "b")
    ]
    return pack(pairs, format, mtime)


@pytest.fixture
def short_lookback(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small tar shows what a large one does."""
    monkeypatch.setattr(cut, "LOOKBACK_BYTES", SMALL_LOOKBACK)


# -- one cut, everywhere --------------------------------------------------------------------------------------------

LONG = "d" * 60 + "/" + "n" * 60 + "{:03}"
KINDS = {
    "ustar": shard(0, 700, 1, 512, 3000, 20),
    "gnu, long names": shard(0, 700, 1, 512, format=tarfile.GNU_FORMAT, name=LONG),
    "pax, long names": shard(0, 700, 1, 512, format=tarfile.PAX_FORMAT, name=LONG),
    "pax, times": shard(0, 700, 1, 512, 20, format=tarfile.PAX_FORMAT, mtime=1.5),
    "one member": pack([("a.x", b"z" * 5000)]),
    "one long sample": pack([(f"a.{n}", b"z" * 600) for n in range(9)]),
    "two archives": shard(0, 700, 600) + shard(30, 2000, name="second{:03}"),
    "no end": shard(700, 600)[: 9 * BLOCK],
}


@pytest.mark.parametrize("sizes", [[1 << 22], [513], [700, 31]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("short_lookback")
def test_each_sample_is_on_one_side_of_a_cut(kind: str, sizes: list[int]) -> None:
    data = KINDS[kind]
    expected = whole(data)
    for at in [*range(BLOCK, len(data), BLOCK), *range(1, len(data), 1021)]:
        assert together(data, [at], sizes) == expected, at


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_with_the_true_lookback(kind: str) -> None:
    """Behind another archive that is longer than the lookback, so that the search begins within members."""
    data = shard(40_000, 50_000, name="before{:03}") + KINDS[kind]
    assert len(data) - len(KINDS[kind]) > LOOKBACK_BYTES
    expected = whole(data)
    for at in range(BLOCK, len(data), 7 * BLOCK):
        assert together(data, [at]) == expected, at


@pytest.mark.usefixtures("short_lookback")
def test_many_cuts_within_one_member() -> None:
    data = pack([("a.x", b"1"), ("a.y", b"y" * 30_000), ("a.z", b"z" * 5000), ("b.x", b"2"), ("c.x", b"3")])
    for cuts in ([range(2000, 29_000, 700)], [range(1, 40_000, 300)], [range(512, 45_000, 512)]):
        assert together(data, list(*cuts)) == whole(data)
        parts = [owned(data, span, [1 << 22]) for span in spans_of(list(*cuts))]
        assert sum(map(bool, parts)) <= 3  # all others own nothing


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("short_lookback")
def test_a_span_goes_on_at_any_of_its_samples(kind: str) -> None:
    data = KINDS[kind]
    for cuts in ([len(data) // 3, len(data) // 2], [1500], list(range(700, len(data), 900))):
        for span in spans_of(cuts):
            samples = owned(data, span, [900])
            for n, sample in enumerate(samples):
                assert owned(data, replace(span, at=sample[2]), [900]) == samples[n:], (span, n)


# -- any tar, any cuts ----------------------------------------------------------------------------------------------

INNER = pack([("in.a", b"i" * 600), ("in.b", b""), ("inner.a", b"j" * 30)])
PAYLOADS = st.one_of(
    st.integers(0, 3000).map(lambda size: b"p" * size),
    st.integers(0, 8).map(lambda blocks: bytes(blocks * BLOCK)),
)
TRICKY = st.sampled_from(
    [INNER, INNER[: 3 * BLOCK], b"x" * 100 + INNER, bytes(BLOCK) + INNER, INNER + b"y" * 999, INNER * 2]
)
NAMES = st.sampled_from(["s{}.a", "s{}.b", "s{}.c", "README", "__meta__/x.json", "d" * 70 + "/" + "n" * 70 + "{}.a"])


@st.composite
def archives(draw: st.DrawFn, payloads: st.SearchStrategy[bytes]) -> bytes:
    """A tar of samples of a few members, with names that make none between them."""
    pairs = []
    for number in range(draw(st.integers(1, 6))):
        for name in draw(st.lists(NAMES, min_size=1, max_size=3, unique=True)):
            pairs.append((name.format(number), draw(payloads)))
    mtime = draw(st.sampled_from([0, 1.5]))
    return pack(pairs, draw(st.sampled_from(FORMATS)), mtime)


def some_cuts(draw: st.DrawFn, size: int) -> list[int]:
    places = st.one_of(st.integers(1, size), st.integers(1, size // BLOCK).map(lambda n: n * BLOCK))
    return sorted(draw(st.sets(places, min_size=1, max_size=7)))


@given(st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("short_lookback")
def test_every_sample_comes_once_from_plain_payloads(draw: st.DataObject) -> None:
    data = draw.draw(archives(PAYLOADS))
    cuts = draw.draw(st.composite(some_cuts)(len(data)))
    sizes = draw.draw(st.sampled_from([[1 << 22], [513], [1, 2000, 77]]))
    assert together(data, cuts, sizes) == whole(data)


@given(st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("short_lookback")
def test_with_tars_as_payloads_every_sample_comes_once_or_there_is_an_error(draw: st.DataObject) -> None:
    data = draw.draw(archives(st.one_of(PAYLOADS, TRICKY)))
    cuts = draw.draw(st.composite(some_cuts)(len(data)))
    found, errors = [], []
    for span in spans_of(cuts):
        try:
            found += owned(data, span, [1 << 22])
        except (ShardCutError, ShardFormatError) as error:
            errors.append(error)
    # A reader that begins in the wrong place may fail in its own way: then another one finds that.
    refused = [error for error in errors if isinstance(error, ShardCutError)]
    assert found == whole(data) if not errors else refused
    assert all(error.shard == URL and error.offset in cuts for error in refused)


# -- tars that are cut by an index only -----------------------------------------------------------------------------

CUTS_WITHIN = range(3 * BLOCK, 9 * BLOCK, 500)


def refused(data: bytes, cuts: Sequence[int] = CUTS_WITHIN) -> int:
    """How many of single cuts are refused; the others give every sample once."""
    count = 0
    for at in cuts:
        try:
            assert together(data, [at]) == whole(data)
        except ShardCutError:
            count += 1
    return count


@pytest.mark.usefixtures("short_lookback")
def test_a_cut_in_a_tar_within_the_tar_is_refused() -> None:
    data = pack([("a.x", b"1"), ("b.tar", pack([(f"in{n}.x", b"i") for n in range(20)])), ("c.x", b"3")])
    inside = range(4 * BLOCK, 40 * BLOCK, BLOCK)
    assert refused(data, inside) >= len(inside) - 3
    with pytest.raises(ShardCutError, match=r"byte 4096.*wds-async index") as raised:
        together(data, [4096])
    assert (raised.value.shard, raised.value.offset) == (URL, 4096)


@pytest.mark.usefixtures("short_lookback")
def test_a_fake_header_in_a_payload() -> None:
    """That leads nowhere, or past all that follows."""
    for size in (0, 700, 1 << 30):
        fake = header(name=b"fake.x", size=b"%011o\0" % size)
        data = pack([("a.x", b"x" * 1024 + fake + b"x" * 900), ("b.x", b"2"), ("c.x", b"3"), ("d.x", b"4")])
        refused(data, range(BLOCK, len(data), BLOCK))
        unaligned = pack([("a.x", b"x" * 1000 + fake + b"x" * 924), ("b.x", b"2"), ("c.x", b"3")])
        assert refused(unaligned, range(BLOCK, len(unaligned), BLOCK)) == 0


@pytest.mark.usefixtures("short_lookback")
def test_headers_older_than_ustar_are_refused() -> None:
    old = [header(name=b"%d.x\0\0" % n, size=b"%011o\0" % 600, magic=bytes(8)) for n in range(9)]
    data = b"".join(block + b"v" * 600 + bytes(424) for block in old) + END
    assert len(whole(data)) == 9
    assert refused(data) == len(CUTS_WITHIN)


@pytest.mark.usefixtures("short_lookback")
def test_a_global_header_with_names_is_refused() -> None:
    data = pax(b"g", b"comment=of git") + shard(*[600] * 9)
    assert refused(data) == 0
    data = pax(b"g", b"path=all.x") + pack([("a.x", b"a" * 600)] * 3)
    with pytest.raises(ShardCutError, match="global PAX header"):
        owned(data, CutSpan(0, (5 * BLOCK,)), [1 << 22])


def test_extension_headers_that_are_longer_than_the_lookback() -> None:
    more = pax(b"x", b"comment=" + b"c" * (LOOKBACK_BYTES + 9000))
    data = b"".join(more + shard(700, name=f"{n}-{{:03}}")[: 6 * BLOCK] for n in range(4)) + END
    assert len(whole(data)) == 4
    assert 0 < refused(data, range(BLOCK, len(data), 17 * BLOCK)) < len(data) // (17 * BLOCK)
