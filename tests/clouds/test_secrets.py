"""No secret in any output, and none sent to another origin: marked ones in every place, and all output searched."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin

MARK = "HuShHuSh"
LEAKS = Path(__file__).with_name("leaks.py")
ROOT = Path(__file__).parents[2]
KEY = base64.b64encode(MARK.encode() * 4).decode()


def _forms() -> set[str]:
    """The mark as it is, and in the encodings in which it is sent."""
    forms = {MARK, KEY.rstrip("=")[:32]}
    for shift in range(3):  # wherever in base64's groups of three it begins
        forms.add(base64.b64encode(b" " * shift + MARK.encode() * 2).decode()[4:16])
    return forms


FORMS = _forms()


@pytest.fixture
def other() -> Iterator[Origin]:
    """Another origin, which is redirected to."""
    with Origin() as running:
        yield running


def _environment(origin: Origin, tmp_path: Path) -> dict[str, str]:
    """Everything that reads secrets, leading to one server."""
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine 127.0.0.1 login me password {MARK}netrc\n")
    netrc.chmod(0o600)
    hidden = ("AWS_", "GOOGLE_", "AZURE_", "HF_", "AIS_", "WDS_", "STORAGE_EMULATOR")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "HOME": str(tmp_path),
        "WDS_LOG": "debug",
        "GOPEN_VERBOSE": "1",
        "WDS_TIMEOUT": "1",
        "WDS_RETRIES": "2",
        "WDS_CACHE": str(tmp_path / "cache"),
        "AWS_ENDPOINT_URL": origin.base,
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": f"{MARK}aws",
        "AWS_SESSION_TOKEN": f"{MARK}session",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "STORAGE_EMULATOR_HOST": origin.base,
        "NO_GCE_CHECK": "true",
        "AZURE_STORAGE_CONNECTION_STRING": (
            f"DefaultEndpointsProtocol=http;AccountName=acct;AccountKey={KEY};BlobEndpoint={origin.base}/acct"
        ),
        "HF_TOKEN": f"hf_{MARK}",
        "HF_ENDPOINT": origin.base,
        "AIS_ENDPOINT": origin.base,
        "AIS_AUTHN_TOKEN": f"{MARK}ais",
        "NETRC": str(netrc),
    }


def _jobs(origin: Origin) -> list[dict[str, Any]]:
    host = origin.base.removeprefix("http://")
    return [
        {"name": "s3", "url": "s3://bucket/x.tar"},
        {"name": "s3 options", "url": "s3://bucket/x.tar", "options": {"key": "AKIAOTHER", "secret": f"{MARK}option"}},
        {"name": "gs", "url": "gs://bucket/x.tar", "options": {"gs": {"token": f"ya29.{MARK}"}}},
        {"name": "az", "url": "az://container/x.tar"},
        {"name": "az sas", "url": "az://container/x.tar",
         "options": {"account_name": "acct", "sas_token": f"sv=2021-08-06&sig={MARK}sas",
                     "connection_string": f"BlobEndpoint={origin.base}/acct;SharedAccessSignature=sv=2021&sig={MARK}"}},
        {"name": "hf", "url": "hf://datasets/owner/name/x.tar"},
        {"name": "ais", "url": "ais://bucket/x.tar"},
        {"name": "netrc", "url": f"{origin.base}/private/x.tar"},
        {"name": "basic", "url": f"http://me:{MARK}basic@{host}/private/x.tar"},
        {"name": "signed", "url": f"{origin.base}/private/x.tar?X-Amz-Signature={MARK}&X-Amz-Security-Token={MARK}"},
        {"name": "bearer", "url": f"{origin.base}/private/x.tar", "options": {"token": f"{MARK}bearer"}},
        {"name": "headers", "url": f"{origin.base}/private/x.tar",
         "options": {"http": {"headers": {"X-Api-Key": f"{MARK}header", "Authorization": f"Bearer {MARK}"}}}},
    ]  # fmt: skip


def _run(origin: Origin, tmp_path: Path, direct: str) -> str:
    done = subprocess.run(
        [sys.executable, str(LEAKS)],
        input=json.dumps(_jobs(origin)),
        env={**_environment(origin, tmp_path), "WDS_DIRECT": direct},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name in (job["name"] for job in _jobs(origin)):
        assert f"== {name}\n" in done.stdout
    return done.stdout + done.stderr


def _leaks(output: str) -> list[str]:
    return [line[:300] for line in output.splitlines() if any(form in line for form in FORMS)]


def _heard(origin: Origin) -> str:
    return "\n".join(f"{request.target} {request.headers}" for request in origin.requests)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("status", "direct"), [(403, "1"), (404, "0")])
def test_no_output_holds_a_secret(origin: Origin, tmp_path: Path, status: int, direct: str) -> None:
    origin.behave(status=status)
    output = _run(origin, tmp_path, direct)
    assert _leaks(output) == []
    # They were used, or this would show nothing.
    heard = _heard(origin)
    for used in ("AKIAEXAMPLE", "AKIAOTHER", "sig=", f"hf_{MARK}", f"{MARK}ais", f"ya29.{MARK}", f"{MARK}header"):
        assert used in heard, used
    for folder, _, names in os.walk(tmp_path / "cache"):
        for name in names:
            assert not any(form in name for form in FORMS), name
            assert not any(form.encode() in (Path(folder) / name).read_bytes() for form in FORMS), name


@pytest.mark.timeout(240)
@pytest.mark.parametrize("direct", ["1", "0"])
def test_no_other_origin_hears_one(origin: Origin, other: Origin, tmp_path: Path, direct: str) -> None:
    origin.behave(status=307, redirect=other.url("elsewhere.tar"))
    output = _run(origin, tmp_path, direct)
    assert _leaks(output) == []
    assert not [form for form in FORMS if form in _heard(other)]
    assert other.requests, "nobody followed the redirect"
