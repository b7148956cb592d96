"""wds_async.urls: expansion, schemes, local paths."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from braceexpand import braceexpand
from hypothesis import given
from hypothesis import strategies as st

from wds_async import urls
from wds_async.errors import UrlError
from wds_async.urls import expand_urls, links, local_path, merge_url, scheme

# ---------------------------------------------------------------- strings, lists, braces


def test_one_name_is_itself() -> None:
    assert expand_urls("http://h/a.tar") == ["http://h/a.tar"]
    assert expand_urls("a.tar") == ["a.tar"]
    assert expand_urls("-") == ["-"]


def test_braces_in_strings_lists_and_commands() -> None:
    assert expand_urls("gs://b/x-{008..010}.tar") == [f"gs://b/x-{n:03}.tar" for n in (8, 9, 10)]
    assert expand_urls(["a-{0..1}.tar", "http://h/{x,y}/z.tar"]) == [
        "a-0.tar",
        "a-1.tar",
        "http://h/x/z.tar",
        "http://h/y/z.tar",
    ]
    assert expand_urls("pipe:curl -s http://h/x-{0..1}.tar || true") == [
        "pipe:curl -s http://h/x-0.tar || true",
        "pipe:curl -s http://h/x-1.tar || true",
    ]


def test_any_iterable_is_a_list() -> None:
    assert expand_urls(f"s3://b/{n}.tar" for n in range(2)) == ["s3://b/0.tar", "s3://b/1.tar"]
    assert expand_urls(("a.tar",)) == ["a.tar"]


@pytest.mark.parametrize("nothing", ["", " ", [], (), "a.tar::", "::a.tar", ["a.tar", ""]])
def test_nothing_is_an_error(nothing: object) -> None:
    with pytest.raises(UrlError, match="empty"):
        expand_urls(nothing)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [None, 3, b"a.tar", [b"a.tar"], [None]])
def test_other_types_are_named(wrong: object) -> None:
    with pytest.raises(UrlError, match=r"bytes|NoneType|int"):
        expand_urls(wrong)  # type: ignore[arg-type]


def test_unbalanced_braces() -> None:
    with pytest.raises(UrlError, match=r"x-\{0\.\.3\.tar.*\{000\.\.999\}"):
        expand_urls("s3://b/x-{0..3.tar")


def test_windows_paths_keep_their_backslashes() -> None:
    assert expand_urls(r"C:\data\x-{0..1}.tar") == [r"C:\data\x-0.tar", r"C:\data\x-1.tar"]
    assert expand_urls(r"C:\a.tar::D:\b.tar") == [r"C:\a.tar", r"D:\b.tar"]
    assert expand_urls(r"\\server\share\x-{0..1}.tar")[1] == r"\\server\share\x-1.tar"


def test_a_backslash_without_braces_stays() -> None:
    assert expand_urls(r"pipe:printf '\0'") == [r"pipe:printf '\0'"]


_NAME = st.text("abcXYZ019._-", min_size=1, max_size=8)
_BRACE = st.one_of(
    st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda p: f"{{{p[0]}..{p[1]}}}"),
    st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda p: f"{{{p[0]:03}..{p[1]:03}}}"),
    st.lists(_NAME, min_size=2, max_size=3).map(lambda names: "{" + ",".join(names) + "}"),
)
_PREFIX = st.sampled_from(["http://h:80/", "s3://b/", "gs://b/d/", "pipe:cat ", "hf://datasets/u/d/"])
_SOURCE = st.tuples(_PREFIX, st.lists(st.one_of(_NAME, _BRACE), min_size=1, max_size=4)).map(
    lambda pair: pair[0] + "".join(pair[1])
)


@given(_SOURCE)
def test_braces_expand_as_braceexpand_does(source: str) -> None:
    assert expand_urls(source) == list(braceexpand(source))


@given(st.lists(_SOURCE, min_size=1, max_size=4))
def test_joining_and_listing_are_the_same(sources: list[str]) -> None:
    one_by_one = [url for source in sources for url in expand_urls(source)]
    assert expand_urls("::".join(sources)) == one_by_one
    assert expand_urls(sources) == one_by_one


@given(_SOURCE)
def test_expanding_twice_changes_nothing(source: str) -> None:
    once = expand_urls(source)
    assert expand_urls(once) == once


# ---------------------------------------------------------------- '::'


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("http://h/a.tar::http://h/b.tar", ["http://h/a.tar", "http://h/b.tar"]),
        ("gs://b/a.tar::gs://c/b.tar", ["gs://b/a.tar", "gs://c/b.tar"]),
        ("a.tar::b.tar", ["a.tar", "b.tar"]),
        ("dir/a::dir/b", ["dir/a", "dir/b"]),
        ("-::b.tar", ["-", "b.tar"]),
        ("file:a.tar::b.tar", ["file:a.tar", "b.tar"]),
        ("pipe:cat a.tar::pipe:cat b.tar", ["pipe:cat a.tar", "pipe:cat b.tar"]),
        ("simplecache::s3://b/x.tar", ["simplecache::s3://b/x.tar"]),
        ("simplecache::s3://b/x.tar::s3://b/y.tar", ["simplecache::s3://b/x.tar", "s3://b/y.tar"]),
        ("zip://*.csv::s3://b/y.zip", ["zip://*.csv::s3://b/y.zip"]),
        ("zip://d/x.tar::simplecache::s3://b/y.zip", ["zip://d/x.tar::simplecache::s3://b/y.zip"]),
        ("a.tar::zip://d/x.tar::s3://b/y.zip", ["a.tar", "zip://d/x.tar::s3://b/y.zip"]),
        ("http://[::1]:80/a.tar::http://[fe80::2]/b.tar", ["http://[::1]:80/a.tar", "http://[fe80::2]/b.tar"]),
        ("pipe:perl -e 'use A::B'", ["pipe:perl -e 'use A::B'"]),
    ],
)
def test_double_colon(text: str, parts: list[str]) -> None:
    assert expand_urls(text) == parts


def test_elements_of_a_list_are_not_split() -> None:
    assert expand_urls(["gs://b/a::b.tar", "dir/a::b-{0..1}.tar"]) == [
        "gs://b/a::b.tar",
        "dir/a::b-0.tar",
        "dir/a::b-1.tar",
    ]
    assert expand_urls(["http://h/a.tar::http://h/b.tar"]) == ["http://h/a.tar::http://h/b.tar"]


# ---------------------------------------------------------------- ${X}


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_BASE", "gs://b/${SUB}")
    monkeypatch.setenv("WDS_SUB", "train")
    monkeypatch.setenv("WDS_TWO", "s3://b/a.tar::s3://b/b.tar")
    assert expand_urls("${BASE}/x-{0..1}.tar") == ["gs://b/train/x-0.tar", "gs://b/train/x-1.tar"]
    assert expand_urls("${TWO}") == ["s3://b/a.tar", "s3://b/b.tar"]


def test_an_unset_variable_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WDS_NOWHERE", raising=False)
    monkeypatch.setenv("NOWHERE", "must not be read")
    with pytest.raises(UrlError, match=r"\$\{NOWHERE\}.*WDS_NOWHERE.*not set"):
        expand_urls("${NOWHERE}/x.tar")


def test_variables_in_a_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_A", "${B}")
    monkeypatch.setenv("WDS_B", "${A}")
    with pytest.raises(UrlError, match="circle"):
        expand_urls("${A}")


# ---------------------------------------------------------------- local files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("b.tar", "a.tar", "c.tgz", "d.tar.gz", "e.tar.zst", "f.tar.xz", "g.tar.bz2", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "z.tar").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_glob_passes_over_the_records_of_jobs(folder: Path) -> None:
    (folder / "out" / "_wds").mkdir(parents=True)
    (folder / "out" / "a.tfrecord").touch()
    assert expand_urls(f"{folder}/out/*") == [f"{folder}/out/a.tfrecord"]


def test_globs_are_sorted(folder: Path) -> None:
    assert expand_urls("*.tar") == ["a.tar", "b.tar"]
    assert expand_urls(f"{folder}/[ab].tar") == [f"{folder}/a.tar", f"{folder}/b.tar"]
    assert expand_urls("**/*.tar") == ["a.tar", "b.tar", "sub/z.tar"]
    assert expand_urls("{a,sub/?}.tar") == ["a.tar", "sub/z.tar"]
    assert expand_urls(f"file:{folder}/?.tgz") == [f"{folder}/c.tgz"]


def test_a_directory_is_its_shards(folder: Path) -> None:
    names = ["a.tar", "b.tar", "c.tgz", "d.tar.gz", "e.tar.zst", "f.tar.xz", "g.tar.bz2"]
    assert expand_urls(str(folder)) == [str(folder / name) for name in names]
    assert expand_urls(folder) == [str(folder / name) for name in names]
    assert expand_urls(f"file://{folder}") == [str(folder / name) for name in names]
    assert expand_urls("sub/") == ["sub/z.tar"]


def test_no_match_is_an_error(folder: Path) -> None:
    with pytest.raises(UrlError, match=r"\*\.zip.*no file matches"):
        expand_urls("*.zip")
    (folder / "empty").mkdir()
    with pytest.raises(UrlError, match=r"empty.*holds no shard.*\*\.tar"):
        expand_urls("empty")


def test_a_real_name_with_glob_characters_is_literal(folder: Path) -> None:
    (folder / "x[1].tar").touch()
    (folder / "x1.tar").touch()
    assert expand_urls("x[1].tar") == ["x[1].tar"]
    (folder / "x[1].tar").unlink()
    assert expand_urls("x[1].tar") == ["x1.tar"]


def test_remote_globs_are_left_alone() -> None:
    assert expand_urls("gs://b/*.tar") == ["gs://b/*.tar"]
    assert expand_urls("http://h/x.tar?a=[1]") == ["http://h/x.tar?a=[1]"]


def test_a_missing_file_is_left_for_its_opener(folder: Path) -> None:
    assert expand_urls("nothing.tar") == ["nothing.tar"]


def test_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))
    assert [Path(p) for p in expand_urls("~/a-{0..1}.tar")] == [folder / "a-0.tar", folder / "a-1.tar"]
    assert expand_urls("s3://b/~/a.tar") == ["s3://b/~/a.tar"]


def test_path_objects(folder: Path) -> None:
    assert expand_urls(Path("a-{0..1}.tar")) == ["a-0.tar", "a-1.tar"]
    assert expand_urls([Path("*.tar"), "c.tgz"]) == ["a.tar", "b.tar", "c.tgz"]


@pytest.mark.parametrize("name", ["-", "pipe:touch x", "file:x"])
def test_a_path_object_stays_a_file(name: str) -> None:
    (url,) = expand_urls(Path(name))
    assert local_path(url) == f"./{name}"


def test_files_found_by_a_glob_stay_files(folder: Path) -> None:
    (folder / "pipe:touch owned.tar").touch()
    (url,) = expand_urls("pip?:*.tar")
    assert scheme(url) == ""
    assert Path(url).exists()


def test_a_url_in_a_path_object_is_explained() -> None:
    with pytest.raises(UrlError, match="pass the URL as a str"):
        expand_urls(Path("s3://b/x.tar"))


# ---------------------------------------------------------------- what kind of URL


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("x.tar", ""),
        ("/a/b.tar", ""),
        ("C:\\x.tar", ""),
        ("C:/x.tar", ""),
        ("c://x.tar", ""),
        ("run-12:30.tar", ""),
        ("-", "-"),
        ("./-", ""),
        ("file:x.tar", "file"),
        ("FILE:///x.tar", "file"),
        ("pipe:cat x", "pipe"),
        ("http://h/x", "http"),
        ("HTTPS://h/x", "https"),
        ("s3://b/k", "s3"),
        ("simplecache::s3://b/k", "simplecache"),
        ("", ""),
    ],
)
def test_scheme(url: str, kind: str) -> None:
    assert scheme(url) == kind


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("a b%20.tar", "a b%20.tar"),
        ("file:a%20b.tar", "a b.tar"),
        ("file:/a/b.tar", "/a/b.tar"),
        ("file:///a/b%3F.tar", "/a/b?.tar"),
        ("file://localhost/a.tar", "/a.tar"),
        ("file:///C:/x.tar", "C:/x.tar"),
        ("C:/x.tar", "C:/x.tar"),
        ("http://h/a.tar", None),
        ("pipe:cat a.tar", None),
        ("-", None),
        ("simplecache::file:///a.tar", None),
    ],
)
def test_local_path(url: str, path: str | None) -> None:
    assert local_path(url) == path


@pytest.mark.parametrize("url", ["file://elsewhere/a.tar", "file:", "file://relative.tar"])
def test_file_urls_that_are_no_file(url: str) -> None:
    with pytest.raises(UrlError, match=re.escape(url)):
        local_path(url)


@pytest.mark.parametrize(
    "url", ["http://", "http:///x.tar", "https://h:port/x", "http://[::1/x", "http://h/a\r\nX: y", "http:/h/x.tar"]
)
def test_malformed_urls(url: str) -> None:
    with pytest.raises(UrlError, match="malformed"):
        expand_urls(url)


def test_errors_hide_passwords() -> None:
    with pytest.raises(UrlError) as caught:
        expand_urls("https://me:hunter2@h/{0..1.tar?sig=hunter3")
    assert "hunter" not in str(caught.value)


@pytest.mark.parametrize(
    ("base", "url", "merged"),
    [
        ("", "x.tar", "x.tar"),
        ("/d", "x.tar", "/d/x.tar"),
        ("/d", "../x.tar", "/x.tar"),
        ("/d", "/e/x.tar", "/e/x.tar"),
        ("/d", "gs://b/x.tar", "gs://b/x.tar"),
        ("http://h/d", "x.tar", "http://h/d/x.tar"),
        ("http://h/d/", "e/x.tar?v=1", "http://h/d/e/x.tar?v=1"),
        ("http://h:80/d", "/e/x.tar", "http://h:80/e/x.tar"),
        ("s3://b/d/e", "../x.tar", "s3://b/d/x.tar"),
        ("s3://b", "x.tar", "s3://b/x.tar"),
        ("http://h/d", "pipe:cat x", "pipe:cat x"),
    ],
)
def test_urls_are_seen_from_a_folder(base: str, url: str, merged: str) -> None:
    assert merge_url(base, url) == merged


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("s3://b/x.tar", ["s3://b/x.tar"]),
        ("gs://b/a::b.tar", ["gs://b/a::b.tar"]),
        ("gs://b/x::pipe:id", ["gs://b/x::pipe:id"]),
        ("memory://a::b", ["memory://a::b"]),
        ("http://[::1]/x", ["http://[::1]/x"]),
        ("simplecache::s3://b/x", ["simplecache", "s3://b/x"]),
        ("zip://x.tar::s3://b/y.zip", ["zip://x.tar", "s3://b/y.zip"]),
        ("zip://a::simplecache::http://h/y", ["zip://a", "simplecache", "http://h/y"]),
    ],
)
def test_only_a_file_system_over_another_begins_a_chain(url: str, found: list[str]) -> None:
    assert links(url) == found


# ---------------------------------------------------------------- many names in one look

_STARTS = [
    "http://h/",
    "https://h:80/",
    "http://h:x/",
    "http:///",
    "HTTP://[::1]/",
    "s3://b/",
    "s3:///",
    "file:///d/",
    "pipe:cat ",
    "/d/",
    "./",
]
_MIDDLES = ["", "a", "d/", "{0..2}", "{x,y}", "{,z}", "{p:,q}", ":", "::", " ", "*", "\t", "\\", "~", "{", "?a=b"]
_ENDS = ["", ".tar", ".TGZ", "/", "{.tar,.tgz}", "{0..1}.tar"]


@given(st.sampled_from([*_STARTS, *_MIDDLES]), st.lists(st.sampled_from(_MIDDLES), max_size=3), st.sampled_from(_ENDS))
def test_names_that_are_looked_at_together_are_those_that_are_looked_at_one_by_one(
    start: str, middle: list[str], end: str
) -> None:
    text = "".join([start, *middle, end])

    def outcome(one_look: bool) -> list[str] | None:
        with pytest.MonkeyPatch.context() as patch:
            if not one_look:
                patch.setattr(urls, "_alike", lambda text, files: False)
            try:
                return expand_urls([text])
            except UrlError:
                return None

    assert outcome(True) == outcome(False)
