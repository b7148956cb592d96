"""Azure Blob Storage by its emulator: reading, listing, writing, and what goes wrong."""

from __future__ import annotations

import datetime
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin, Tls, make_shards
from tests.servers.azuremetadata import AzureMetadata, azure_metadata_fixture  # noqa: F401
from tests.servers.azurite import (
    ACCOUNT,
    KEY,
    Azurite,
    azure_environment_fixture,  # noqa: F401
    azurite_fixture,  # noqa: F401
    azurite_tls_fixture,  # noqa: F401
)
from tests.storage.locations import location_of, on_backend, page_through
from tests.transfer.reading import KIB, MIB, data, quick
from wds_async.errors import AccessDenied, ConfigError, ShardNotFound, WdsError
from wds_async.storage.azure import account as azureauthority
from wds_async.storage.azure.account import adlfs_options
from wds_async.storage.azure.backend import AzureBackend
from wds_async.storage.azure.errors import explain_writing
from wds_async.storage.base import Verdict
from wds_async.storage.options import StorageOptions
from wds_async.transfer.reader import open_shards

pytestmark = pytest.mark.servers

SIZE = 3 * MIB + 17
NAMES = ("with space.tar", "50%25.tar", "a#b?c=d&e.tar", "plus+and~tilde'().tar", "ümlaut/☃.tar", "a//b.tar", "$x@y:z")


def account(server: Azurite, **more: Any) -> dict[str, Any]:
    """storage_options of ``server``, without a credential."""
    return {"account_name": ACCOUNT, "account_host": server.endpoint, **more}


def signature(container: str, *, permission: str = "r", start_s: float = -300, stop_s: float = 3600) -> str:
    """A signature such as a user is given."""
    from azure.storage.blob import generate_container_sas

    now = datetime.datetime.now(datetime.UTC)
    start, stop = now + datetime.timedelta(seconds=start_s), now + datetime.timedelta(seconds=stop_s)
    made: str = generate_container_sas(ACCOUNT, container, KEY, permission=permission, start=start, expiry=stop)
    return made


def read(
    urls: Iterable[str], options: dict[str, Any] | None = None, after: Callable[[], Any] | None = None, **config: Any
) -> list[bytes]:
    """The bytes of each shard; raises the first error."""
    found = []
    given = StorageOptions({"az": options} if options else None)
    with open_shards(urls, config=quick(**config), options=given) as reader:
        for shard in reader:
            got = bytearray()
            while (piece := shard.read()) is not None:
                got += piece
                if after is not None:
                    after()
            found.append(bytes(got))
    return found


def failure(url: str, options: dict[str, Any] | None = None, **config: Any) -> WdsError:
    with pytest.raises(WdsError) as caught:
        read([url], options, **config)
    return caught.value


def count_signatures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The container of each signature that is made from now on."""
    import azure.storage.blob

    signed: list[str] = []
    real = azure.storage.blob.generate_container_sas

    def counted(**kwargs: Any) -> str:
        signed.append(kwargs["container_name"])
        return real(**kwargs)

    monkeypatch.setattr(azure.storage.blob, "generate_container_sas", counted)
    return signed


def _without_ours() -> dict[str, str]:
    """The environment, less what is the tests' own."""
    return {name: value for name, value in os.environ.items() if name != "WDS_AZURITE"}


@pytest.fixture
def configured(azurite: Azurite, azure_environment: pytest.MonkeyPatch) -> Azurite:
    """Azurite, with its connection string in the environment."""
    azure_environment.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite.connection_string)
    return azurite


@pytest.fixture
def machine(
    azurite_tls: Azurite, azure_environment: pytest.MonkeyPatch, azure_metadata: AzureMetadata, tls: Tls
) -> AzureMetadata:
    """This machine is one of Azure's, with a managed identity."""
    azure_metadata.as_machine(azure_environment)
    azure_environment.setenv("SSL_CERT_FILE", str(tls.ca))
    return azure_metadata


# -- reading ------------------------------------------------------------------------------------------------------


