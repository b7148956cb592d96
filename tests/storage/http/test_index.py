"""Index pages as servers write them, and links that are none of the folder's."""

from __future__ import annotations

import pytest

from wds_async.storage.http.backend import IndexPage


def names(page: str, url: str = "http://h/f/", at: str | None = None) -> list[str]:
    parser = IndexPage(url, at or url)
    parser.feed(page)
    parser.close()
    found = parser.take()
    assert all(entry.size is None and entry.url.startswith(url) for entry in found)
    return [entry.url.removeprefix(url) for entry in found]


APACHE = """<html><head><title>Index of /f</title></head><body><h1>Index of /f</h1><table>
<tr><th><a href="?C=N;O=D">Name</a></th><th><a href="?C=M;O=A">Last modified</a></th></tr>
<tr><td><a href="/">Parent Directory</a></td></tr>
<tr><td><a href="sub/">sub/</a></td><td align="right">2026-01-01 10:00  </td><td>  - </td></tr>
<tr><td><a href="train-000.tar">train-000.tar</a></td><td align="right">2026-01-01 10:00</td><td>1.2M</td></tr>
</table></body></html>"""


def test_apache() -> None:
    assert names(APACHE) == ["sub/", "train-000.tar"]


@pytest.mark.parametrize(
    ("href", "name"),
    [
        ("x.tar", "x.tar"),
        ("./x.tar", "x.tar"),
        (" x.tar ", "x.tar"),
        ("/f/x.tar", "x.tar"),
        ("/%66/x.tar", "x.tar"),
        ("http://h/f/x.tar", "x.tar"),
        ("//h/f/x.tar", "x.tar"),
        ("x.tar?download=1#top", "x.tar"),
        ("a&amp;b.tar", "a&b.tar"),
        ("a%2Fb.tar", "a%2Fb.tar"),
        ("%E9.tar", "%E9.tar"),
        ("%C3%A9.tar", "é.tar"),
        ("a%0Ab.tar", "a%0Ab.tar"),
        ("sub/", "sub/"),
    ],
)
def test_links_into_the_folder(href: str, name: str) -> None:
    assert names(f'<A HREF="{href}">shown</A>') == [name]


@pytest.mark.parametrize(
    "href",
    [
        *("", "/", "../", "..", ".", "./", "/f/", "?C=N;O=D", "#top", "sub/x.tar", "/g/x.tar", "/fx.tar", "//sub//"),
        *("https://h/f/x.tar", "http://h:81/f/x.tar", "http://other/f/x.tar", "mailto:a@b", "javascript:void(0)"),
        *("http://[/x", "data:text/html,x", "%2E%2E/", "%2e"),
    ],
)
def test_links_elsewhere(href: str) -> None:
    assert names(f'<a href="{href}">x</a>') == []


def test_each_name_once_and_no_other_tags() -> None:
    assert names("<a href=x>1</a><a href='x'>2</a><link href='y'><a name=z>z</a><a href>w</a>") == ["x"]


def test_the_folder_is_where_redirects_led() -> None:
    assert names("<a href='x'>x</a>", at="https://mirror/pub/") == ["x"]
    assert names("<a href='/f/x'>x</a>", at="https://mirror/pub/") == []
    assert names("<a href='x'>x</a>", at="http://h/f/?list=1") == ["x"]


def test_pieces_of_a_page() -> None:
    parser = IndexPage("http://h/f/", "http://h/f/")
    found = []
    for character in APACHE:
        parser.feed(character)
        found += parser.take()
    assert [entry.url for entry in found] == ["http://h/f/sub/", "http://h/f/train-000.tar"]
