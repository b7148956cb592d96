"""Pages of buckets, of a store of names that lists as stores do: one folder at a time, in an order of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_async.errors import ShardNotFound
from wds_async.service.listing import ListEntry, Listings
from wds_async.service.refusals import Refusal
from wds_async.storage.base import Entry

BUCKET = "gs://b/"


class Store:
    """Lists folders of ``names``, in an order of its own, and remembers which."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.asked = names, list[str]()

    async def entries(self, url: str) -> AsyncIterator[Entry]:
        self.asked.append(url)
        folder, seen = url.removeprefix(BUCKET), set[str]()
        for name in reversed(self.names):
            first, deeper, _ = name.removeprefix(folder).partition("/")
            if name.startswith(folder) and first + deeper not in seen and first + deeper:
                seen.add(first + deeper)
                yield Entry(f"{url}{first}{deeper}", None if deeper else len(name), 7.0)


def names_of(
    store: Store, prefix: str = "", after: str = "", most: int = 1000, one_level: bool = False
) -> tuple[list[str], bool]:
    page = asyncio.run(Listings(store.entries).page(BUCKET, prefix, after, most, one_level=one_level))
    return [line.name for line in page.lines], page.more


NAMES = ["a", "a-b", "a/b", "a/c/d", "a/c/e", "a0", "b/x", "é/1"]


def test_all_names_in_order() -> None:
    assert names_of(Store(NAMES)) == (sorted(NAMES), False)


def test_one_level_shows_folders() -> None:
    assert names_of(Store(NAMES), one_level=True) == (["a", "a-b", "a/", "a0", "b/", "é/"], False)
    assert names_of(Store(NAMES), prefix="a/", one_level=True) == (["a/b", "a/c/"], False)


def test_a_prefix_may_end_anywhere_and_looks_only_where_it_leads() -> None:
    store = Store(NAMES)
    assert names_of(store, prefix="a/c/") == (["a/c/d", "a/c/e"], False)
    assert store.asked == [BUCKET + "a/c/"]
    assert names_of(Store(NAMES), prefix="a/c") == (["a/c/d", "a/c/e"], False)
    assert names_of(Store(NAMES), prefix="a") == ([n for n in sorted(NAMES) if n.startswith("a")], False)
    assert names_of(Store(NAMES), prefix="zzz/") == ([], False)


def test_folders_that_have_passed_are_not_listed() -> None:
    store = Store(NAMES)
    assert names_of(store, after="b/") == (["b/x", "é/1"], False)
    assert BUCKET + "a/" not in store.asked


def test_sizes_and_times() -> None:
    page = asyncio.run(Listings(Store(["a/b"]).entries).page(BUCKET, "a/", "", 9, one_level=False))
    assert page.lines == (ListEntry("a/b", 3, 7.0),)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.text("ab-/", min_size=1, max_size=5).filter(lambda n: "//" not in n and n.strip("/") == n), unique=True
    ),
    st.integers(1, 4),
    st.text("ab-/", max_size=3).filter(lambda n: "//" not in n and not n.startswith("/")),
)
def test_pages_together_are_the_whole(names: list[str], most: int, prefix: str) -> None:
    for one_level in (False, True):
        got: list[str] = []
        more, after = True, ""
        while more:
            page, more = names_of(Store(names), prefix, after, most, one_level)
            assert len(page) <= most
            got += page
            after = got[-1] if got else ""
        expected = {n for n in names if n.startswith(prefix)}
        if one_level:
            deeper = {n[: n.find("/", len(prefix)) + 1] for n in expected if "/" in n[len(prefix) :]}
            expected = {n for n in expected if "/" not in n[len(prefix) :]} | deeper
        assert got == sorted(expected)


def test_pages_that_follow_each_other_cost_one_listing() -> None:
    store, now = Store([f"{n:03}" for n in range(100)]), [0.0]
    listings = Listings(store.entries, kept_s=30, clock=lambda: now[0])

    async def pages() -> None:
        for after in ("", "009", "019"):
            page = await listings.page(BUCKET, "", after, 10, one_level=False)
            assert len(page.lines) == 10

    asyncio.run(pages())
    assert store.asked == [BUCKET]
    now[0] = 31
    asyncio.run(pages())
    assert store.asked == [BUCKET] * 2


def test_memory_is_bounded() -> None:
    store = Store([f"{folder}/{n}" for folder in "abcdef" for n in range(10)])
    listings = Listings(store.entries, most=25)

    async def look() -> None:
        for folder in "abcdef":
            await listings.page(BUCKET, f"{folder}/", "", 99, one_level=False)
        await listings.page(BUCKET, "f/", "", 99, one_level=False)
        await listings.page(BUCKET, "a/", "", 99, one_level=False)

    asyncio.run(look())
    assert store.asked.count(BUCKET + "f/") == 1
    assert store.asked.count(BUCKET + "a/") == 2
    with pytest.raises(Refusal, match="more than 5 names"):
        asyncio.run(Listings(store.entries, most=5).page(BUCKET, "a/", "", 9, one_level=False))


def test_a_bucket_that_is_not_there() -> None:
    class Nothing:
        async def entries(self, url: str) -> AsyncIterator[Entry]:
            raise ShardNotFound(f"{url}: no")
            yield

    with pytest.raises(ShardNotFound):
        asyncio.run(Listings(Nothing().entries).page(BUCKET, "", "", 9, one_level=False))
    page = asyncio.run(Listings(Nothing().entries).page(BUCKET, "no/", "", 9, one_level=False))
    assert page.lines == ()


def test_folders_without_end_are_refused() -> None:
    class Deep:
        async def entries(self, url: str) -> AsyncIterator[Entry]:
            yield Entry(f"{url}d/", None)

    with pytest.raises(Refusal, match="deep"):
        asyncio.run(Listings(Deep().entries).page(BUCKET, "", "", 9, one_level=False))


def test_names_of_the_web_are_unescaped() -> None:
    class Web:
        async def entries(self, url: str) -> AsyncIterator[Entry]:
            yield Entry(f"{url}a%20b.tar?v=1", None)
            yield Entry(f"{url}c/", None)

    page = asyncio.run(Listings(Web().entries).page("https://h/d/", "", "", 9, one_level=True))
    assert [line.name for line in page.lines] == ["a b.tar", "c/"]