def test_every_way_to_say_who_we_are(azurite: Azurite, azure_environment: pytest.MonkeyPatch) -> None:
    from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential

    azurite.put("ways", {"x.tar": data(SIZE)})
    token = signature("ways")
    ways: list[dict[str, Any]] = [
        {"connection_string": azurite.connection_string},
        {"connection_string": f"BlobEndpoint={azurite.endpoint}/;AccountName={ACCOUNT};SharedAccessSignature={token}"},
        account(azurite, account_key=KEY),
        account(azurite, credential=AzureNamedKeyCredential(ACCOUNT, KEY)),
        account(azurite, sas_token=f"?{token}"),
        account(azurite, credential=token),
        account(azurite, credential=AzureSasCredential(token)),
    ]
    for options in ways:
        for direct in (True, False):
            assert read(["az://ways/x.tar"], options, direct=direct) == [data(SIZE)]
    names = (f"abfs://ways@{ACCOUNT}.dfs.core.windows.net/x.tar", f"https://{ACCOUNT}.blob.core.windows.net/ways/x.tar")
    azure_environment.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite.connection_string)
    assert read(names) == [data(SIZE)] * 2
    azure_environment.delenv("AZURE_STORAGE_CONNECTION_STRING")
    azure_environment.setenv("AZURE_STORAGE_ACCOUNT", ACCOUNT)
    azure_environment.setenv("AZURE_STORAGE_KEY", KEY)
    assert read(["az://ways/x.tar"], {"account_host": azurite.endpoint}) == [data(SIZE)]


