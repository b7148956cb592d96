"""A running service under attack: out of its folders, into its network, past its rules, and in disguise.

Names and rules have tests of their own (`test_names`, `test_allow`); these hold that they are asked, by everything that
takes a URL, and that nothing is sent where it may not go.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import socket
import ssl
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.servers import Origin
from tests.service.serving import Inside, Process, answers, ask, dial, spoken
from wds_async.service.cache.origin import Client

SECRET = b"SECRET" * 100
GOOD = b"good" * 1000


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder of shards, with secrets around it."""
    shards = tmp_path / "shards"
    shards.mkdir()
    (shards / "x.tar").write_bytes(GOOD)
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "shards-too").mkdir()
    (tmp_path / "shards-too" / "secret").write_bytes(SECRET)
    (shards / "link").symlink_to(tmp_path / "secret")
    (shards / "folder").symlink_to(tmp_path)
    return shards


def get(service: Inside | Process, target: str, **headers: str) -> tuple[int, bytes]:
    """The answer to a target that is sent as it is."""
    status, _, body = ask(service.base + target, **headers)
    return status, body


ESCAPES = (
    "../secret", "..%2fsecret", "%2e%2e/secret", "%2E%2E%2Fsecret", "%252e%252e%252fsecret", ".%2e/secret",
    "a/../../secret", "a/..%2f..%2fsecret", "./../secret", "..\\secret", "..%5csecret", "a%5c..%5c..%5csecret",
    "..%c0%afsecret", "%c0%ae%c0%ae/secret", "..%00/secret", "..%0a/secret", "..;/secret", "..%3b/secret",
    "../shards-too/secret", "link", "folder/secret", "folder/shards-too/secret", "/etc/passwd", "//etc/passwd",
    "%2fetc%2fpasswd", "x.tar/../../secret", "x.tar%00/../../secret", "~/secret", "file:///etc/passwd", "-",
    "pipe:cat%20../secret", "x.tar::file:///etc/passwd", "{..,x}/secret", "%24%7BHOME%7D/secret",
)  # fmt: skip
"""Ways out of a folder, as they would stand in a request."""


@pytest.mark.parametrize("named", [True, False], ids=["allow", "no allow"])
def test_no_path_leads_out_of_a_folder(disk: Path, named: bool) -> None:
    allow = (f"{disk}/",) if named else ()
    with Inside(allow=allow, buckets={"disk": f"{disk}/"}) as service:
        assert get(service, "/ais/disk/x.tar") == (200, GOOD)
        for escape in ESCAPES:
            absolute = urllib.parse.quote(f"{disk}/", safe="") + escape
            for target in (
                f"/ais/disk/{escape}",
                f"/v1/objects/disk/{escape}?provider=ais",
                f"/s3/disk/{escape}",
                f"/url/{absolute}",
                f"/url/file%3A%2F%2F{absolute}",
                f"/{escape}",
            ):
                status, body = get(service, target)
                assert 400 <= status < 500, (target, status)
                assert b"SECRET" not in body, target
                assert b"root:" not in body, target


def test_listings_lead_nowhere_else(disk: Path) -> None:
    with Inside(allow=(f"{disk}/",), buckets={"disk": f"{disk}/"}) as service:
        assert b"x.tar" in get(service, "/s3/disk?list-type=2")[1]
        for prefix in ("..%2f", "..%2fshards-too%2f", "folder%2f", "folder%2fshards-too%2f", "%2fetc%2f"):
            status, body = get(service, f"/s3/disk?list-type=2&prefix={prefix}")
            assert b"<Key>" not in body or b"secret" not in body, prefix
            assert b"secret" not in body, (prefix, status)


@pytest.fixture
def inner() -> Iterator[Origin]:
    """A server that only this machine should reach."""
    with Origin({"/latest/meta-data/iam": SECRET, "/x.tar": SECRET}) as found:
        yield found


