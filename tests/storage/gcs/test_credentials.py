"""Whose authority is found, in which order, and how long that takes."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.servers.fakegcs import clean_google
from tests.servers.gcemetadata import GceMetadata, gce_metadata
from tests.servers.gcsauth import service_account_file
from wds_async import logs
from wds_async.storage.gcs.credentials import AuthFailed, emulator, find_identity, gcsfs_options, metadata_project

__all__ = ["clean_google", "gce_metadata"]

Clean = pytest.MonkeyPatch
USER = {"type": "authorized_user", "client_id": "c", "client_secret": "marked-secret", "refresh_token": "marked-secret"}
EXTERNAL = {
    "type": "external_account",
    "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/q",
    "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
    "token_url": "https://sts.googleapis.com/v1/token",
    "credential_source": {"file": "/token"},
    "service_account_impersonation_url": "https://iamcredentials.googleapis.com/v1/projects/-/serviceAccounts/"
    "w@p.iam.gserviceaccount.com:generateAccessToken",
}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    service_account_file(tmp_path / "key.json", "http://127.0.0.1:9/token")
    return tmp_path / "key.json"


def written(path: Path, content: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return str(path)


def test_the_order(gce_metadata: GceMetadata, clean_google: Clean, key_file: Path, tmp_path: Path) -> None:
    found = find_identity({})
    assert (found.name, found.missed) == ("metadata server", False)
    written(tmp_path / "no-gcloud" / "application_default_credentials.json", USER)
    assert find_identity({}).name == "user account (gcloud's application default credentials)"
    clean_google.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key_file))
    found = find_identity({})
    assert found.name == "service account reader@p.iam.gserviceaccount.com (GOOGLE_APPLICATION_CREDENTIALS)"
    assert found.project == "key-project"
    assert find_identity({"token": "anon"}).credentials is None
    assert find_identity({"token": "cloud"}).name == "metadata server"
    assert find_identity({"token": "google_default"}).name == found.name
    clean_google.setenv("STORAGE_EMULATOR_HOST", "localhost:1")
    assert find_identity({}).name == "anonymous (STORAGE_EMULATOR_HOST)"
    assert find_identity({"endpoint_url": "http://h"}).name == found.name


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (USER, "user account (storage_options)"),
        ({**USER, "account": "me@example.com"}, "user account me@example.com (storage_options)"),
        ({k: v for k, v in USER.items() if k != "type"}, "user account (storage_options)"),
        (EXTERNAL, "workload identity as service account w@p.iam.gserviceaccount.com (storage_options)"),
        (
            {
                "type": "impersonated_service_account",
                "source_credentials": USER,
                "service_account_impersonation_url": EXTERNAL["service_account_impersonation_url"],
            },
            "impersonated service account w@p.iam.gserviceaccount.com (storage_options)",
        ),
    ],
)
def test_kinds(clean_google: Clean, tmp_path: Path, content: dict[str, Any], name: str) -> None:
    for token in (content, written(tmp_path / "file.json", content)):
        found = find_identity({"token": token})
        assert found.name == name
        assert found.credentials is not None
        assert "marked-secret" not in repr(found)


def test_an_access_token_and_an_object(clean_google: Clean) -> None:
    from google.oauth2.credentials import Credentials

    assert find_identity({"token": "ya29.x"}).name == "access token (storage_options)"
    given = Credentials("ya29.x")  # type: ignore[no-untyped-call]
    assert find_identity({"token": given}).credentials is given
    with pytest.raises(AuthFailed, match="gcloud auth"):
        find_identity({"token": "browser"})
    with pytest.raises(AuthFailed, match="No cached tokens"):
        find_identity({"token": "cache"})
    with pytest.raises(AuthFailed, match="not int"):
        find_identity({"token": 5})


def test_scopes(clean_google: Clean, key_file: Path) -> None:
    assert find_identity({"token": str(key_file)}).credentials.scopes == [
        "https://www.googleapis.com/auth/devstorage.read_only"
    ]
    written_by = gcsfs_options({"token": str(key_file)})["token"]
    assert written_by.scopes == ["https://www.googleapis.com/auth/devstorage.full_control"]
    assert gcsfs_options({"token": "anon"})["token"] == "anon"


def test_projects(gce_metadata: GceMetadata, clean_google: Clean, key_file: Path) -> None:
    assert metadata_project() == "project-of-tests"
    assert find_identity({"token": str(key_file), "project": "mine"}).project == "mine"
    clean_google.setenv("GOOGLE_CLOUD_PROJECT", "theirs")
    assert find_identity({"token": str(key_file)}).project == "theirs"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not JSON"),
        ("[]", "holds no credentials"),
        ("{}", "type that is not known here: None"),
        ('{"type": "gdch"}', "not known here: 'gdch'"),
        ('{"type": "service_account", "private_key": "marked-secret"}', "credentials: MalformedError"),
        (
            '{"type": "service_account", "private_key": "marked-secret", "client_email": "e", "token_uri": "t"}',
            "credentials",
        ),
        ('{"type": "authorized_user", "client_secret": "marked-secret"}', "refresh_token"),
        ('{"type": "external_account"}', "credentials"),
        ('{"type": "impersonated_service_account"}', "something is missing"),
    ],
)
def test_files_that_are_none(clean_google: Clean, tmp_path: Path, content: str | None, words: str) -> None:
    """What is named and cannot be used is an error: reading anonymously instead would explain nothing."""
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    clean_google.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    with pytest.raises(AuthFailed) as caught:
        find_identity({})
    assert words in str(caught.value)
    assert "marked-secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_nobody(clean_google: Clean, caplog: pytest.LogCaptureFixture) -> None:
    clean_google.setattr(logs, "_process", logs.Once())
    for _ in range(2):
        found = find_identity({})
        assert found.credentials is None
        assert found.missed
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "anonymously" in caplog.text
    assert not find_identity({"token": "anon"}).missed
    with pytest.raises(AuthFailed, match="no application default"):
        find_identity({"token": "google_default"})


def test_silence_is_remembered(clean_google: Clean) -> None:
    clean_google.delenv("NO_GCE_CHECK")
    clean_google.setenv("GCE_METADATA_TIMEOUT", "0.2")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        clean_google.setenv("GCE_METADATA_IP", f"127.0.0.1:{listening.getsockname()[1]}")
        started = time.monotonic()
        assert find_identity({}).missed
        assert time.monotonic() - started > 0.35
        listening.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:  # both attempts; the kernel took them
                listening.accept()[0].close()
        assert find_identity({}).missed
        with pytest.raises(BlockingIOError):
            listening.accept()


def test_an_answer_of_another_server_is_none(clean_google: Clean, origin: Any) -> None:
    clean_google.delenv("NO_GCE_CHECK")
    clean_google.setenv("GCE_METADATA_HOST", origin.base.removeprefix("http://"))
    assert find_identity({}).missed


def test_one_that_has_answered_is_believed_when_it_is_down(gce_metadata: GceMetadata) -> None:
    assert not find_identity({}).missed
    gce_metadata.broken = True
    assert find_identity({}).name == "metadata server"


@pytest.mark.parametrize(
    ("value", "expected"),
    [("", ""), ("default", ""), ("h:1", "http://h:1"), ("http://h:1/", "http://h:1"), ("https://h", "https://h")],
)
def test_the_emulator(clean_google: Clean, value: str, expected: str) -> None:
    clean_google.setenv("STORAGE_EMULATOR_HOST", value)
    assert emulator() == expected
