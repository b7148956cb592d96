"""How patterns walk through folders: which are listed, what is found, what is said where nothing is."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from wds_async.config import RetryPolicy
from wds_async.errors import ShardNotFound, UrlError
from wds_async.storage.listing.folders import forget
from wds_async.storage.listing.globs import parse
from wds_async.storage.listing.searching import Folders
from wds_async.storage.options import NOTHING_GIVEN
from wds_async.storage.registry import Backends

listed: list[str] = []


class Watched(MemoryFileSystem):
    """Writes down which folders are listed."""

    protocol = "watched"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.rpartition("://")[2].strip("/")

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        listed.append(path)
        return super().ls(path, detail, **kwargs)


@pytest.fixture(autouse=True)
def store() -> Iterator[None]:
    fsspec.register_implementation("watched", Watched, clobber=True)
    forget()
    listed.clear()
    yield
    Watched.store.clear()
    Watched.pseudo_dirs[:] = [""]
    forget()


def put(*names: str) -> None:
    for name in names:
        Watched().pipe_file("/b/" + name, b"12345")
    listed.clear()


async def call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def search(*urls: str, root: str = "watched://b/", fresh: bool = False) -> list[list[str]]:
    async def main() -> list[list[str]]:
        backends = Backends(call)
        patterns = [pattern for url in urls if (pattern := parse(root + url))]
        found = await Folders(backends, NOTHING_GIVEN, RetryPolicy(max_attempts=1), fresh=fresh).match(patterns)
        await backends.close()
        return [[entry.url.removeprefix(root) for entry in one.result()] for one in found]

    return asyncio.run(main())


def test_only_the_folders_that_are_needed_are_listed() -> None:
    put("x-1.tar", "x-0.tar", "a/x-2.tar", "a/train/x.tar", "c/train/x.tar", "c/test/x.tar", "d/n")
    assert search("x-*.tar") == [["x-0.tar", "x-1.tar"]]
    assert listed == ["/b"]
    listed.clear()
    assert search("*/train/x*.tar") == [["a/train/x.tar", "c/train/x.tar"]]
    assert sorted(listed) == ["/b/a/train", "/b/c/train", "/b/d/train"]  # and /b from memory
    listed.clear()
    assert search("a/x-*.tar") == [["a/x-2.tar"]]
    assert listed == ["/b/a"]


def test_any_depth() -> None:
    put("x.tar", "a/x.tar", "a/b/x.tar", "a/b/y.tar", ".git/x.tar", "a/x.txt")
    assert search("**/x.tar") == [["a/b/x.tar", "a/x.tar", "x.tar"]]
    assert sorted(listed) == ["/b", "/b/a", "/b/a/b"]
    assert search("a/**", "**/b/**/y*", "**/", "**/.git/*") == [
        ["a/b/x.tar", "a/b/y.tar", "a/x.tar", "a/x.txt"],
        ["a/b/y.tar"],
        ["a/b/x.tar", "a/b/y.tar", "a/x.tar", "x.tar"],
        [".git/x.tar"],
    ]


def test_patterns_of_one_folder_list_it_once() -> None:
    put(*(f"{kind}-{i}.tar" for kind in ("train", "val") for i in range(3)))
    found = search("train-*.tar", "val-[01].tar", "", fresh=True)
    assert [len(urls) for urls in found] == [3, 2, 6]
    assert listed == ["/b"]


def test_a_name_that_is_there_literally_is_taken_literally() -> None:
    put("x[1].tar", "x1.tar", "e[1]/a.tar", "e1/a.tar", "*/q.tar", "r/q.tar")
    assert search("x[1].tar", "e[1]/*.tar", "x[!2].tar", "*/q.tar") == [
        ["x[1].tar"],
        ["e[1]/a.tar"],
        ["x1.tar"],
        ["*/q.tar"],
    ]


def test_nothing_is_an_error_that_says_what_was_looked_at() -> None:
    put("train-000.tar", "train-001.tar", "sub/n.txt")
    with pytest.raises(UrlError) as caught:
        search("trian-*.tar")
    assert "'watched://b/trian-*.tar': nothing matches this pattern among 3 names in watched://b/" in str(caught.value)
    assert "the nearest is 'train-0" in str(caught.value)
    with pytest.raises(UrlError, match=r"\*\*/ looks into its folders too, such as 'sub/'"):
        search("*.zip")
    with pytest.raises(UrlError, match=r"this folder holds no shard \(\*\.tar .*among 1 name in watched://b/sub/"):
        search("sub/")
    with pytest.raises(UrlError, match="among 4 names in watched://b/ and 1 folder below"):
        search("**/*.zip")
    with pytest.raises(ShardNotFound, match="watched://b/none/ cannot be listed"):
        search("none/*.tar")


def test_what_did_not_match_is_not_remembered() -> None:
    put("a.txt")
    with pytest.raises(UrlError):
        search("*.tar")
    put("a.tar")
    assert search("*.tar") == [["a.tar"]]


_NAME = st.text("ab.", min_size=1, max_size=3).filter(lambda name: name.strip("."))
_STEP = st.sampled_from(["*", "a*", "**", "[ab]", "?b", "a", "*.a"])


@given(
    paths=st.lists(st.lists(_NAME, min_size=1, max_size=4), max_size=8), steps=st.lists(_STEP, min_size=1, max_size=4)
)
def test_the_walk_finds_what_one_expression_over_all_keys_finds(paths: list[list[str]], steps: list[str]) -> None:
    """The whole pattern as one regular expression over whole keys, which is another way to say the same."""
    Watched.store.clear()
    Watched.pseudo_dirs[:] = [""]
    forget()
    folders = {"/".join(path[:i]) for path in paths for i in range(1, len(path))}
    keys = sorted({"/".join(path) for path in paths} - folders)
    put(".keep", *keys)
    if not any(set("*?[") & set(step) for step in steps):
        return
    pattern = re.compile("".join(_regex(step, i == len(steps) - 1) for i, step in enumerate(steps)))
    expected = [key for key in keys if pattern.fullmatch(key)]
    try:
        (found,) = search("/".join(steps))
    except (UrlError, ShardNotFound):
        found = []
    assert found == expected


def _regex(step: str, last: bool) -> str:
    if step == "**":
        return r"(?:[^./][^/]*/)*" + (r"[^./][^/]*" if last else "")
    text = step.replace(".", r"\.").replace("*", "[^/]*").replace("?", "[^/]")
    return (r"(?!\.)" if step[0] in "*?[" else "") + text + ("" if last else "/")


def test_loops_end() -> None:
    class Endless(Watched):
        protocol = "endless"

        def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
            return [{"name": f"{path}/again", "size": 0, "type": "directory"}]

    fsspec.register_implementation("endless", Endless, clobber=True)
    with pytest.raises(UrlError, match="64 deep"):
        search("**/x.tar", root="endless://b/")
