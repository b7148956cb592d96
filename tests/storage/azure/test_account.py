"""Which account, and what is known of its credentials."""

from __future__ import annotations

from typing import Any

import pytest

from tests.servers.azurite import ACCOUNT, KEY, azure_environment_fixture  # noqa: F401
from wds_async.errors import ConfigError, UrlError
from wds_async.storage.azure.account import (
    Account,
    Blob,
    account_of,
    adlfs_options,
    has_credentials,
    parse,
    without_ours,
)

pytestmark = pytest.mark.usefixtures("azure_environment")

PUBLIC = "https://acc.blob.core.windows.net"
TEXT = f"DefaultEndpointsProtocol=https;AccountName=acc;AccountKey={KEY};EndpointSuffix=core.windows.net"


@pytest.mark.parametrize(
    ("url", "blob"),
    [
        ("az://c/a/b.tar", Blob("", "", "c", "a/b.tar")),
        ("ABFS://c//a", Blob("", "", "c", "/a")),
        ("az://c", Blob("", "", "c", "")),
        ("az://", Blob("", "", "", "")),
        ("abfss://c@acc.dfs.core.windows.net/a.tar", Blob("acc", PUBLIC, "c", "a.tar")),
        ("az://c@acc.blob.core.windows.net/a.tar", Blob("acc", PUBLIC, "c", "a.tar")),
        ("abfs://acc.dfs.core.windows.net/c/a.tar", Blob("acc", PUBLIC, "c", "a.tar")),
        ("abfs://c@acc.dfs.core.usgovcloudapi.net/a", Blob("acc", "https://acc.blob.core.usgovcloudapi.net", "c", "a")),
        ("https://acc.blob.core.windows.net/c/a%20b%2525.tar", Blob("acc", PUBLIC, "c", "a b%25.tar")),
        ("https://acc.blob.core.windows.net/c/a?versionId=2026", Blob("acc", PUBLIC, "c", "a", ("versionid", "2026"))),
        ("az://c/a?versionid=2026-01", Blob("", "", "c", "a", ("versionid", "2026-01"))),
        ("az://c/a?snapshot=2026%3A01", Blob("", "", "c", "a", ("snapshot", "2026:01"))),
        ("az://c/what?no=1 50%25#.tar", Blob("", "", "c", "what?no=1 50%25#.tar")),
    ],
)
def test_parse(url: str, blob: Blob) -> None:
    assert parse(url) == blob


def test_a_host_that_is_no_blob_service() -> None:
    with pytest.raises(UrlError, match=r"'evil\.example' is no blob service"):
        parse("abfss://c@evil.example/a.tar")


def of(url: str = "az://c/a", **options: Any) -> Account:
    return account_of(url, parse(url), options)


@pytest.mark.parametrize(
    ("options", "environment", "kind", "secret"),
    [
        ({}, {"AZURE_STORAGE_CONNECTION_STRING": TEXT}, "key", KEY),
        ({}, {"AZURE_STORAGE_ACCOUNT_NAME": "acc", "AZURE_STORAGE_ACCOUNT_KEY": "k"}, "key", "k"),
        ({}, {"AZURE_STORAGE_ACCOUNT": "acc", "AZURE_STORAGE_KEY": "k"}, "key", "k"),
        ({}, {"AZURE_STORAGE_ACCOUNT_NAME": "acc", "AZURE_STORAGE_SAS_TOKEN": "?sig=s"}, "sas", "sig=s"),
        ({}, {"AZURE_STORAGE_ACCOUNT_NAME": "acc", "AZURE_STORAGE_ANON": "1"}, "anonymous", None),
        ({}, {"AZURE_STORAGE_ACCOUNT_NAME": "acc", "AZURE_STORAGE_ANON": "false"}, "found", None),
        ({"account_name": "acc"}, {"AZURE_STORAGE_ACCOUNT_KEY": "k"}, "key", "k"),
        ({"account_name": "acc", "sas_token": "sig=s"}, {"AZURE_STORAGE_CONNECTION_STRING": TEXT}, "sas", "sig=s"),
        ({"account_name": "acc", "anon": True}, {"AZURE_STORAGE_ACCOUNT_KEY": "k"}, "anonymous", None),
        ({"account_name": "acc", "anon": False}, {}, "found", None),
        (
            {"account_name": "acc"},
            {
                "AZURE_STORAGE_CLIENT_ID": "i",
                "AZURE_STORAGE_CLIENT_SECRET": "s",
                "AZURE_STORAGE_TENANT_ID": "t",
            },
            "client",
            ("t", "i", "s"),
        ),
        ({"account_name": "acc", "credential": {"account_key": "k"}}, {}, "key", "k"),
    ],
)
def test_what_counts(
    options: dict[str, Any],
    environment: dict[str, str],
    kind: str,
    secret: Any,
    azure_environment: pytest.MonkeyPatch,
) -> None:
    for name, text in environment.items():
        azure_environment.setenv(name, text)
    found = of(**options)
    assert (found.name, found.endpoint, found.kind, found.secret) == ("acc", PUBLIC, kind, secret)
    if kind not in ("anonymous", "found"):
        assert "secret" not in repr(found)


