"""What ``hf://`` URLs name, and whose token is used (reading and listing: `tests/clouds/test_huggingface.py`)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.servers.origin import Origin
from tests.storage.locations import location_of, on_backend
from wds_async.errors import ConfigError, UrlError
from wds_async.storage.base import Answer, RefusedAnswer, Request, Verdict
from wds_async.storage.checked import CheckedRanges
from wds_async.storage.http.backend import HttpStream
from wds_async.storage.hub.backend import HuggingFaceBackend, hub_place
from wds_async.storage.options import Options


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No login, endpoint or proxy of the machine's own."""
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_OIDC_RESOURCE")
    proxies = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "FSSPEC_HF")
    for name in (*names, *proxies, "TRANSFORMERS_OFFLINE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("hf://datasets/o/n/a/x.tar", ("datasets", "o/n", "main", "a/x.tar")),
        ("hf://datasets/o/n@v1/x.tar", ("datasets", "o/n", "v1", "x.tar")),
        ("hf://datasets/o/n@my%2Fbranch/x.tar", ("datasets", "o/n", "my/branch", "x.tar")),
        ("hf://datasets/o/n@refs/convert/parquet/a/x", ("datasets", "o/n", "refs/convert/parquet", "a/x")),
        ("hf://datasets/o/n@refs%2Fconvert%2Fparquet/x", ("datasets", "o/n", "refs/convert/parquet", "x")),
        ("hf://datasets/o/n@refs/pr/10/x", ("datasets", "o/n", "refs/pr/10", "x")),
        ("hf://datasets/o/n@refs/other/x", ("datasets", "o/n", "refs", "other/x")),
        ("hf://datasets/o/n@main", ("datasets", "o/n", "main", "")),
        ("hf://datasets/o/n/a@b/x.tar", ("datasets", "o/n", "main", "a@b/x.tar")),
        ("hf://datasets/squad@main/x.tar", ("datasets", "squad", "main", "x.tar")),
        ("hf://datasets/o/n/", ("datasets", "o/n", "main", "")),
        ("hf://o/n/x.tar", ("models", "o/n", "main", "x.tar")),
        ("hf://o/n@v1/x.tar", ("models", "o/n", "v1", "x.tar")),
        ("hf://models/o/n/x.tar", ("models", "o/n", "main", "x.tar")),
        ("hf://spaces/o/n/x.tar", ("spaces", "o/n", "main", "x.tar")),
        ("hf://buckets/o/n/a/x%20y.tar", ("buckets", "o/n", "", "a/x%20y.tar")),
        ("HF://datasets/o/n/x", ("datasets", "o/n", "main", "x")),
    ],
)
def test_places(url: str, place: tuple[str, str, str, str]) -> None:
    found = hub_place(url)
    assert (found.folder, found.repo, found.revision, found.path) == place


@pytest.mark.parametrize(
    "url",
    [
        *(
            "hf://",
            "hf://datasets",
            "hf://datasets/",
            "hf://datasets/squad",
            "hf://o",
            "hf:///n/x",
            "hf://datasets//n/x",
        ),
        *("hf://datasets/o/n@/x", "hf://datasets/@main/x", "hf://buckets/o/n@main/x"),
    ],
)
def test_what_is_no_place(url: str) -> None:
    with pytest.raises(UrlError, match="not a place of the hub"):
        hub_place(url)


def test_revisions_of_options() -> None:
    assert hub_place("hf://datasets/o/n/x", "v2").revision == "v2"
    assert hub_place("hf://datasets/o/n@v2/x", "v2").revision == "v2"
    with pytest.raises(UrlError, match="names revision 'v1', and storage_options 'v2'"):
        hub_place("hf://datasets/o/n@v1/x", "v2")


def access(url: str = "hf://datasets/o/n/x.tar", direct: bool = True, **options: Any) -> Any:
    return on_backend(HuggingFaceBackend, lambda backend: backend.access(location_of(url)), options, direct=direct)


def token_of(**options: Any) -> str | None:
    return dict(access(**options).headers).get("Authorization")


def test_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    request = access(token="t")
    assert isinstance(request, Request)
    assert request.url == "https://huggingface.co/datasets/o/n/resolve/main/x.tar"
    assert request.keeps_redirect
    assert dict(request.headers)["Authorization"] == "Bearer t"
    assert "Bearer" not in repr(request)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    with pytest.raises(OSError, match=r"127\.0\.0\.1"):  # aiohttp asks it for the size
        access()


@pytest.mark.parametrize(("cuts", "way"), [(True, CheckedRanges), (False, HttpStream)])
def test_not_directly(origin: Origin, cuts: bool, way: type) -> None:
    origin.add("datasets/o/n/resolve/main/x.tar", b"0123456789")
    origin.behave(ignore_range=not cuts)
    assert isinstance(access(direct=False, endpoint=origin.base), way)