class Names:
    """A name service: ``answers`` of a host are given one after the other, the last one for ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, list[list[str]]] = {}
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)

    def _look_up(self, host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        found = self.answers.get(host)
        if found is None:
            return self._real(host, port, *args, **kwargs)
        addresses = found.pop(0) if len(found) > 1 else found[0]
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (one, port, 0, 0))
            if ":" in one
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port))
            for one in addresses
        ]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


def by_url(service: Inside, url: str) -> tuple[int, bytes]:
    return get(service, "/url/" + urllib.parse.quote(url, safe=""))


@pytest.mark.parametrize("direct", [True, False], ids=["engine", "aiohttp"])
@pytest.mark.parametrize(
    "address", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "0.0.0.0", "10.0.0.1", "169.254.169.254", "fd00:ec2::254"]
)
def test_a_name_that_leads_inside_is_not_followed(inner: Origin, names: Names, address: str, direct: bool) -> None:
    names.answers["data.example"] = [[address]]
    base = f"http://data.example:{inner.port}/"
    with Inside(allow=(base,), transfer={"direct": direct}) as service:
        status, body = by_url(service, base + "latest/meta-data/iam")
        assert status == 403
        assert b"SECRET" not in body
    assert inner.connections == 0


@pytest.mark.parametrize("answers", [[["192.0.2.1", "127.0.0.1"]], [["127.0.0.1", "192.0.2.1"]]])
def test_one_bad_address_among_others(inner: Origin, names: Names, answers: list[list[str]]) -> None:
    names.answers["data.example"] = answers
    base = f"http://data.example:{inner.port}/"
    with Inside(allow=(base,), transfer={"connect_timeout_s": 0.2}) as service:
        assert by_url(service, base + "x.tar")[0] >= 400
    assert inner.connections == 0


def test_a_name_that_changes_its_mind(inner: Origin, names: Names) -> None:
    """DNS rebinding: what is judged is the address of each connection, not a name once."""
    names.answers["data.example"] = [["127.0.0.2"], ["127.0.0.1"]]
    base = f"http://data.example:{inner.port}/"
    with Inside(allow=(base,), private=True) as service:  # there, the only way to a first good answer without a network
        assert by_url(service, base + "x.tar")[0] in (200, 502, 504)
    before = inner.connections
    names.answers["data.example"] = [["192.0.2.1"], ["127.0.0.1"]]
    with Inside(allow=(base,), transfer={"connect_timeout_s": 0.2}) as service:
        assert by_url(service, base + "x.tar")[0] >= 400
        assert by_url(service, base + "x.tar")[0] >= 400
    assert inner.connections == before


def test_metadata_servers_are_never_asked_whatever_is_allowed(names: Names) -> None:
    names.answers["metadata.google.internal"] = [["169.254.169.254"]]
    with Inside(
        allow=("http://169.254.169.254/", "http://metadata.google.internal/", "http://[fd00:ec2::254]/"), private=True
    ) as service:
        for host in ("169.254.169.254", "metadata.google.internal", "[fd00:ec2::254]"):
            status, body = by_url(service, f"http://{host}/latest/meta-data/")
            assert status == 403, host
            assert b"metadata" in body


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0x7f000001", "0177.0.0.1", "localhost", "[::ffff:7f00:1]"])
def test_other_spellings_of_this_machine_are_other_hosts(origin: Origin, host: str) -> None:
    origin.add("x.tar", SECRET)
    with Inside(allow=(origin.base + "/",)) as service:
        status, body = by_url(service, f"http://{host}:{origin.port}/x.tar")
        assert status in (400, 403)
        assert b"SECRET" not in body
        assert by_url(service, origin.url("x.tar")) == (200, SECRET), "as it is named it may be read"


@pytest.mark.parametrize("direct", [True, False], ids=["engine", "aiohttp"])
def test_redirects_are_judged_like_first_urls(origin: Origin, inner: Origin, direct: bool) -> None:
    origin.add("data/x.tar", GOOD)
    origin.add("other/x.tar", SECRET)
    places = {
        "/data/in": "/latest/meta-data/iam",
        "/data/far": inner.url("x.tar"),
        "/data/metadata": "http://169.254.169.254/latest/meta-data/iam",
        "/data/out": origin.url("other/x.tar"),
        "/data/up": origin.base + "/data/%2e%2e/other/x.tar",
        "/data/file": "file:///etc/passwd",
        "/data/near": origin.url("data/x.tar"),
    }
    for path, place in places.items():
        origin.behave(path=path, redirect=place)
    with Inside(allow=(origin.base + "/data/",), transfer={"direct": direct}) as service:
        assert by_url(service, origin.url("data/near")) == (200, GOOD)
        for path in places:
            if path != "/data/near":
                status, body = by_url(service, origin.base + path)
                assert status >= 400, path
                assert b"SECRET" not in body
    assert inner.connections == 0
    assert not [one for one in origin.requests if "other" in one.path]


def test_without_allow_there_is_no_proxy(origin: Origin, disk: Path) -> None:
    origin.add("x.tar", SECRET)
    with Inside() as service:
        targets = [
            "/url/" + urllib.parse.quote(origin.url("x.tar"), safe=""),
            f"/url/http://127.0.0.1:{origin.port}/x.tar",
            "/v1/objects/b/o?provider=ht&original_url=" + urllib.parse.quote(origin.url("x.tar"), safe=""),
            f"/url/{disk}/x.tar",
            "/ais/anything/x.tar",
        ]
        for target in targets:
            status, body = get(service, target)
            assert status in (400, 403, 404), target
            assert b"SECRET" not in body
    assert origin.connections == 0


def test_a_proxys_own_form_is_not_answered(origin: Origin) -> None:
    """``GET http://host/ HTTP/1.1`` and CONNECT: what makes an open proxy."""
    origin.add("x.tar", SECRET)
    with Inside(allow=(origin.base + "/",)) as service:
        for method, target in (("GET", origin.url("x.tar")), ("CONNECT", f"127.0.0.1:{origin.port}")):
            request = f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            answer = spoken(service, request.encode())
            assert answer[9:10] in (b"4", b""), answer[:100]
            assert b"SECRET" not in answer
    assert origin.connections == 0


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:51080", 200),
        ("localhost.", 200),
        ("jobs.localhost:51080", 200),
        ("127.0.0.1:51080", 200),
        ("127.8.9.1", 200),
        ("0.0.0.0:51080", 200),
        ("[::1]", 200),
        ("[::1%lo]:51080", 200),
        ("[::ffff:127.0.0.1]:51080", 200),
        (socket.gethostname(), 200),
        ("", 200),  # HTTP allows it, and no browser sends it
        ("attacker.example", 403),
        ("attacker.example:51080", 403),
        ("localhost.attacker.example", 403),
        ("127.0.0.1.attacker.example", 403),
        ("10.1.2.3", 403),
        ("[fe80::1]:51080", 403),
    ],
)
def test_without_allow_and_tokens_only_local_hosts_are_answered(disk: Path, host: str, status: int) -> None:
    """A page whose name leads to 127.0.0.1 a moment later (DNS rebinding) is same-origin to its browser."""
    with Inside(buckets={"b": f"{disk}/"}) as service:
        found, body = get(service, "/ais/b/x.tar", Host=host)
        assert (found, body if found == 200 else b"") == (status, GOOD if status == 200 else b""), body
        for page in ("/healthz", "/readyz", "/metrics"):  # a kubelet and Prometheus ask by the pod's address
            assert get(service, page, Host=host)[0] == 200
        if status == 403:
            assert b"set one of the two" in body
            assert get(service, "/v1/plan", Host=host)[0] == 403
            for line, code in (
                (f"GET http://localhost:{service.port}/ais/b/x.tar HTTP/1.1\r\nHost: {host}", b"200"),
                (f"GET http://{host}/ais/b/x.tar HTTP/1.1\r\nHost: localhost", b"403"),
            ):
                assert spoken(service, f"{line}\r\nConnection: close\r\n\r\n".encode())[9:12] == code


