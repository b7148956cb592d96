"""Signatures and tokens: made once, shared, renewed, and never shown."""

from __future__ import annotations

import asyncio
import datetime
import math
import sys
import urllib.parse
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.servers.azuremetadata import AzureMetadata, azure_metadata_fixture  # noqa: F401
from tests.servers.azurite import KEY, azure_environment_fixture  # noqa: F401
from wds_async.errors import ConfigError, MissingExtra
from wds_async.storage.azure import account as azureauthority
from wds_async.storage.azure.account import Account, AccountAccess, Blob, Grant, NoToken

pytestmark = pytest.mark.usefixtures("azure_environment")

ENDPOINT = "https://acc.blob.core.windows.net"
BLOB = Blob("", "", "c", "x.tar")
OTHER = Blob("", "", "c", "y.tar")


def account(kind: str, secret: Any = None, endpoint: str = ENDPOINT) -> Account:
    return Account("acc", endpoint, kind, secret)


def with_authority(made: Account, ask: Callable[[AccountAccess], Awaitable[Any]]) -> Any:
    async def scenario() -> Any:
        authority = AccountAccess(asyncio.to_thread, made)
        try:
            return await ask(authority)
        finally:
            await authority.close()

    return asyncio.run(scenario())


def parts(grant: Grant) -> dict[str, str]:
    return dict(urllib.parse.parse_qsl(grant.query))


def test_a_signature_reads_and_no_more() -> None:
    async def ask(authority: AccountAccess) -> Any:
        grants = await asyncio.gather(*(authority.grant(BLOB) for _ in range(20)), authority.grant(OTHER))
        assert len(set(map(id, grants))) == 1
        return grants[0], await authority.grant(Blob("", "", "c", "x.tar", ("snapshot", "2026")))

    grant, snapshot = with_authority(account("key", KEY), ask)
    said = parts(grant)
    assert (said["sr"], said["sp"], said["spr"]) == ("c", "r", "https")
    now = datetime.datetime.now(datetime.UTC)
    start, stop = (datetime.datetime.fromisoformat(said[name]) for name in ("st", "se"))
    assert datetime.timedelta(minutes=4) < now - start < datetime.timedelta(minutes=6)
    assert datetime.timedelta(minutes=59) < stop - now <= datetime.timedelta(minutes=60)
    assert grant.renew_after < grant.made_at + 3600 - 300
    assert parts(snapshot)["sr"] == "bs"
    assert said["sig"] not in repr(grant)
    assert KEY not in repr(grant)


def test_plain_http_is_signed_for_as_such() -> None:
    made = account("key", KEY, "http://127.0.0.1:1/acc")
    assert "spr" not in parts(with_authority(made, lambda authority: authority.grant(BLOB)))


def test_a_key_that_is_none_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match="not base64") as caught:
        with_authority(account("key", "SECRET!"), lambda authority: authority.grant(BLOB))
    assert "SECRET" not in f"{caught.value!r} {caught.value.__cause__!r}"


def test_what_is_given_is_used_as_it_stands() -> None:
    grant = with_authority(account("sas", "sv=1&sig=s%2B"), lambda authority: authority.grant(BLOB))
    assert (grant.query, grant.headers, grant.renew_after) == ("sv=1&sig=s%2B", (), math.inf)
    grant = with_authority(account("anonymous"), lambda authority: authority.grant(BLOB))
    assert grant.query == ""
    assert [name for name, _ in grant.headers] == ["x-ms-version"]


def test_a_refused_signature_is_renewed_unless_it_is_fresh(azure_environment: pytest.MonkeyPatch) -> None:
    async def ask(authority: AccountAccess) -> None:
        first = await authority.grant(BLOB)
        assert not authority.lapsed(BLOB, surely=False)  # the key is wrong: another one would not help
        assert authority.lapsed(BLOB, surely=True)
        azure_environment.setattr(azureauthority, "_FRESH_S", 0.0)
        assert authority.lapsed(BLOB, surely=False)
        azure_environment.setattr(azureauthority, "_FRESH_S", 5.0)
        second = await authority.grant(BLOB)
        assert second is not first
        assert authority.lapsed(BLOB, surely=False)  # a request with the first one was still under way
        assert await authority.grant(BLOB) is second

    with_authority(account("key", KEY), ask)

    async def never(authority: AccountAccess) -> None:
        await authority.grant(BLOB)
        assert not authority.lapsed(BLOB, surely=True)

    with_authority(account("sas", "sig=s"), never)


def test_tokens_are_shared_and_asked_for_again(
    azure_environment: pytest.MonkeyPatch, azure_metadata: AzureMetadata
) -> None:
    azure_metadata.as_machine(azure_environment)

    async def ask(authority: AccountAccess) -> None:
        assert authority.identity != "managed identity"
        grant = await authority.grant(BLOB)
        assert await authority.grant(Blob("", "", "other", "x")) is grant
        assert dict(grant.headers)["Authorization"] == f"Bearer {azure_metadata.given[-1]}"
        assert azure_metadata.given[-1] not in repr(grant)
        assert (authority.identity, authority.kind) == ("managed identity", "found")
        assert grant.renew_after - grant.made_at == pytest.approx(3300, abs=5)
        asked = len(azure_metadata.given)
        azure_environment.setattr(azureauthority, "_FRESH_S", 0.0)
        assert authority.lapsed(BLOB, surely=True)
        assert await authority.grant(BLOB) is not grant
        assert len(azure_metadata.given) > asked  # the client's own memory is left behind
        azure_metadata.status = 400
        assert authority.lapsed(BLOB, surely=True)
        with pytest.raises(NoToken, match="managed identity"):
            await authority.grant(BLOB)

    with_authority(account("found"), ask)


def test_a_machine_without_identity_is_not_asked_again_soon(
    azure_environment: pytest.MonkeyPatch, azure_metadata: AzureMetadata, caplog: pytest.LogCaptureFixture
) -> None:
    azure_metadata.as_machine(azure_environment)
    azure_metadata.status = 400

    async def ask(authority: AccountAccess) -> tuple[str, str]:
        grant = await authority.grant(BLOB)
        assert "Authorization" not in dict(grant.headers)
        return authority.identity, authority.kind

    assert with_authority(account("found"), ask) == ("anonymous", "anonymous")
    asked = len(azure_metadata.asked)
    assert asked
    assert with_authority(account("found"), ask) == ("anonymous", "anonymous")
    assert len(azure_metadata.asked) == asked
    assert len([record for record in caplog.records if record.name == "wds_async"]) == 1


def test_a_client_without_its_secret() -> None:
    with pytest.raises(ConfigError, match="AZURE_STORAGE_CLIENT_SECRET"):
        with_authority(account("client", ("tenant", "id", None)), lambda authority: authority.grant(BLOB))


def test_a_credential_that_fails_says_so() -> None:
    class Broken:
        def get_token(self, *scopes: str) -> Any:
            raise OSError("no network")

    with pytest.raises(OSError, match="no network"):
        with_authority(account("credential", Broken()), lambda authority: authority.grant(BLOB))


@pytest.mark.parametrize(("kind", "secret"), [("key", KEY), ("found", None), ("client", ("t", "i", "s"))])
def test_a_package_that_is_missing_is_named(kind: str, secret: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("azure.storage.blob", "azure.identity"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delattr("azure.identity", raising=False)
    with pytest.raises(MissingExtra, match=r"wds-async\[azure\]"):
        with_authority(account(kind, secret), lambda authority: authority.grant(BLOB))