def test_endpoints() -> None:
    assert of(connection_string="UseDevelopmentStorage=true").endpoint == f"http://127.0.0.1:10000/{ACCOUNT}"
    assert of(connection_string=f"AccountName=a;AccountKey=k;BlobEndpoint=http://h:1/{ACCOUNT}/").endpoint == (
        f"http://h:1/{ACCOUNT}"
    )
    assert of(account_name="a", account_host="h.example").endpoint == "https://h.example"
    signed = of(connection_string="BlobEndpoint=https://acc.blob.core.windows.net;SharedAccessSignature=sig=s")
    assert (signed.name, signed.kind, signed.secret) == ("acc", "sas", "sig=s")


def test_one_accounts_secret_is_not_anothers(azure_environment: pytest.MonkeyPatch) -> None:
    azure_environment.setenv("AZURE_STORAGE_CONNECTION_STRING", TEXT)
    found = of("abfss://c@other.dfs.core.windows.net/a")
    assert (found.name, found.endpoint, found.kind) == ("other", "https://other.blob.core.windows.net", "found")
    assert of("abfss://c@acc.dfs.core.windows.net/a").kind == "key"
    assert of("abfss://c@other.dfs.core.windows.net/a", account_name="acc", sas_token="sig=s").kind == "found"


def test_nonsense() -> None:
    with pytest.raises(ConfigError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        of()
    for text in ("SECRET", "Account=SECRET", "BlobEndpoint=SECRET"):
        with pytest.raises(ConfigError) as caught:
            of(connection_string=text)
        assert "SECRET" not in str(caught.value)
    with pytest.raises(ConfigError, match="gives no tokens"):
        of(account_name="acc", credential=3)


def test_https_is_ours_only_where_we_know_the_account(azure_environment: pytest.MonkeyPatch) -> None:
    url = f"{PUBLIC}/c/a.tar"
    assert not has_credentials(url, {})
    azure_environment.setenv("AZURE_STORAGE_SAS_TOKEN", "sig=s")  # of whom?
    assert not has_credentials(url, {})
    azure_environment.setenv("AZURE_STORAGE_ACCOUNT_NAME", "other")
    assert not has_credentials(url, {})
    assert has_credentials(url, {"account_name": "acc"})
    assert has_credentials(url, {"anon": False})
    azure_environment.setenv("AZURE_STORAGE_CONNECTION_STRING", TEXT)
    assert has_credentials(url, {})


def test_identities_name_no_secret() -> None:
    assert of(account_name="acc", account_key=KEY).identity == "account key of acc"
    signed = of(account_name="acc", sas_token="st=2026-01-01&se=2026-01-02&sig=SECRET")
    assert signed.identity == "shared access signature (valid from 2026-01-01 to 2026-01-02)"
    assert of(account_name="acc", sas_token="sig=SECRET").identity == "shared access signature"
    client = of(account_name="acc", client_id="id", client_secret="SECRET", tenant_id="t")
    assert client.identity == "client ID id"
    assert "SECRET" not in repr((signed, client))


def test_options_for_others() -> None:
    given = {"account_name": "acc", "anon": False, "exclude_cli_credential": True}
    assert without_ours(given) == {"exclude_cli_credential": True}
    assert of(**given).more == (("exclude_cli_credential", True),)


def test_writing_goes_where_reading_goes(azure_environment: pytest.MonkeyPatch) -> None:
    azure_environment.setenv("AZURE_STORAGE_ACCOUNT", "acc")
    azure_environment.setenv("AZURE_STORAGE_KEY", KEY)
    assert adlfs_options("az://c/a", {"blocksize": 1}) == {
        "blocksize": 1,
        "connection_string": f"AccountName=acc;BlobEndpoint={PUBLIC};AccountKey={KEY}",
    }
    azure_environment.delenv("AZURE_STORAGE_KEY")
    assert adlfs_options("az://c/a", {}) == {
        "account_name": "acc",
        "anon": False,
        "account_host": "acc.blob.core.windows.net",
    }