@pytest.mark.parametrize("way", ["allow", "tokens", "socket"])
def test_other_hosts_are_answered_where_something_else_protects_the_service(
    disk: Path, tmp_path: Path, way: str
) -> None:
    (tmp_path / "tokens").write_text("right alice\n")
    settings = {
        "allow": {"allow": (f"{disk}/",)},
        "tokens": {"tokens": tmp_path / "tokens"},
        "socket": {"socket": tmp_path / "s"},
    }[way]
    with Inside(buckets={"b": f"{disk}/"}, **settings) as service, dial(service, local=way == "socket") as one:
        head = "GET /ais/b/x.tar HTTP/1.1\r\nHost: node-7.example\r\nAuthorization: Bearer right\r\n\r\n"
        one.sendall(head.encode())
        assert answers(one, "GET")[0][::2] == (200, GOOD)


@pytest.mark.parametrize("protected", [False, True])
@pytest.mark.parametrize(
    ("fields", "status"),
    [({}, 200), ({"Sec_Fetch_Site": "none"}, 200), ({"Sec_Fetch_Site": "same-origin"}, 200),
     ({"Origin": "http://localhost:51080"}, 200),
     ({"Origin": "https://LOCALHOST:51080", "Sec_Fetch_Site": "same-origin"}, 200),
     ({"Origin": "http://localhost:8888"}, 403), ({"Origin": "https://attacker.example"}, 403),
     ({"Origin": "null"}, 403), ({"Sec_Fetch_Site": "cross-site"}, 403), ({"Sec_Fetch_Site": "same-site"}, 403)],
)  # fmt: skip
def test_pages_of_other_sites_are_refused(disk: Path, fields: dict[str, str], status: int, protected: bool) -> None:
    """An <img>, a form or fetch() of any page can send requests to what its reader's machine reaches."""
    allow = (f"{disk}/",) if protected else ()
    with Inside(buckets={"b": f"{disk}/"}, allow=allow) as service:
        found, body = get(service, "/ais/b/x.tar", Host="localhost:51080", **fields)
        assert found == status
        plan = {"shards": ["ais://b/x.tar"]}
        assert ask(f"{service.base}/v1/plan", "POST", plan, Host="localhost:51080", **fields)[0] == status
        assert get(service, "/metrics", Host="localhost:51080", **fields)[0] == 200
        if status == 403:
            assert b"Open the URL itself" in body
            assert service.context.plans.as_list() == []


