"""The index page of a web server's folder: nginx's autoindex, Apache's, ``python -m http.server``, and their like.

Such a page is a list of links. Taken are those to the same server that lead one level down; a link that ends with "/"
is a folder. The pages round sizes, if they tell them, so no size is taken from them.
"""

from __future__ import annotations

import html.parser
import urllib.parse

from wds_async.storage.base import Entry

__all__ = ["IndexPage"]

# Escaped wherever they stand in a name: they would end it, or begin an escape.
_ESCAPED = frozenset("%?#/\\ \"<>'`")


class IndexPage(html.parser.HTMLParser):
    """Fed with the page of the folder ``url`` (which ends with "/"); ``page`` is its own URL, after redirects."""

    def __init__(self, url: str, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self._url = url
        self._page = page
        self._folder = [_decoded(name) for name in urllib.parse.urlsplit(page).path.split("/")[:-1]]
        self._origin = urllib.parse.urlsplit(page)[:2]
        self._seen: set[str] = set()
        self._found: list[Entry] = []

    def take(self) -> list[Entry]:
        """The entries found since the last call, in the page's order."""
        found, self._found = self._found, []
        return found

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href") if tag == "a" else None
        name = self._name(href.strip()) if href else ""
        if name and name not in self._seen:
            self._seen.add(name)
            self._found.append(Entry(self._url + name, None))

    def _name(self, href: str) -> str:
        """What ``href`` adds to the folder's URL; "" for what does not lie directly in it."""
        try:
            target = urllib.parse.urljoin(self._page, href)
            if urllib.parse.urlsplit(target)[:2] != self._origin:
                return ""
            segments = urllib.parse.urlsplit(target).path.split("/")
        except ValueError:
            return ""
        slash = ""
        if segments[-1] == "":
            segments.pop()
            slash = "/"
        if len(segments) != len(self._folder) + 1 or [_decoded(name) for name in segments[:-1]] != self._folder:
            return ""
        name = _shown(segments[-1])
        return name + slash if name not in ("", ".", "..") else ""


def _decoded(name: str) -> str:
    return urllib.parse.unquote(name)


def _shown(name: str) -> str:
    """The name as a person writes it in a URL: decoded, but for what would then mean something else."""
    try:
        text = urllib.parse.unquote(name, errors="strict")
    except UnicodeDecodeError:  # bytes of another encoding: they can be asked for only as they stand
        return name
    return "".join(c if c.isprintable() and c not in _ESCAPED else urllib.parse.quote(c, safe="") for c in text)
