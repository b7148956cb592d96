"""The table of openers: whose entry is whose, and which URLs it makes of names with a colon."""

from __future__ import annotations

import io
from typing import Any

import pytest
import webdataset.gopen  # noqa: F401 - the module, for its table

from wds_async.reading import url_files
from wds_async.storage import user_openers
from wds_async.storage.user_openers import by_user, default_opener, gopen_schemes, install, opener_of
from wds_async.urls import expand_urls, local_path, scheme

pytestmark = pytest.mark.usefixtures("openers")


def open_memory(url: str, mode: str, bufsize: int, **kw: Any) -> io.BytesIO:
    return io.BytesIO(url.encode())


def test_the_entries_of_webdataset_are_there() -> None:
    import sys

    theirs = sys.modules["webdataset.gopen"].gopen_schemes
    assert set(gopen_schemes) == set(theirs)
    assert {k: f.__name__ for k, f in gopen_schemes.items()} == {k: f.__name__ for k, f in theirs.items()}


def test_entries_are_told_apart_by_identity() -> None:
    assert not any(by_user(name) for name in gopen_schemes)
    assert opener_of(scheme("http://h/x")) is None
    assert default_opener() is None
    gopen_schemes["http"] = open_memory
    assert opener_of(scheme("HTTP://h/x")) is open_memory
    assert opener_of(scheme("https://h/x")) is None
    gopen_schemes["gs"] = url_files.gopen_curl  # of ours, but the program's choice
    assert opener_of(scheme("gs://b/x")) is url_files.gopen_curl
    gopen_schemes["http"] = url_files.gopen_curl
    assert opener_of(scheme("http://h/x")) is None
    gopen_schemes["__default__"] = open_memory
    assert default_opener() is open_memory
    assert opener_of(scheme("__default__:x")) is None


def test_what_the_program_put_there_first_stays() -> None:
    gopen_schemes["ais"] = open_memory
    install({"ais": url_files.gopen_ais})
    assert gopen_schemes["ais"] is open_memory


def test_a_registered_scheme_needs_no_slashes() -> None:
    assert (scheme("foo:bar"), local_path("foo:bar")) == ("", "foo:bar")
    gopen_schemes["foo"] = gopen_schemes["c"] = open_memory
    assert (scheme("foo:bar"), scheme("FOO:bar"), scheme("foo://bar")) == ("foo", "foo", "foo")
    assert local_path("foo:bar") is None
    assert (scheme("C:/x.tar"), scheme("food:x"), scheme("x/foo:bar")) == ("", "", "")
    assert expand_urls("foo:t?table=a-{0..1}") == ["foo:t?table=a-0", "foo:t?table=a-1"]  # no glob
    del gopen_schemes["foo"]
    assert scheme("foo:bar") == ""
    assert user_openers.opener_of(scheme("foo:bar")) is None
