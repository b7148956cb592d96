"""As whom HTTP is asked: options, URLs, netrc files, fsspec's configuration; and that nobody else learns of it."""

from __future__ import annotations

import asyncio
import base64
import logging
import ssl
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme

import wds_async as wds
from tests.servers import Origin, Tls
from tests.servers.shards import make_tar
from tests.storage.locations import location_of
from tests.transfer.reading import KIB, data, quick
from wds_async.errors import AccessDenied, ConfigError, TransferError
from wds_async.storage.fsspec_config import fsspec_configuration
from wds_async.storage.http.auth import HttpSettings, Netrc
from wds_async.storage.http.backend import HttpBackend
from wds_async.storage.options import Options, StorageOptions
from wds_async.transfer.reader import open_shards

SECRET = "MARKEDsecret"
PART = 256 * KIB


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A home of its own, and no proxies."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("NETRC", "FSSPEC_HTTP", "FSSPEC_HTTPS", "FSSPEC_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def other() -> Iterator[Origin]:
    """A second origin."""
    with Origin() as running:
        yield running


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def aiohttp_auth(user: str, password: str) -> aiohttp.BasicAuth:
    """As older programs write it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return aiohttp.BasicAuth(user, password)


def read(url: str, *, direct: bool = True, **options: Any) -> bytes:
    """By one connection, so that nothing is on its way any more when the bytes are there."""
    given = StorageOptions({"http": options})
    with open_shards([url], config=quick(direct=direct, connections=1), options=given) as reader:
        return b"".join(bytes(piece) for shard in reader for piece in iter(shard.read, None))


def sent(origin: Origin, name: str = "authorization") -> set[str | None]:
    found = {request.headers.get(name) for request in origin.requests}
    origin.requests.clear()
    return found


def identity(url: str, **options: Any) -> str:
    return asyncio.run(HttpBackend(Options(options)).describe(location_of(url))).identity


@pytest.mark.parametrize("direct", [True, False])
def test_options(origin: Origin, direct: bool) -> None:
    url = origin.add("x.tar", data(PART + 1))
    for options, header in [
        ({}, None),
        ({"token": "t"}, "Bearer t"),
        ({"username": "ü", "password": "p:w"}, basic("ü", "p:w")),
        ({"username": "u"}, basic("u", "")),
        ({"headers": {"authorization": "Custom x"}}, "Custom x"),
        ({"auth": ("u", "p")}, basic("u", "p")),
        ({"client_kwargs": {"auth": aiohttp_auth("u", "p")}}, basic("u", "p")),
        ({"client_kwargs": {"headers": {"Authorization": "Bearer y"}}, "encoded": True}, "Bearer y"),
    ]:
        assert read(url, direct=direct, **options) == data(PART + 1)
        assert sent(origin) == {header}


@pytest.mark.parametrize("direct", [True, False])
def test_headers(origin: Origin, direct: bool) -> None:
    url = origin.add("x.tar", b"x")
    read(url, direct=direct, headers={"X-Api-Key": SECRET, "User-Agent": "me"}, client_kwargs={"headers": {"A": "b"}})
    assert {(r.headers["x-api-key"], r.headers["user-agent"], r.headers["a"]) for r in origin.requests} == {
        (SECRET, "me", "b")
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokn": SECRET}, "tokn means nothing here; accepted are headers, token"),
        ({"key": "k", "secret": SECRET}, "by scheme"),
        ({"client_kwargs": {"trust": SECRET}}, "client_kwargs for http"),
        ({"client_kwargs": SECRET}, "client_kwargs is a dict"),
        ({"headers": SECRET}, "headers is a dict"),
        ({"headers": {"Range": SECRET}}, "Range is set by the transfer"),
        ({"headers": {"X": SECRET + "\nY: z"}}, "one line"),
        ({"headers": {"X": 5}}, "not int"),
        ({"token": SECRET, "username": "u"}, "token and username contradict"),
        ({"token": SECRET, "headers": {"Authorization": SECRET}}, "contradict"),
        ({"token": SECRET + "\r\n"}, "stray line break"),
        ({"token": ""}, "empty"),
        ({"password": SECRET}, "needs a username"),
        ({"auth": SECRET}, "BasicAuth"),
        ({"auth": ("u", 5)}, "are str"),
        ({"key": SECRET}, "needs its certificate"),
        ({"ca_file": 5}, "ca_file is the path"),
        ({"verify": "perhaps"}, "verify is True or False"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        HttpBackend(Options(options))
    assert SECRET not in str(caught.value)


def test_options_reach_the_user_as_an_error(origin: Origin) -> None:
    with pytest.raises(ConfigError, match="tokn"):
        read(origin.add("x.tar", b"x"), tokn="x")


def test_a_user_gives_a_token(origin: Origin) -> None:
    url = origin.add("x.tar", make_tar([("a.txt", b"hello")]))
    origin.behave(when=lambda request: request.headers.get("authorization") != f"Bearer {SECRET}", status=401)
    given = {"https": {"token": SECRET}}
    assert [s["txt"] for s in wds.WebDataset(url, shardshuffle=False, storage_options=given)] == [b"hello"]
    with pytest.raises(AccessDenied, match="asked with no credentials"):
        list(wds.WebDataset(url, shardshuffle=False))


# -- netrc and what goes before it ------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
def test_netrc(origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    url = origin.add("x.tar", b"x")
    home = tmp_path / ".netrc"
    home.write_text("machine elsewhere login a password b\nmachine 127.0.0.1 login n password p\n")
    home.chmod(0o644)
    read(url, direct=direct)
    assert sent(origin) == {basic("n", "p")}
    assert identity(url) == "the netrc entry for 127.0.0.1"
    named = tmp_path / "another"
    named.write_text("machine 127.0.0.1\n  login m\n  password q\ndefault login d password d\n")
    monkeypatch.setenv("NETRC", str(named))
    read(url, direct=direct)
    assert sent(origin) == {basic("m", "q")}
    read(url.replace("http://", "http://u:w@"), direct=direct)
    assert sent(origin) == {basic("u", "w")}
    read(url.replace("http://", "http://u:w@"), direct=direct, token="t")
    assert sent(origin) == {"Bearer t"}
    read(url, direct=direct, client_kwargs={"trust_env": False})
    assert sent(origin) == {None}


@pytest.mark.parametrize("direct", [True, False])
def test_a_default_entry_is_for_nobody(origin: Origin, tmp_path: Path, direct: bool) -> None:
    (tmp_path / ".netrc").write_text("machine elsewhere login a password b\ndefault login d password d\n")
    read(origin.add("x.tar", b"x"), direct=direct)
    assert sent(origin) == {None}


def test_a_malformed_netrc_is_told_of_once(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "netrc"
    file.write_text(f"machine 127.0.0.1 login n password p\n\n{SECRET} 127.0.0.1\n")
    monkeypatch.setenv("NETRC", str(file))
    url = origin.add("x.tar", b"x")
    for direct in (True, False):
        assert read(url, direct=direct) == b"x"
    assert sent(origin) == {None}
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"netrc file {file}, line 3" in warning.getMessage()
    assert SECRET not in caplog.text


def test_netrc_files_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert Netrc.read().identity("h") is None  # ~/.netrc need not exist
    assert not caplog.records
    for name, content in [("none", None), ("binary", b"\xff\xfe\x00machine")]:
        file = tmp_path / name
        if content is not None:
            file.write_bytes(content)
        monkeypatch.setenv("NETRC", str(file))
        assert Netrc.read().identity("h") is None
        assert f"netrc file {file}" in caplog.text


def test_hosts_are_compared_without_case(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine Host.Example login a password b\n")
    assert identity("https://HOST.example/x") == "the netrc entry for host.example"


# -- fsspec's configuration -------------------------------------------------------------------------------------


def test_fsspecs_configuration(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.config

    url = origin.add("x.tar", b"x")
    configured = {"client_kwargs": {"headers": {"X-Api-Key": "k"}, "unknown": 1}, "token": "c", "block_size": 5}
    monkeypatch.setitem(fsspec.config.conf, "http", configured)
    monkeypatch.setitem(fsspec.config.conf, "https", {"verify": "false"})
    read(url)
    assert sent(origin, "x-api-key") == {"k"}
    read(url)
    assert sent(origin) == {"Bearer c"}
    read(url, username="u", password="p")
    assert sent(origin) == {basic("u", "p")}
    assert not HttpSettings.of({}, fsspec_configuration("http", "https")).tls.verify


def test_fsspec_is_imported_only_where_it_is_configured(tmp_path: Path) -> None:
    import subprocess
    import sys

    program = (
        "import sys\nfrom wds_async.storage.fsspec_config import fsspec_configuration\n"
        "found = fsspec_configuration('http', 'https')\nprint(sorted(found.items()), 'fsspec' in sys.modules)"
    )

    def run(**environ: str) -> str:
        more = {"HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2]), **environ}
        done = subprocess.run([sys.executable, "-c", program], env=more, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert run() == "[] False"
    assert run(FSSPEC_HTTPS_TOKEN="t") == "[('token', 't')] True"
    assert run(FSSPEC_HTTP='{"verify": false}') == "[('verify', False)] True"
    (tmp_path / ".config/fsspec").mkdir(parents=True)
    (tmp_path / ".config/fsspec/conf.json").write_text('{"https": {"token": "f"}}')
    assert run() == "[('token', 'f')] True"


# -- nobody else learns of it -----------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("ranged", [True, False])
def test_secrets_stay_with_their_origin(
    origin: Origin,
    other: Origin,
    tmp_path: Path,
    direct: bool,
    ranged: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    content = data(3 * PART)
    there = other.add("y.tar", content)
    other.behave(ignore_range=not ranged)
    for name in ("x.tar", "back.tar"):
        origin.add(name, b"")
    origin.behave(path="/x.tar", redirect=there)
    (tmp_path / ".netrc").write_text(f"machine localhost login n password {SECRET}\ndefault login d password {SECRET}")
    url = origin.url("x.tar")
    named = [
        (url, {"token": SECRET, "headers": {"X-Api-Key": SECRET, "Cookie": SECRET}}),
        (url, {"username": "u", "password": SECRET}),
        (url.replace("http://", f"http://u:{SECRET}@"), {}),
        (url.replace("127.0.0.1", "localhost"), {}),
    ]
    proofs = (SECRET, basic("u", SECRET), basic("n", SECRET), basic("d", SECRET))
    for at, options in named:
        assert read(at, direct=direct, **options) == content
        assert all(request.headers.get("authorization") for request in origin.requests)
        origin.requests.clear()
    assert other.requests
    for request in other.requests:
        assert "authorization" not in request.headers
        assert not any(proof in str(dict(request.headers)) + request.target for proof in proofs)
    assert not any(proof in caplog.text for proof in proofs)


@pytest.mark.parametrize("direct", [True, False])
def test_a_redirect_at_home_keeps_them(origin: Origin, direct: bool) -> None:
    origin.add("y.tar", b"y")
    origin.add("x.tar", b"")
    origin.behave(path="/x.tar", redirect="/y.tar", status=307)
    assert read(origin.url("x.tar"), direct=direct, token="t", headers={"X-Key": "k"}) == b"y"
    assert {(r.path, r.headers.get("authorization"), r.headers.get("x-key")) for r in origin.requests} == {
        ("/x.tar", "Bearer t", "k"),
        ("/y.tar", "Bearer t", "k"),
    }


@pytest.mark.parametrize("direct", [True, False])
def test_a_server_that_repeats_what_it_was_sent(origin: Origin, direct: bool) -> None:
    url = origin.add("x.tar", b"x")
    for options, proof in [
        ({"token": SECRET}, SECRET),
        ({"headers": {"X-Api-Key": SECRET}}, SECRET),
        ({"username": "u", "password": SECRET}, basic("u", SECRET)),
    ]:
        origin.forget()
        origin.behave(status=403, body=f"denied to {proof}".encode())
        with pytest.raises(AccessDenied) as caught:
            read(url, direct=direct, **options)
        assert "denied to" in str(caught.value)
        assert proof not in str(caught.value)
        assert proof.removeprefix("Basic ") not in str(caught.value)


@pytest.mark.parametrize("direct", [True, False])
def test_refusals_say_as_whom(origin: Origin, tmp_path: Path, direct: bool) -> None:
    url = origin.add("x.tar", b"x")
    origin.behave(status=401)

    def error(at: str = url, **options: Any) -> str:
        with pytest.raises(AccessDenied) as caught:
            read(at, direct=direct, **options)
        return str(caught.value)

    said = error()
    assert "asked with no credentials" in said
    for way in ("user:password@", "~/.netrc", "storage_options={'https': {'token'"):
        assert way in said
    assert "asked with the token of storage_options" in error(token="t")
    assert "asked with user 'u' of the URL" in error(url.replace("http://", f"http://u:{SECRET}@"))
    lone = error(url.replace("http://", f"http://{SECRET}@"))
    assert "the user of the URL" in lone
    assert SECRET not in lone
    assert "asked with the Authorization header of storage_options" in error(headers={"Authorization": SECRET})
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login n password p")
    assert "asked with the netrc entry for 127.0.0.1" in error()


def test_descriptions() -> None:
    assert identity("http://h/x") == "anonymous"
    assert identity("http://u:p@h/x") == "user 'u' of the URL"
    assert identity("http://h/x", token=SECRET) == "the token of storage_options"
    assert identity("http://h/x", username="u") == "user 'u' of storage_options"
    assert identity("http://h/x", headers={"X-Key": SECRET}) == "anonymous, with the headers X-Key"
    shown = repr(HttpSettings.of({"token": SECRET, "headers": {"X-Key": SECRET}}))
    assert SECRET not in shown


# -- TLS --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
def test_a_certificate_authority_of_ones_own(tls: Tls, direct: bool) -> None:
    with Origin(tls=tls.server_context()) as server:
        url = server.add("x.tar", b"x")
        assert read(url, direct=direct, ca_file=tls.ca) == b"x"
        assert read(url, direct=direct, verify=False) == b"x"
        with pytest.raises(TransferError, match="does not verify"):
            read(url, direct=direct)
        with pytest.raises(ConfigError, match="cannot use /none"):
            read(url, direct=direct, ca_file="/none")


@pytest.mark.parametrize("direct", [True, False])
def test_a_certificate_of_ones_own(tls: Tls, tmp_path: Path, direct: bool) -> None:
    authority = trustme.CA()
    ours = authority.issue_cert("me@example.org")
    ours.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "both.pem"))
    ours.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    ours.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    context = tls.server_context()
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    with Origin(tls=context) as server:
        url = server.add("x.tar", b"x")
        both, cert, key = (str(tmp_path / name) for name in ("both.pem", "cert.pem", "key.pem"))
        assert read(url, direct=direct, ca_file=tls.ca, certificate=both) == b"x"
        assert read(url, direct=direct, ca_file=tls.ca, certificate=cert, key=key) == b"x"
        with pytest.raises(TransferError):
            read(url, direct=direct, ca_file=tls.ca)
