"""Azure Blob Storage: the requests it asks for. With a real server: tests/clouds/test_azure.py."""

from __future__ import annotations

import socket
import sys
import urllib.parse
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.servers.azurite import KEY, azure_environment_fixture  # noqa: F401
from tests.storage.locations import location_of, on_backend
from wds_async.errors import ConfigError, UrlError
from wds_async.storage.azure import SPEC as AZURE
from wds_async.storage.azure.backend import AzureBackend
from wds_async.storage.base import Answer, RefusedAnswer, Request, Verdict
from wds_async.storage.stores import web_store
from wds_async.transfer.connection import request_bytes

OPTIONS = {"account_name": "acc", "account_key": KEY}
HTTPS = "https://acc.blob.core.windows.net/c/a%20b.tar"


@pytest.fixture(autouse=True)
def resolved(azure_environment: pytest.MonkeyPatch) -> None:
    """Every host has an address."""
    azure_environment.setattr(socket, "getaddrinfo", lambda *args, **kwargs: [])


def asked(ask: Callable[[AzureBackend], Awaitable[Any]], options: dict[str, Any] | None = None) -> Any:
    return on_backend(AzureBackend, ask, OPTIONS if options is None else options)


def request(url: str, options: dict[str, Any] | None = None) -> Request:
    found = asked(lambda backend: backend.access(location_of(url)), options)
    assert isinstance(found, Request)
    return found


@pytest.mark.parametrize(
    ("url", "ours"),
    [
        ("https://acc.blob.core.windows.net/c/x", True),
        ("HTTPS://ACC.BLOB.core.windows.net/c/x", True),
        ("https://acc.blob.core.chinacloudapi.cn/c/x", True),
        ("http://acc.blob.core.windows.net/c/x", False),
        ("https://acc.blob.core.windows.net/c/x?sv=1&sig=s", False),
        ("https://blob.core.windows.net/c/x", False),
        ("https://acc.blob.core.windows.net.evil.example/c/x", False),
        ("https://evil.example/acc.blob.core.windows.net/x", False),
    ],
)
def test_which_urls_may_be_ours(url: str, ours: bool) -> None:
    assert (web_store(url) is AZURE) is ours


@pytest.mark.parametrize(
    "name", ["a b", "50%25", "a#b?c=d&e", "+~'()!*;:@,$", "ümlaut/☃", "a//b", "dots...", "\\|^`{}[]"]
)
def test_a_name_survives_its_way_into_the_request(name: str) -> None:
    found = request(f"az://c/{name}")
    line = request_bytes(found.url, found.headers).decode("ascii").split("\r\n")[0]
    path, _, query = line.split(" ")[1].partition("?")
    assert urllib.parse.unquote(path) == f"/c/{name}"
    assert set(urllib.parse.parse_qs(query)) >= {"sig", "sp", "se", "st"}


def test_requests() -> None:
    found = request("az://c/x.tar?versionid=2026-01-01T00%3A00")
    assert found.url.startswith("https://acc.blob.core.windows.net/c/x.tar?versionid=2026-01-01T00%3A00&")
    assert "sig=" not in repr(found)
    assert not found.keeps_redirect
    assert request(HTTPS).url.startswith("https://acc.blob.core.windows.net/c/a%20b.tar?st=")


def test_without_credentials_https_is_a_web_server_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("azure", "azure.storage.blob", "azure.identity", "adlfs"):
        monkeypatch.setitem(sys.modules, name, None)
    assert request(HTTPS, {}).url == HTTPS
    assert asked(lambda backend: backend.describe(location_of(HTTPS)), {}).identity == "anonymous"

    async def explain(backend: AzureBackend) -> Any:
        refused = RefusedAnswer(Answer(409, {"x-ms-error-code": "PublicAccessNotPermitted"}))
        return backend.classify(refused, location_of(HTTPS)), backend.classify(Answer(404, {}), location_of(HTTPS))

    named, unnamed = asked(explain, {})
    assert named.verdict is Verdict.DENIED
    assert "AZURE_STORAGE_ACCOUNT_KEY" in named.advice
    assert unnamed.verdict is Verdict.MISSING


def test_a_proxy_is_not_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    described = asked(lambda backend: backend.describe(location_of("az://c/x.tar")))
    assert (described.direct, described.why) == (False, "a proxy is in the way")
    with pytest.raises(Exception, match=r"127\.0\.0\.1"):
        asked(lambda backend: backend.access(location_of("az://c/x.tar")))


def test_descriptions() -> None:
    found = asked(lambda backend: backend.describe(location_of("az://c/x.tar")))
    assert (found.store, found.endpoint) == ("Azure Blob Storage", "https://acc.blob.core.windows.net")
    assert (found.identity, found.direct, found.why) == ("account key of acc", True, "")


def test_urls_that_name_no_blob() -> None:
    for url in ("az://c", "az://c/", "az://"):
        with pytest.raises(UrlError, match="not a blob"):
            request(url)
    with pytest.raises(ConfigError, match="which storage account"):
        request("az://c/x.tar", {"account_key": KEY})


def test_a_host_that_does_not_resolve_now_may_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)

    async def ask(backend: AzureBackend) -> Any:
        try:
            return await backend.access(location_of("az://c/x.tar"))
        except OSError as exn:
            return backend.classify(exn, location_of("az://c/x.tar"))

    assert asked(ask).verdict is Verdict.TRANSIENT
