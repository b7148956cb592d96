"""Who is let in and by which name; the audit log: one line a refusal, no secrets, and no flood."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import ssl
from pathlib import Path

import pytest
import trustme

from wds_async.errors import ConfigError
from wds_async.service.auth import LINES_AT_ONCE, Access, Audit, BearerTokens, common_name, token_of
from wds_async.service.cache.origin import Client
from wds_async.service.config import ServiceConfig
from wds_async.service.refusals import Refusal, shown_path

REFUSAL = Refusal(403, "not allowed: gs://bucket/x", "forbidden")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "wds_async.audit")
    return caplog


def test_a_line_says_who_what_and_why(lines: pytest.LogCaptureFixture) -> None:
    Audit(lambda: 0.0).refused(REFUSAL, peer="10.0.0.1", client="job-1", method="GET", path="/gs/bucket/x?a=b")
    assert lines.messages == [
        "refused peer=10.0.0.1 client=job-1 method=GET path=/gs/bucket/x?a=b status=403 reason=forbidden: "
        "not allowed: gs://bucket/x"
    ]
    assert lines.records[0].audit["status"] == 403  # type: ignore[attr-defined]


def test_a_flood_is_counted_and_not_written(lines: pytest.LogCaptureFixture) -> None:
    now = 0.0
    audit = Audit(lambda: now)
    for _ in range(LINES_AT_ONCE + 1000):
        audit.refused(REFUSAL, peer="10.0.0.1")
    assert len(lines.messages) == LINES_AT_ONCE
    assert audit.left_out == 1000
    now = 0.1
    audit.refused(REFUSAL, peer="10.0.0.1")
    assert lines.messages[-1].endswith("(1000 refusals before it were left out)")
    assert audit.left_out == 0
    audit.refused(REFUSAL, peer="10.0.0.1")
    audit.close()
    audit.close()
    assert lines.messages[-1] == "refused: 1 more that were left out"
    assert len(lines.messages) == LINES_AT_ONCE + 2


def test_nobody_writes_lines_of_their_own(lines: pytest.LogCaptureFixture) -> None:
    Audit(lambda: 0.0).refused(
        Refusal(400, "no\nrefused peer=1.1.1.1", "name"),
        peer="10.0.0.1",
        client="a status=200\nrefused",
        method="GET\r\nX",
        path="/gs/b/%0Arefused%20peer=9.9.9.9",
    )
    assert len(lines.messages) == 1
    assert "\n" not in lines.messages[0]
    assert "\r" not in lines.messages[0]
    assert " status=200" not in lines.messages[0]
    assert " peer=9.9.9.9" not in lines.messages[0]


@pytest.mark.parametrize(
    "path",
    ["/url/https://host/x?X-Amz-Signature=SECRET&y=1", "/url/https%3A%2F%2Fhost%2Fx%3FX-Amz-Signature%3DSECRET",
     "/url/https%253A%252F%252Fhost%252Fx%253Fsig%253DSECRET", "/url/https%3A%2F%2Fuser%3ASECRET%40host%2Fx",
     "/url/https%3A%2F%2Fan%20other%3ASECRET%40host%2Fx", "/s3/b/o?X-Amz-Credential=SECRET"],
)  # fmt: skip
def test_paths_are_shown_without_their_secrets(path: str) -> None:
    assert "SECRET" not in shown_path(path)
    assert "host" in shown_path(path) or "/s3/b/o" in shown_path(path)


def test_paths_are_shown_as_they_came_and_not_whole() -> None:
    assert shown_path("/gs/b/a%20b%252F") == "/gs/b/a%20b%252F"
    assert len(shown_path("/gs/b/" + "a" * 100_000)) <= 401
    assert shown_path("/gs/b/" + "%0a" * 100_000).isprintable()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text("# ours\nalpha-secret team-a\n\nbeta-secret\n")
    return path


def test_without_tokens_everybody_has_a_name() -> None:
    access = Access(ServiceConfig())
    assert access.client({}, "10.0.0.1") == Client("", "10.0.0.1")
    assert access.client({}, "", local=True) == Client("", "local")
    assert access.client({"wds-client": "job-1/0"}, "10.0.0.1") == Client("", "job-1/0")


@pytest.mark.parametrize("name", ["", " ", "a b", "a\tb", "ü", "a" * 129, "a\r\nb"])
def test_names_that_are_none(name: str) -> None:
    assert Access(ServiceConfig()).client({"wds-client": name}, "10.0.0.1").name == "10.0.0.1"


def test_tokens_name_tenants_and_keep_their_clients_apart(file: Path) -> None:
    access = Access(ServiceConfig(tokens=str(file)))
    assert access.client(bearer("alpha-secret"), "10.0.0.1") == Client("team-a", "10.0.0.1")
    assert access.client(bearer("beta-secret"), "10.0.0.1") == Client("", "10.0.0.1")
    named = {**bearer("alpha-secret"), "wds-client": "job"}
    assert access.client(named, "10.0.0.1") == Client("team-a", "job")
    pretended = {**bearer("beta-secret"), "wds-client": "team-a/job"}
    assert access.client(pretended, "10.0.0.1") == Client("", "team-a/job")


@pytest.mark.parametrize(
    "fields",
    [{}, bearer(""), bearer("alpha"), bearer("alpha-secret "[:-2]), bearer("#"), {"authorization": "alpha-secret"},
     {"authorization": "Basic !!!"}, {"authorization": "Bearer"}, bearer("# ours"), bearer("team-a")],
)  # fmt: skip
def test_who_has_no_token_is_told_so(file: Path, fields: dict[str, str]) -> None:
    with pytest.raises(Refusal) as caught:
        Access(ServiceConfig(tokens=str(file))).client(fields, "10.0.0.1", local=True)
    assert (caught.value.status, caught.value.reason) == (401, "token")
    assert caught.value.headers["WWW-Authenticate"].startswith("Bearer")


def test_the_other_ways_to_bring_a_token(file: Path) -> None:
    access = Access(ServiceConfig(tokens=str(file)))
    basic = base64.b64encode(b"any:alpha-secret").decode()
    signed = (
        "AWS4-HMAC-SHA256 Credential=alpha-secret/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
    )
    for fields in (
        {"authorization": f"basic {basic}"},
        {"authorization": signed},
        {"authorization": "AWS alpha-secret:x"},
    ):
        assert access.client(fields, "p").tenant == "team-a"
    assert access.client({}, "p", query={"X-Amz-Credential": "alpha-secret/2026/r/s3/aws4_request"}).tenant == "team-a"
    assert token_of({"authorization": "Bearer x"}, {"X-Amz-Credential": "alpha-secret"}) == "x"


def test_one_peer_cannot_be_thousands() -> None:
    clock = Clock()
    access = Access(ServiceConfig(), clock)
    names = {access.client({"wds-client": f"job-{i}"}, "10.0.0.1").name for i in range(1000)}
    assert len(names) == 513
    assert "10.0.0.1" in names
    assert access.client({"wds-client": "job-3"}, "10.0.0.1").name == "job-3", "those that it has it keeps"
    assert access.client({"wds-client": "job-999"}, "10.0.0.2").name == "job-999"
    clock.now = 61.0
    assert access.client({"wds-client": "job-999"}, "10.0.0.1").name == "job-999", "others have gone meanwhile"


def test_figures_are_a_tenants_own_where_there_are_tenants(file: Path, tmp_path: Path) -> None:
    (one := tmp_path / "one").write_text("alpha\nbeta\n")
    client = Client("team-a", "job")
    assert Access(ServiceConfig()).sees(client) is None
    assert Access(ServiceConfig(tokens=str(one))).sees(Client("", "job")) is None
    assert Access(ServiceConfig(tokens=str(file))).sees(client) == "team-a"
    assert Access(ServiceConfig(tokens=str(file))).sees(Client("", "job")) == ""


def test_certificates_name_tenants() -> None:
    certificate = {"subject": ((("organizationName", "x"),), (("commonName", "trainer-7"),))}
    assert Access(ServiceConfig()).client({}, "10.0.0.1", certificate=certificate) == Client("trainer-7", "10.0.0.1")
    assert common_name({"subject": ((("commonName", "a\nb"),),)}) == ""
    assert common_name({}) == common_name(None) == ""


def test_the_file_is_read_again_when_it_has_changed(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    tokens = BearerTokens(str(file), clock)
    assert tokens.tenant("alpha-secret") == "team-a"
    new = file.with_name("new")
    new.write_text("gamma-secret team-c\n")
    os.replace(new, file)
    assert tokens.tenant("gamma-secret") is None, "it is looked at once a second"
    clock.now = 1.0
    assert tokens.tenant("gamma-secret") == "team-c"
    assert tokens.tenant("alpha-secret") is None, "and what was taken out is known no more"
    file.unlink()
    clock.now = 2.0
    with caplog.at_level(logging.ERROR):
        assert tokens.tenant("gamma-secret") == "team-c"
    assert "those of before" in caplog.text
    file.write_text("one two three\n")
    clock.now = 3.0
    assert tokens.tenant("gamma-secret") == "team-c"
    file.write_text("")
    clock.now = 4.0
    assert tokens.tenant("gamma-secret") is None


@pytest.mark.parametrize("content", ["one two three\n", b"\xff\xfe"])
def test_files_that_cannot_be_used(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "tokens"
    with pytest.raises(ConfigError, match="tokens"):
        Access(ServiceConfig(tokens=str(path)))
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match="tokens"):
        Access(ServiceConfig(tokens=str(path)))


def secured(folder: Path, name: str = "localhost", *, mutual: bool = False) -> ServiceConfig:
    authority = trustme.CA()
    pair = authority.issue_cert(name)
    key, certificate, root = folder / "key.pem", folder / "cert.pem", folder / "ca.pem"
    pair.private_key_pem.write_to_path(key)
    certificate.write_bytes(b"".join(blob.bytes() for blob in pair.cert_chain_pems))
    authority.cert_pem.write_to_path(root)
    return ServiceConfig(certificate=str(certificate), key=str(key), client_ca=str(root) if mutual else "")


def test_tls_and_mutual_tls(tmp_path: Path) -> None:
    assert Access(ServiceConfig()).tls() is None
    plain = Access(secured(tmp_path))
    context = plain.tls()
    assert context is plain.tls()
    assert context is not None
    assert context.verify_mode == ssl.CERT_NONE
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    mutual = Access(secured(tmp_path, mutual=True)).tls()
    assert mutual is not None
    assert mutual.verify_mode == ssl.CERT_REQUIRED
    with pytest.raises(ConfigError, match="TLS"):
        Access(ServiceConfig(certificate=str(tmp_path / "none"), key=str(tmp_path / "key.pem")))


def name_served(context: ssl.SSLContext) -> bytes:
    """The certificate that ``context`` shows, by a handshake in memory."""
    server_in, server_out, client_in, client_out = (ssl.MemoryBIO() for _ in range(4))
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    server = context.wrap_bio(server_in, server_out, server_side=True)
    client = trusting.wrap_bio(client_in, client_out)
    for _ in range(4):
        for side in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
            server_in.write(client_out.read())
            client_in.write(server_out.read())
    found = client.getpeercert(binary_form=True)
    assert found is not None
    return found


def test_a_renewed_certificate_is_shown_from_then_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    access = Access(secured(tmp_path))
    context = access.tls()
    assert context is not None
    before = name_served(context)
    assert not access.renew()
    (tmp_path / "key.pem").write_text("half a pair\n")
    with caplog.at_level(logging.ERROR):
        assert not access.renew()
    assert "goes on" in caplog.text
    assert name_served(context) == before
    secured(tmp_path)
    assert access.renew()
    assert name_served(context) != before
    assert not access.renew()