def test_a_public_container_is_read_anonymously_as_the_user_says(
    azurite: Azurite, azure_environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    azurite.put("public", {"x.tar": data(SIZE)}, public=True)
    for direct in (True, False):
        assert read(["az://public/x.tar"], account(azurite, anon=True), direct=direct) == [data(SIZE)]
    azure_environment.setenv("AZURE_STORAGE_ANON", "1")
    assert read(["az://public/x.tar"], account(azurite)) == [data(SIZE)]
    assert not [record for record in caplog.records if record.name == "wds_async"]


def test_a_snapshot_is_read_as_it_was(configured: Azurite) -> None:
    configured.put("snap", {"x.tar": data(SIZE)})
    with configured.client() as client:
        taken = client.get_blob_client("snap", "x.tar").create_snapshot()["snapshot"]
    configured.put("snap", {"x.tar": data(SIZE, 1)})
    for direct in (True, False):
        found = read([f"az://snap/x.tar?snapshot={taken}", "az://snap/x.tar"], direct=direct)
        assert found == [data(SIZE), data(SIZE, 1)]


def test_one_signature_serves_a_container(configured: Azurite, azure_environment: pytest.MonkeyPatch) -> None:
    signed = count_signatures(azure_environment)
    configured.put("many", {f"{n}.tar": data(1000, n) for n in range(40)})
    assert read([f"az://many/{n}.tar" for n in range(40)]) == [data(1000, n) for n in range(40)]
    assert signed == ["many"]


def test_nothing_is_left_open_at_the_end_of_the_program(configured: Azurite, tmp_path: Path) -> None:
    configured.put("ends", {"x.tar": make_shards(tmp_path, 1, 3)[0].read_bytes()})
    program = (
        "import wds_async as wds\n"
        "print(len(list(wds.WebDataset('az://ends/x.tar', shardshuffle=False))))\n"
        "it = iter(wds.WebDataset('az://ends/x.tar', shardshuffle=False)); next(it)\n"
    )
    for direct in ("1", "0"):
        done = subprocess.run(
            [sys.executable, "-X", "dev", "-W", "error", "-c", program],
            capture_output=True,
            text=True,
            check=False,
            env={**_without_ours(), "WDS_DIRECT": direct},
        )
        # asyncio's debug mode tells of each callback that a busy machine held up.
        told = [line for line in done.stderr.splitlines() if not line.startswith("Executing <")]
        assert (done.stdout, told, done.returncode) == ("3\n", [], 0)


# -- renewal ------------------------------------------------------------------------------------------------------


def slowly(until: float) -> Callable[[], None]:
    """Wait, once, until an instant of ``time.time`` has passed."""

    def wait() -> None:
        while time.time() < until:
            time.sleep(0.02)

    return wait


@pytest.mark.parametrize("in_time", [True, False])
def test_a_signature_that_lapses_mid_shard_is_renewed(
    configured: Azurite, azure_environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, in_time: bool
) -> None:
    content = data(8 * MIB)
    configured.put("lapses", {"x.tar": content})
    azure_environment.setattr(azureauthority, "_VALID_S", 2.0)
    azure_environment.setattr(azureauthority, "_RENEWED_AT", 0.2 if in_time else 1000)
    signed = count_signatures(azure_environment)
    passed = slowly(time.time() + (0.6 if in_time else 2.2))
    with caplog.at_level(logging.INFO, "wds_async"):
        assert read(["az://lapses/x.tar"], after=passed, budget_bytes=MIB) == [content]
    assert len(signed) > 1
    told = [record.getMessage() for record in caplog.records if "requesting another" in record.getMessage()]
    assert bool(told) is not in_time
    assert all("account key of devstoreaccount1" in line and "sig=" not in line for line in told)


def test_a_managed_identity_reads_and_lists(
    azurite_tls: Azurite, machine: AzureMetadata, caplog: pytest.LogCaptureFixture
) -> None:
    azurite_tls.put("managed", {"x.tar": data(SIZE), "y.tar": b""})
    options = account(azurite_tls)
    with caplog.at_level(logging.DEBUG):
        for direct in (True, False):
            assert read(["az://managed/x.tar"], options, direct=direct) == [data(SIZE)]
        assert [entry.url for entry in page_through(AzureBackend, "az://managed/", options)] == [
            "az://managed/x.tar",
            "az://managed/y.tar",
        ]
        described = on_backend(
            AzureBackend, lambda backend: backend.describe(location_of("az://managed/x.tar")), options
        )
    assert (described.identity, described.direct) == ("managed identity", True)
    assert described.endpoint == azurite_tls.endpoint
    assert machine.given
    assert not [token for token in machine.given if token in caplog.text]


def test_app_service_hands_out_tokens_too(
    azurite_tls: Azurite, azure_environment: pytest.MonkeyPatch, azure_metadata: AzureMetadata, tls: Tls
) -> None:
    azure_metadata.as_app_service(azure_environment)
    azure_environment.setenv("SSL_CERT_FILE", str(tls.ca))
    azurite_tls.put("service", {"x.tar": data(SIZE)})
    assert read(["az://service/x.tar"], account(azurite_tls)) == [data(SIZE)]
    assert azure_metadata.given


@pytest.mark.parametrize("in_time", [True, False])
def test_a_token_that_lapses_mid_shard_is_renewed(
    azurite_tls: Azurite, machine: AzureMetadata, azure_environment: pytest.MonkeyPatch, in_time: bool
) -> None:
    content = data(8 * MIB)
    azurite_tls.put("token", {"x.tar": content})
    machine.lives_s = 2
    if not in_time:
        azure_environment.setattr(azureauthority, "_TOKEN_MARGIN_S", -1000)
    found = read(
        ["az://token/x.tar"],
        account(azurite_tls),
        after=slowly(time.time() + (1.5 if in_time else 2.2)),
        budget_bytes=MIB,
    )
    assert found == [content]
    assert len(machine.given) > 1


def test_a_credential_of_the_programs_own(
    azurite_tls: Azurite, machine: AzureMetadata, azure_environment: pytest.MonkeyPatch
) -> None:
    from azure.identity import ManagedIdentityCredential
    from azure.identity.aio import ManagedIdentityCredential as Asynchronous
    from fsspec.asyn import get_loop, sync

    azurite_tls.put("own", {"x.tar": data(SIZE)})
    with ManagedIdentityCredential() as credential:
        for _ in range(2):
            assert read(["az://own/x.tar"], account(azurite_tls, credential=credential)) == [data(SIZE)]
    later = Asynchronous()
    for _ in range(2):  # each with a loop of its own
        assert read(["az://own/x.tar"], account(azurite_tls, credential=later)) == [data(SIZE)]
    sync(get_loop(), later.close)


# -- no credentials -----------------------------------------------------------------------------------------------


def test_without_credentials_it_is_anonymous_and_said_once(
    azurite_tls: Azurite, machine: AzureMetadata, caplog: pytest.LogCaptureFixture
) -> None:
    machine.status = 400
    azurite_tls.put("open", {"x.tar": data(SIZE)}, public=True)
    azurite_tls.put("closed", {"x.tar": b"x"})
    for _ in range(2):
        assert read(["az://open/x.tar"], account(azurite_tls)) == [data(SIZE)]
    told = [record.getMessage() for record in caplog.records if record.name == "wds_async"]
    assert len(told) == 1
    assert "reading anonymously" in told[0]
    error = failure("az://closed/x.tar", account(azurite_tls))
    assert isinstance(error, AccessDenied)
    assert "anonymous" in str(error)
    assert "AZURE_STORAGE_ACCOUNT_KEY" in str(error)


def test_a_metadata_service_that_does_not_answer_is_not_waited_for(
    azurite_tls: Azurite, machine: AzureMetadata, azure_environment: pytest.MonkeyPatch
) -> None:
    assert azureauthority._SEARCH_S <= 3
    azure_environment.setattr(azureauthority, "_SEARCH_S", 0.3)
    azure_environment.setattr(azureauthority, "_TOOLS", ())
    machine.silent = True
    azurite_tls.put("silent", {"x.tar": data(SIZE)}, public=True)
    assert read(["az://silent/x.tar"], account(azurite_tls)) == [data(SIZE)]


def test_a_token_does_not_go_over_plain_http(azurite: Azurite, machine: AzureMetadata) -> None:
    error = failure("az://ways/x.tar", account(azurite))
    assert isinstance(error, ConfigError)
    assert "plain http" in str(error)
    assert not machine.given


# -- what goes wrong ----------------------------------------------------------------------------------------------


WRONG = "V1JPTkctS0VZLVNFQ1JFVA=="


def test_an_account_that_does_not_exist(azure_environment: pytest.MonkeyPatch) -> None:
    import socket

    def nowhere(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    azure_environment.setattr(socket, "getaddrinfo", nowhere)
    error = failure("az://c/x.tar", {"account_name": "mistyped", "account_key": KEY})
    assert isinstance(error, ShardNotFound)
    assert "there is no storage account mistyped" in str(error)


def test_a_busy_service_is_asked_again(origin: Origin, azure_environment: pytest.MonkeyPatch) -> None:
    origin.add(f"{ACCOUNT}/busy/x.tar", data(300 * KIB))
    busy = b"<?xml version='1.0'?><Error><Code>ServerBusy</Code><Message>Ingress is over.</Message></Error>"
    origin.behave(status=503, body=busy, headers={"x-ms-error-code": "ServerBusy"}, times=2)
    options = {"account_name": ACCOUNT, "account_key": KEY, "account_host": f"{origin.base}/{ACCOUNT}"}
    assert read(["az://busy/x.tar"], options) == [data(300 * KIB)]


# -- listing ------------------------------------------------------------------------------------------------------


def test_listing_by_the_address_of_the_account(configured: Azurite) -> None:
    configured.put("listing", {"train/a.tar": b"0", "50%25 #.tar": b"x"})
    (entry,) = page_through(AzureBackend, "az://listing/train/")
    assert entry.modified
    assert abs(time.time() - entry.modified) < 600
    assert "az://listing/" in {entry.url for entry in page_through(AzureBackend, "az://")}
    base = f"https://{ACCOUNT}.blob.core.windows.net/listing/"
    assert {entry.url for entry in page_through(AzureBackend, base)} == {f"{base}train/", f"{base}50%2525%20%23.tar"}
    assert read([f"{base}50%2525%20%23.tar"]) == [b"x"]


# -- writing ------------------------------------------------------------------------------------------------------


def test_what_adlfs_says_while_writing_is_explained(azurite: Azurite, azure_environment: pytest.MonkeyPatch) -> None:
    from wds_async.storage.filesystems import filesystem_of

    azurite.put("refused", {})
    for url, options, verdict, said in (
        ("az://nowhere/x", account(azurite, account_key=KEY), Verdict.MISSING, "ContainerNotFound"),
        ("az://refused/x", account(azurite, sas_token=signature("refused")), Verdict.DENIED, "Contributor"),
        ("az://refused/x", account(azurite, account_key=WRONG), Verdict.DENIED, "AuthorizationFailure"),
    ):
        filesystem, path = filesystem_of(url, adlfs_options(url, options))
        with pytest.raises(Exception) as caught, filesystem.open(path, "wb") as stream:
            stream.write(b"x")
        stream.closed = True
        fault = explain_writing(caught.value, identity="us")
        assert fault.verdict is verdict
        assert said in f"{fault.reason} {fault.advice}"
        assert "\n" not in fault.reason


def test_adlfs_writes_where_we_read(azurite: Azurite, azure_environment: pytest.MonkeyPatch) -> None:
    from wds_async.storage.filesystems import filesystem_of

    azurite.put("agreed", {})
    azure_environment.setenv("AZURE_STORAGE_ACCOUNT", ACCOUNT)
    azure_environment.setenv("AZURE_STORAGE_KEY", KEY)
    options = {"account_host": azurite.endpoint}
    filesystem, path = filesystem_of("az://agreed/x", adlfs_options("az://agreed/x", options))
    filesystem.pipe_file(path, b"x")
    assert read(["az://agreed/x"], options) == [b"x"]