def test_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert token_of() is None
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", "old")
    assert token_of() == "Bearer old"
    monkeypatch.setenv("HF_TOKEN", " new\n")
    assert token_of() == "Bearer new"
    assert token_of(token="mine") == "Bearer mine"
    assert token_of(token=True) == "Bearer new"
    assert token_of(token=False) is None


def test_tokens_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="token=True, and there is none"):
        access(token=True)
    with pytest.raises(ConfigError, match="token is a str"):
        access(token=5)
    with pytest.raises(ConfigError, match="empty"):
        access(token=" ")
    monkeypatch.setenv("HF_TOKEN", "SECRET\nSECRET")
    with pytest.raises(ConfigError, match="stray line break") as caught:
        access()
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("installed", [True, False])
def test_the_logins_token(tmp_path: Path, installed: bool) -> None:
    hide = "" if installed else "sys.modules['huggingface_hub'] = None\n"
    program = (
        f"import asyncio, sys\n{hide}from wds_async.storage.hub.backend import HuggingFaceBackend\n"
        "from wds_async.storage.registry import locate as location_of\n"
        "async def main():\n"
        "    backend = HuggingFaceBackend(asyncio.to_thread)\n"
        "    request = await backend.access(location_of('hf://o/n/x'))\n"
        "    print(dict(request.headers).get('Authorization'), (await backend.describe(location_of('hf://o/n/x'))).identity,\n"
        "          bool(sys.modules.get('huggingface_hub')))\n"
        "asyncio.run(main())\n"
    )

    def run(**environ: str) -> str:
        more = {"HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2]), **environ}
        done = subprocess.run([sys.executable, "-c", program], env=more, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert run() == "None anonymous False"
    (tmp_path / "named").write_text("hf_named\n")
    (tmp_path / ".cache" / "huggingface").mkdir(parents=True)
    (tmp_path / ".cache" / "huggingface" / "token").write_text("hf_login")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text("hf_home")
    by_login = "the token of `hf auth login`"
    available = installed and _hub_is_installed()
    assert run() == f"Bearer hf_login {by_login} {available}"
    assert run(HF_HOME=str(tmp_path / "home")) == f"Bearer hf_home {by_login} {available}"
    assert run(HF_TOKEN_PATH="~/named") == f"Bearer hf_named {by_login} {available}"
    assert run(HF_TOKEN="hf_env") == "Bearer hf_env the token of HF_TOKEN False"


def _hub_is_installed() -> bool:
    import importlib.util

    return importlib.util.find_spec("huggingface_hub") is not None


def test_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/hf/")
    assert access().url == "https://mirror.example/hf/datasets/o/n/resolve/main/x.tar"
    assert access(endpoint="http://h").url == "http://h/datasets/o/n/resolve/main/x.tar"
    with pytest.raises(ConfigError, match="write https://host"):
        access(endpoint="mirror.example")


def test_fsspecs_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.config

    monkeypatch.setitem(fsspec.config.conf, "hf", {"token": "c", "endpoint": "http://h", "max_workers": 3})
    assert token_of() == "Bearer c"
    assert token_of(token="mine") == "Bearer mine"
    assert access().url.startswith("http://h/")


def test_options_of_its_filesystem_are_passed_over() -> None:
    assert access(max_workers=4, block_size=1 << 20).url.endswith("x.tar")
    with pytest.raises(ConfigError, match="key means nothing here"):
        access(key="k")


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "0")
    access()
    monkeypatch.setenv(name, "YES")
    with pytest.raises(ConfigError, match=f"{name} is set"):
        access()


def test_a_file_has_a_path() -> None:
    with pytest.raises(UrlError, match=r"hf://datasets/squad@main/PATH"):
        access("hf://datasets/squad/x.tar")
    with pytest.raises(UrlError, match="a folder is listed"):
        access("hf://datasets/o/n/folder/")


def test_exceptions_are_explained_before_anything_was_asked() -> None:
    backend = HuggingFaceBackend(asyncio.to_thread)
    assert backend.classify(ConnectionResetError("reset"), location_of("hf://o/n/x")).verdict is Verdict.TRANSIENT
    refused = backend.classify(RefusedAnswer(Answer(401, {})), location_of("hf://o/n/x"))
    assert refused.verdict is Verdict.DENIED
    assert "no credentials" in refused.reason


def test_the_token_is_not_repeated() -> None:
    async def explain() -> str:
        backend = HuggingFaceBackend(asyncio.to_thread, Options({"token": "hf_SECRET"}))
        await backend.access(location_of("hf://o/n/x"))
        fields = {"x-error-message": "no entry for hf_SECRET"}
        return "\n".join(
            backend.classify(Answer(status, fields, b"Bearer hf_SECRET"), location_of("hf://o/n/x")).reason
            for status in (401, 403, 404, 500)
        )

    reasons = asyncio.run(explain())
    assert reasons.count("no entry for ***") == 4
    assert "SECRET" not in reasons
