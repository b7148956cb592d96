"""Samples come out as webdataset groups them."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wds_async.errors import CorruptShard, DuplicateField, TruncatedShard
from wds_async.tar.group import RawSample, admission, base_plus_ext, samples
from wds_async.tar.parse import Member, members

URL = "http://host/shard.tar"


def pack(names: list[str]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size = number % 3
            tar.addfile(info, io.BytesIO(b"x" * info.size))
    return out.getvalue()


def entries(data: bytes, **kw: Any) -> Any:
    pieces = iter([memoryview(data)])
    return members(lambda: next(pieces, None), URL, **kw)


def named(*names: str) -> list[Member]:
    return [(name, name.encode(), 512 * number) for number, name in enumerate(names)]


def reference(data: bytes, handler: Callable[[Exception], bool], **kw: Any) -> list[dict[str, Any]]:
    from webdataset.tariterators import group_by_keys, tar_file_expander

    admitted = {name: kw.pop(name, None) for name in ("select_files", "rename_files")}
    source: dict[str, Any] = {"url": URL, "stream": io.BytesIO(data)}
    if "local_path" in kw:
        source["local_path"] = kw.pop("local_path")
    return list(group_by_keys(tar_file_expander([source], handler=handler, **admitted), handler=handler, **kw))


STEMS = ["a", "b", "d/a", "d.x/a", "d/", "./a", "", "__m__", "a/b.c/001"]
ENDINGS = [".jpg", ".JPG", ".cls", ".seg.png", "", ".", ".__bad__", ".__url__", "/x.jpg"]
NAMES = st.one_of(
    st.tuples(st.sampled_from(STEMS), st.sampled_from(ENDINGS)).map("".join),
    st.text("ab_./", min_size=1, max_size=8),
)


@settings(max_examples=400, deadline=None)
@given(
    names=st.lists(NAMES, max_size=10),
    lcase=st.booleans(),
    suffixes=st.sampled_from([None, {"jpg", "cls"}, {"nothing"}]),
    local_path=st.sampled_from([None, "/data/shard.tar"]),
    go_on=st.booleans(),
    choose=st.sampled_from([{}, {"select_files": lambda name: "b" not in name}, {"rename_files": str.upper}]),
)
@example(["a.jpg", "a.cls", "a.jpg", "a.seg.png", "b.jpg"], True, None, "/x", True, {})
@example(["a.jpg", "a.jpg", "b.jpg"], True, None, None, False, {})
def test_equals_webdataset_sample_for_sample(
    names: list[str], lcase: bool, suffixes: Any, local_path: str | None, go_on: bool, choose: dict[str, Any]
) -> None:
    data = pack([name for name in names if name.strip("/")])
    met: list[type] = []
    faults: list[type] = []

    def handler(met: list[type]) -> Callable[[Exception], bool]:
        return lambda exn: met.append(type(exn)) or go_on  # type: ignore[func-returns-value]

    extra = {"local_path": local_path} if local_path else {}
    expected = reference(data, handler(met), lcase=lcase, suffixes=suffixes, **extra, **choose)
    found = list(
        samples(
            entries(data, admit=admission(**choose)),
            URL,
            lcase=lcase,
            suffixes=suffixes,
            on_error=handler(faults),
            **extra,  # type: ignore[arg-type]
        )
    )
    assert [list(sample.items()) for sample in found] == [list(sample.items()) for sample in expected]
    assert len(faults) == len(met)
    assert set(faults) <= {DuplicateField}


@settings(max_examples=500)
@given(st.text("ab./", max_size=10))
def test_names_split_as_webdataset_splits_them(name: str) -> None:
    from webdataset.tariterators import base_plus_ext as theirs

    assert base_plus_ext(name) == theirs(name)


def test_a_sample_knows_where_it_stands_without_a_key_for_it() -> None:
    data = pack(["a.jpg", "a.cls", "b.jpg", "b.cls"])
    first, second = samples(entries(data), URL)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert [first.offset, second.offset] == [tar.getmembers()[0].offset, tar.getmembers()[2].offset]
    assert first.shard == URL
    assert list(second) == ["__key__", "__url__", "jpg", "cls"]
    assert first == {"__key__": "a", "__url__": URL, "jpg": b"", "cls": b"x"}


@pytest.mark.parametrize(
    "through",
    [copy.copy, copy.deepcopy, RawSample.copy]
    + [lambda sample, n=n: pickle.loads(pickle.dumps(sample, n)) for n in range(2, pickle.HIGHEST_PROTOCOL + 1)],
)
def test_its_place_survives_copies(through: Callable[[RawSample], RawSample]) -> None:
    (sample,) = samples(named("a.jpg", "a.cls"), URL)
    sample.offset, sample.stop = 77, 99
    other = through(sample)
    assert type(other) is RawSample
    assert other == sample
    assert other is not sample
    assert (other.shard, other.offset, other.stop) == (URL, 77, 99)


@settings(max_examples=200, deadline=None)
@given(names=st.lists(NAMES, max_size=10))
@example(["a.jpg", "__index__", "nothing", "b.jpg", "b.cls", "c.__bad__", "d.jpg"])
def test_a_sample_ends_where_the_next_one_begins(names: list[str]) -> None:
    found = list(samples(named(*names), URL, on_error=lambda exn: True))
    heads = [offset for name, _, offset in named(*names) if base_plus_ext(name)[0] is not None]
    assert all(sample.stop in heads and sample.stop > sample.offset for sample in found[:-1])
    for sample, following in itertools.pairwise(found):
        assert sample.stop is not None
        assert sample.stop <= following.offset  # less where a sample between them was dropped
    for number, sample in enumerate(found):  # what stands between is that sample, whatever comes before and behind
        between = [member for member in named(*names) if sample.offset <= member[2] < (sample.stop or 1 << 30)]
        assert list(samples(between, URL, on_error=lambda exn: True)) == [sample], number


def test_the_last_sample_before_damage_ends_at_the_damaged_member() -> None:
    found: list[RawSample] = []
    with pytest.raises(TruncatedShard):
        found.extend(samples(entries(pack(["a.jpg", "b.jpg"])[:1024]), URL))  # the byte of b.jpg is missing
    assert [(sample.offset, sample.stop) for sample in found] == [(0, 512)]
    damaged = bytearray(pack(["a.jpg", "b.jpg", "c.jpg"]))
    damaged[512 + 130] ^= 1  # in the header of b.jpg, so that nothing says whose it is
    with pytest.raises(CorruptShard):
        found.extend(samples(entries(bytes(damaged)), URL))
    assert len(found) == 1


def test_a_duplicate_field_names_everything() -> None:
    with pytest.raises(DuplicateField, match=r"member 'a.JPG' at byte 512 gives sample 'a' the field 'jpg'"):
        list(samples(named("a.jpg", "a.JPG"), URL))
    assert len(list(samples(named("a.jpg", "a.JPG"), URL, lcase=False))) == 1
    with pytest.raises(DuplicateField) as info:
        list(samples(named("a.jpg", "a.jpg"), "https://h/x.tar?sig=hush"))
    assert "hush" not in str(info.value)


def test_meta_members_are_no_fields_whoever_admitted_them() -> None:
    found = list(samples(named("__index__", "__meta__/a.json", "a.jpg", "__a__.cls"), URL))
    assert [sample["__key__"] for sample in found] == ["a", "__a__"]


def test_only_adjacent_members_group() -> None:
    found = list(samples(named("a.jpg", "b.jpg", "a.cls"), URL))
    assert [sample["__key__"] for sample in found] == ["a", "b", "a"]


def test_a_key_that_begins_another_is_not_it() -> None:
    found = list(samples(named("a.jpg", "ab.cls", "a.d/x.jpg", "a.d.txt"), URL))
    assert [sample["__key__"] for sample in found] == ["a", "ab", "a.d/x", "a"]


def test_keys_may_be_the_users_own_and_may_fail() -> None:
    def keys(name: str) -> tuple[str, str]:
        key, _, ext = name.rpartition("-")
        if not key:
            raise KeyError(name)
        return key, ext

    found = list(samples(named("a.b-x", "a.b-y", "bad", "c-x"), URL, keys=keys, on_error=lambda exn: True))
    assert [list(sample)[2:] for sample in found] == [["x", "y"], ["x"]]
    assert [s["__key__"] for s in samples(named("a-x", "bad", "c-x"), URL, keys=keys, on_error=lambda e: False)] == [
        "a"
    ]
    with pytest.raises(KeyError):
        list(samples(named("bad"), URL, keys=keys))


def test_admission_renames_then_selects_and_skips_meta_before_both() -> None:
    admit = admission(lambda name: name != "DROP.JPG", str.upper)
    assert [admit(name) for name in ("a.jpg", "drop.jpg", "__x__/a.jpg", "__x__")] == ["A.JPG", None, None, None]
    assert admission(skip_meta=None)("__x__/a.jpg") == "__x__/a.jpg"


def test_extensions_without_end_do_not_pile_up() -> None:
    many = [(f"{number}.E{number}", b"", 0) for number in range(10_000)]
    found = list(samples(many, URL))
    assert len(found) == 10_000
    assert found[-1]["e9999"] == b""


def test_a_sample_that_is_cut_is_told_of() -> None:
    told: list[tuple[str, Exception]] = []

    def on_cut(key: str, exn: Exception) -> bool:
        told.append((key, exn))
        return whole

    def broken() -> Iterator[Member]:
        yield from [("a.x", b"1", 0), ("b.x", b"2", 512)]
        raise error

    error = TruncatedShard("cut")
    whole = False
    seen: list[str] = []
    with pytest.raises(TruncatedShard):
        seen.extend(s["__key__"] for s in samples(broken(), URL, on_cut=on_cut))
    assert (seen, told) == (["a"], [("b", error)])
    whole, seen = True, []  # what ended the shard was no damage
    with pytest.raises(TruncatedShard):
        seen.extend(s["__key__"] for s in samples(broken(), URL, on_cut=on_cut))
    assert seen == ["a", "b"]


def test_the_first_sample_behind_a_gap_is_dropped() -> None:
    told: list[tuple[str, int]] = []
    given: list[Member] = [("a.y", b"1", 512), ("a.z", b"2", 1024), ("b.x", b"3", 1536)]
    found = list(samples(given, URL, drop_first=lambda key, offset: told.append((key, offset))))
    assert ([dict(s) for s in found], told) == ([{"__key__": "b", "__url__": URL, "x": b"3"}], [("a", 512)])