def test_what_a_page_sends_is_one_short_line_of_the_log(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    origin = "http://\x85\t\xff\u2028" + "x" * 8000
    with Inside(buckets={"b": f"{disk}/"}) as service, dial(service) as one:
        one.sendall(f"GET /s3/b/x.tar HTTP/1.1\r\nHost: localhost\r\nOrigin: {origin}\r\n\r\n".encode())
        assert answers(one, "GET")[0][0] == 403
    [line] = [record.getMessage() for record in caplog.records if record.name == "wds_async.audit"]
    assert line.isprintable()
    assert len(line) < 500


def test_plans_fetch_nothing_that_may_not_be_read(origin: Origin, inner: Origin, disk: Path, tmp_path: Path) -> None:
    origin.add("data/x.tar", GOOD)
    bad = [inner.url("x.tar"), f"{disk}/x.tar", "http://169.254.169.254/", origin.url("other"), "pipe:cat x"]
    with Inside(allow=(origin.base + "/data/",), folder=tmp_path / "cache") as service:
        status, _, _ = ask(service.base + "/v1/plan", "POST", {"shards": bad})
        assert status in (400, 403)
        status, _, body = ask(service.base + "/v1/plan", "POST", {"shards": [*bad, origin.url("data/x.tar")]})
        assert (status, json.loads(body)["shards"]) == (200, 6)
        origin.wait_until(lambda seen: any("data/x.tar" in one.path for one in seen.requests))
    assert inner.connections == 0
    assert {one.path for one in origin.requests} == {"/data/x.tar"}


def test_tokens_are_asked_of_everything_but_health(origin: Origin, tmp_path: Path) -> None:
    origin.add("x.tar", GOOD)
    tokens = tmp_path / "tokens"
    tokens.write_text("right-token team\n")
    target = "/url/" + urllib.parse.quote(origin.url("x.tar"), safe="")
    with Inside(allow=(origin.base + "/",), tokens=tokens, folder=tmp_path / "cache") as service:
        for _ in range(2):
            assert get(service, target, Authorization="Bearer right-token") == (200, GOOD)
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer right-token2"}):
                status, body = get(service, target, **headers)
                assert (status, b"good" in body) == (401, False), "also when it is cached"
        for path in ("/v1/buckets", "/s3", "/v1/buckets/b", "/v1/objects/b/o", "/v1/stats"):
            assert get(service, path)[0] == 401, path
        assert ask(service.base + "/v1/plan", "POST", {"shards": []})[0] == 401
        assert get(service, "/healthz")[0] == 200


def _authority(folder: Path) -> tuple[dict[str, str], trustme.CA]:
    """The files of a service whose clients need certificates, and who issues them."""
    authority = trustme.CA()
    pair = authority.issue_cert("localhost")
    files = {name: str(folder / name) for name in ("key", "certificate", "client_ca")}
    pair.private_key_pem.write_to_path(files["key"])
    pair.cert_chain_pems[0].write_to_path(files["certificate"])
    authority.cert_pem.write_to_path(files["client_ca"])
    return files, authority


def test_only_clients_of_the_authority_are_let_in(tmp_path: Path, disk: Path) -> None:
    (files, authority), stranger = _authority(tmp_path), trustme.CA()

    def read(known: trustme.CA | None) -> tuple[int, bytes]:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        if known is not None:
            known.issue_cert("trainer", common_name="trainer").configure_cert(context)
        connection = http.client.HTTPSConnection("localhost", service.port, context=context, timeout=20)
        try:
            connection.request("GET", "/ais/disk/x.tar")
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    with Inside(buckets={"disk": f"{disk}/"}, **files) as service:
        assert read(authority) == (200, GOOD)
        for known in (None, stranger):
            with pytest.raises(OSError):
                read(known)
        with socket.create_connection(("127.0.0.1", service.port), timeout=20) as connection:
            connection.sendall(b"GET /ais/disk/x.tar HTTP/1.1\r\nHost: x\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert b"good" not in connection.recv(65536), "nor without TLS"


@pytest.mark.parametrize("way", ["certificate", "certificate and token", "token"])
def test_cold_and_warm_a_client_is_the_same(way: str, origin: Origin, tmp_path: Path) -> None:
    """A client has the same name when a shard is cached as when it is not."""
    origin.add("x.tar", GOOD)
    settings: dict[str, Any] = {"buckets": {"b": origin.base}, "private": True, "client_requests": 1}
    context: ssl.SSLContext | None = None
    if "certificate" in way:
        files, authority = _authority(tmp_path)
        settings |= files
        context = ssl.create_default_context()
        authority.configure_trust(context)
        authority.issue_cert("trainer", common_name="trainer").configure_cert(context)
    if "token" in way:
        (tmp_path / "tokens").write_text("right alice\n")
        settings["tokens"] = tmp_path / "tokens"
    name = Client("alice" if "token" in way else "trainer", "127.0.0.1")

    def read() -> int:
        kind = http.client.HTTPConnection if context is None else http.client.HTTPSConnection
        more: dict[str, Any] = {} if context is None else {"context": context}
        connection = kind("127.0.0.1" if context is None else "localhost", service.port, timeout=20, **more)
        with contextlib.closing(connection):
            connection.request("GET", "/ais/b/x.tar", headers={"Authorization": "Bearer right"})
            answer = connection.getresponse()
            assert (answer.read() == GOOD) == (answer.status == 200)
            return answer.status

    with Inside(**settings, folder=tmp_path / "cache") as service:
        under_way = service.context.in_flight
        for _ in range(3):  # cold, warm, warm
            assert read() == 200
            assert len(origin.requests) == 1
            service.quiet()
            with under_way.one(name):
                assert read() == 429, "its one request is under way, by that name"
            service.quiet()


def test_each_refusal_is_a_line_without_secrets(origin: Origin, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "wds_async.audit")
    with Inside(allow=(origin.base + "/",)) as service:
        by_url(service, "https://elsewhere/x?X-Amz-Signature=VERYSECRET&a=b")
        get(service, "/gs/private/x.tar", Wds_Client="job-7")
    lines = [record.getMessage() for record in caplog.records if record.name == "wds_async.audit"]
    assert len(lines) == 2
    assert "VERYSECRET" not in "".join(lines)
    assert "elsewhere" in lines[0]
    for part in ("peer=127.0.0.1", "client=job-7", "method=GET", "path=/gs/private/x.tar", "status=403"):
        assert part in lines[1]


def test_what_is_no_name_a_write_and_too_much_are_lines_too(
    origin: Origin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "wds_async.audit")
    tokens = tmp_path / "tokens"
    tokens.write_text("right\n")
    with Inside(allow=(origin.base + "/",), tokens=tokens, client_requests=1, buckets={"b": origin.base}) as service:
        busy = service.context.in_flight.one(Client("", "busy"))
        busy.__enter__()
        proof = {"Authorization": "Bearer right"}
        asked = [
            (400, "GET", "/gs/b/%zz", proof), (401, "GET", "/gs/b/x", {}), (403, "GET", "/gs/b/x", proof),
            (404, "GET", "/ais/b/nothing", proof), (405, "PUT", "/gs/b/x", proof),
            (414, "GET", "/gs/b/" + "a" * 5000, proof), (416, "GET", "/ais/b/x", {**proof, "Range": "bytes=9-"}),
            (429, "GET", "/gs/b/x", {**proof, "Wds-Client": "busy"}),
        ]  # fmt: skip
        origin.add("x", b"12345")
        for status, method, target, headers in asked:
            assert ask(service.base + target, method, **headers)[0] == status, target[:50]
    lines = [record.audit["status"] for record in caplog.records if record.name == "wds_async.audit"]  # type: ignore[attr-defined]
    assert lines == [400, 401, 403, 405, 414, 429], "and not what is only not there"


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_is_written(origin: Origin, method: str) -> None:
    with Inside(allow=(origin.base + "/",)) as service:
        for path in ("/v1/objects/b/o?provider=aws", "/s3/b/o", "/gs/b/o", "/v1/buckets/b"):
            assert ask(service.base + path, method, b"x")[0] == 405, (method, path)
    assert origin.connections == 0


def test_strange_heads_end_where_they_begin(disk: Path) -> None:
    with Inside(buckets={"disk": f"{disk}/"}) as service:
        for raw in (
            b"GET /ais/disk/../secret HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            b"GET /ais/disk/..%2fsecret HTTP/1.0\r\n\r\n",
            b"GET //ais/disk/../../secret HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            b"GET \\..\\secret HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            b"GET /ais/disk/x.tar HTTP/1.1\r\nHost: x\r\nRange: bytes=0-5, 7-9\r\nConnection: close\r\n\r\n"
            b"GET /ais/disk/../secret HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET /ais/disk/" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x00" * 1000,
        ):
            assert b"SECRET" not in spoken(service, raw, end=True), raw[:60]
        assert get(service, "/ais/disk/x.tar") == (200, GOOD), "and it lives"


def test_a_real_process_keeps_its_credentials_and_its_machine(tmp_path: Path, disk: Path, inner: Origin) -> None:
    """The command itself, as an operator starts it: nothing of the above is a matter of the test's own set-up."""
    with Process(
        tmp_path / "run", allow=[f"{disk}/", "https://data.example/"], buckets={"disk": f"{disk}/"}
    ) as service:
        assert get(service, "/ais/disk/x.tar") == (200, GOOD)
        for target in (
            "/ais/disk/../secret",
            "/ais/disk/link",
            f"/url/http%3A%2F%2F127.0.0.1%3A{inner.port}%2Fx.tar",
            "/gs/private/x.tar",
        ):
            status, body = get(service, target)
            assert 400 <= status < 500, target
            assert b"SECRET" not in body
        connection = http.client.HTTPConnection("127.0.0.1", int(service.base.rpartition(":")[2]), timeout=20)
        connection.request("GET", "/metrics")
        assert b"wds_refusals_total" in connection.getresponse().read()
        connection.close()
    assert inner.connections == 0
    assert "refused " in service.said
