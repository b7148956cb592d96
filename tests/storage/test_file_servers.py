"""What the clients of file servers need besides what the program says."""

from __future__ import annotations

import ftplib

import pytest

from wds_async.errors import ConfigError
from wds_async.storage.base import Location, Verdict
from wds_async.storage.file_servers import (
    end_session,
    explain_session,
    holds_connection,
    prepared_session,
    read_range,
    said_by_url,
    started,
    user_of,
)


def test_every_client_has_time_limits_and_the_programs_win() -> None:
    assert prepared_session("ftp", {"timeout": 3}) == {"timeout": 3}
    assert prepared_session("ftp", {})["timeout"] == 10
    limits = prepared_session("sftp", {"banner_timeout": 5})
    assert (limits["timeout"], limits["banner_timeout"], limits["auth_timeout"]) == (10, 5, 10)
    assert prepared_session("memory", {"a": 1}) == {"a": 1}


def test_webdav_needs_its_server() -> None:
    with pytest.raises(ConfigError, match="base_url"):
        prepared_session("webdav", {})
    given = prepared_session("dav", {"base_url": "https://h", "auth": ["me", "secret"]})
    assert given["auth"] == ("me", "secret")


def test_names_of_a_url_are_meant_unquoted() -> None:
    said = said_by_url({"host": "h", "username": "a%40b", "password": "p%25%3A"})
    assert said == {"host": "h", "username": "a@b", "password": "p%:"}
    assert said_by_url({"host": "h"}) == {"host": "h"}


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("ftp://me@h:21/a/x.tar", "ftp://me@h:21"),
        ("simplecache::sftp://h/x", "sftp://h"),
        ("memory://x", "memory://x"),
    ],
)
def test_the_server_of_a_url(url: str, server: str) -> None:
    assert Location(url, url, "generic").server == server


@pytest.mark.parametrize(
    ("url", "options", "user"),
    [
        ("sftp://a%40b:secret@h/x", {"username": "other"}, "a@b"),
        ("sftp://h/x", {"username": "me"}, "me"),
        ("webdav://x", {"auth": ("me", "secret")}, "me"),
        ("webdav://x", {"auth": "token"}, ""),
        ("sftp://[::1/x", {}, ""),
    ],
)
def test_as_whom_a_server_is_asked(url: str, options: dict[str, object], user: str) -> None:
    assert user_of(url, options) == user


@pytest.mark.parametrize(
    ("exn", "verdict"),
    [
        (ftplib.error_perm("530 Login incorrect."), Verdict.DENIED),
        (ftplib.error_perm("550 No such file."), Verdict.MISSING),
        (ftplib.error_perm("504 Command not implemented."), Verdict.FATAL),
        (ftplib.error_temp("421 Too many connections."), Verdict.TRANSIENT),
        (EOFError(), Verdict.TRANSIENT),
        (type("AuthenticationException", (Exception,), {})("Authentication failed."), Verdict.DENIED),
        (type("HTTPError", (Exception,), {"status_code": 401})("401"), Verdict.DENIED),
        (type("HTTPError", (Exception,), {"status_code": 503})("503"), Verdict.TRANSIENT),
        (type("HTTPError", (Exception,), {"status_code": 400})("400"), Verdict.FATAL),
        (type("ReadTimeout", (Exception,), {"__module__": "httpx"})("slow"), Verdict.STALLED),
    ],
)
def test_what_their_exceptions_mean(exn: Exception, verdict: Verdict) -> None:
    fault = explain_session(exn, "me")
    assert fault is not None
    assert fault.verdict is verdict
    if verdict is Verdict.DENIED:
        assert "as user 'me'" in fault.reason
        assert "password" in fault.advice


def test_others_exceptions_are_others_affair() -> None:
    assert explain_session(ValueError("x")) is None
    denied = explain_session(ftplib.error_perm("530 no"))
    assert denied is not None
    assert "no user was given" in denied.reason


def test_other_filesystems_are_left_alone() -> None:
    class Plain:
        protocol = ("memory", "mem")

        def cat_file(self, path: str, start: int, end: int) -> bytearray:
            return bytearray(path.encode()[start:end])

    plain = Plain()
    assert started(plain) is plain
    assert not holds_connection(plain)
    end_session(plain)
    assert read_range(plain, "abcdef", 1, 3) == b"bc"
