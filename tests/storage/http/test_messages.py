"""What HTTP messages say and ask."""

from __future__ import annotations

from wds_async.storage.base import Request
from wds_async.storage.http.messages import redirected, version_of, wire_url


def test_what_pins_an_object() -> None:
    assert version_of({"etag": '"1"', "last-modified": "x"}, 5) == 'etag "1"'
    assert version_of({"last-modified": "x"}, 5) != version_of({"last-modified": "x"}, 6)
    assert version_of({}, 5) == "5 bytes"


def test_what_is_escaped_stays_escaped() -> None:
    assert wire_url("http://h/a%2Fb c?sig=a%2Bb&x=d e#f") == "http://h/a%2Fb%20c?sig=a%2Bb&x=d%20e"


def test_another_origin_is_not_at_the_same_socket() -> None:
    asked = Request("http://localhost/x", socket="/run/s")
    assert redirected(asked, "/y").socket == "/run/s"
    assert redirected(asked, "http://target:80/y").socket == ""
