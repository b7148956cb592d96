"""What a service answers to requests of every sort, the broken ones too."""

from __future__ import annotations

import json
import logging
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin
from tests.service.serving import Inside, ask, asked, spoken
from tests.transfer.reading import data
from wds_async.observe import doctor
from wds_async.service.cache.origin import Client
from wds_async.service.http_server import SERVER

BODY = data(70_000)


@pytest.fixture
def service(origin: Origin, serve: Callable[..., Inside]) -> Inside:
    origin.add("/d/x.tar", BODY)
    return serve(header_timeout_s=0.3)


def test_each_answer_has_a_line_that_says_whose_it_was(
    origin: Origin, serve: Callable[..., Inside], caplog: pytest.LogCaptureFixture
) -> None:
    origin.add("/d/x.tar", BODY)
    service = serve(folder="c")
    with caplog.at_level(logging.DEBUG, "wds_async.access"):
        for _ in range(2):  # from the origin, and from the disk
            assert ask(f"{service.base}/ais/b/x.tar", Wds_Client="job-7")[0] == 200
        service.stop()
    lines = [vars(record) for record in caplog.records if record.name == "wds_async.access"]
    assert [(line["api"], line["status"], line["client"]) for line in lines] == [("short", 200, "job-7")] * 2


def test_errors_are_aistores_json(service: Inside) -> None:
    status, fields, body = ask(f"{service.base}/v1/objects/b/nope")
    said = json.loads(body)
    assert (status, said["status"], said["method"], said["url_path"]) == (404, 404, "GET", "/v1/objects/b/nope")
    assert "ais://b/nope does not exist" in said["message"]
    assert fields["content-type"].startswith("application/json")
    assert fields["server"] == SERVER
    status, fields, body = ask(f"{service.base}/v1/objects/b/nope", "HEAD")
    assert (status, body, json.loads(fields["hdr-error"])["status"]) == (404, b"", 404)


def test_errors_below_s3_are_xml(service: Inside) -> None:
    status, fields, body = ask(f"{service.base}/s3/b/nope")
    assert (status, fields["content-type"].startswith("application/xml")) == (404, True)
    assert ET.fromstring(body).findtext("Code") == "NoSuchKey"


@pytest.mark.parametrize(
    ("path", "status"),
    [("/", 404), ("/nothing", 404), ("/v1/nothing", 404), ("/v1/ml/moss", 501), ("/v1/ml/moss/b?provider=ais", 501),
     ("/v1/objects/b", 400), ("/v1/objects/b/%zz", 400), ("/v1/objects/b/x?provider=moon", 400),
     ("/gs/other/x", 403), ("/v1/objects/../../etc/passwd", 400), ("/url/file%3A%2F%2F%2Fetc%2Fpasswd", 400),
     ("//etc/passwd", 404)],
)  # fmt: skip
def test_what_is_nothing_here(service: Inside, path: str, status: int) -> None:
    found, _, body = ask(f"{service.base}{path}")
    assert found == status, body


def test_pages_for_operators(service: Inside) -> None:
    assert ask(f"{service.base}/healthz")[::2] == (200, b"alive\n")
    assert ask(f"{service.base}/readyz")[::2] == (200, b"ready\n")
    assert ask(f"{service.base}/v1/health")[::2] == (200, b"")
    ask(f"{service.base}/ais/b/x.tar")
    assert b'wds_requests_total{api="short",code="200"} 1.0' in ask(f"{service.base}/metrics")[2]
    stats = json.loads(ask(f"{service.base}/v1/stats")[2])
    assert stats["ready"] is True
    assert stats["counters"]["client_bytes"] >= len(BODY)


def test_a_tenant_neither_sees_nor_touches_what_is_anothers(origin: Origin, tmp_path: Path) -> None:
    for path in ("/d/x.tar", "/d/y.tar"):
        origin.add(path, BODY)
    origin.behave(path="/d/broken.tar", status=403)
    tokens = tmp_path / "tokens"
    tokens.write_text("alpha vision\nbeta\n")
    vision, other = {"Authorization": "Bearer alpha"}, {"Authorization": "Bearer beta", "Wds_Client": "vision/job"}
    buckets, quotas = {"b": f"{origin.base}/d/"}, {"vision": 0.5}
    with Inside(buckets=buckets, folder=tmp_path / "c", tokens=str(tokens), quotas=quotas) as service:

        def stats(**fields: str) -> dict[str, Any]:
            found: dict[str, Any] = json.loads(ask(f"{service.base}/v1/stats", **fields)[2])
            return found

        service.context.meters.served("ais", 200, 5.0, 1, "s3://vision/slow.tar", Client("vision", "job"))
        plan = {"shards": ["ais://b/x.tar", "ais://b/y.tar"], "ahead": 1}
        assert ask(f"{service.base}/v1/plan", "POST", plan, **vision, Wds_Client="job")[0] == 200
        assert ask(f"{service.base}/ais/b/broken.tar", **vision, Wds_Client="job")[0] >= 400
        bodies = []
        for method, path, body, code in (("POST", "plan", {"position": 1}, 404), ("DELETE", "plan/job", None, 204)):
            status, _, answer = ask(f"{service.base}/v1/{path}", method, body, **other)
            assert status == code
            bodies.append(answer)
        assert ask(f"{service.base}/ais/b/x.tar", **vision)[0] == 200
        service.stored()
        assert ask(f"{service.base}/ais/b/x.tar", **other)[0] == 200
        assert ask(f"{service.base}/ais/b/x.tar", Authorization="Bearer none")[0] == 401
        assert ask(f"{service.base}/healthz")[0] == 200
        theirs, own = stats(**other), stats(**vision)
        everything = doctor.fetch_stats(f"unix:{tmp_path}/c/control.sock")
    assert [theirs[name] for name in ("plans", "slowest", "errors")] == [[], [], []]
    assert not {"origins", "cost"} & {*theirs, *own}
    assert (theirs["tenant"], own["tenant"]) == ("", "vision")
    assert theirs["counters"] == {
        "client_bytes": len(BODY) + sum(len(one) for one in bodies),
        "client_requests": 3, "hit_bytes": len(BODY), "miss_bytes": 0, "ahead_bytes": 0, "errors": 0, "refusals": 1,
    }  # fmt: skip
    assert own["counters"]["hit_bytes"] + own["counters"]["miss_bytes"] == len(BODY)
    assert [own["counters"][name] for name in ("errors", "refusals", "client_requests")] == [1, 1, 4]
    assert set(own["gauges"]) == {"cache_bytes", "cache_limit_bytes"}
    assert (own["gauges"]["cache_limit_bytes"], theirs["gauges"]["cache_limit_bytes"]) == (1 << 29, 1 << 30)
    assert own["gauges"]["cache_bytes"] > 0
    assert theirs["gauges"]["cache_bytes"] == 0
    assert [plan["client"] for plan in everything["plans"]] == ["vision/job"]
    assert everything["counters"]["refusals"] == 3
    assert origin.base in everything["origins"]
    assert [plan["client"] for plan in own["plans"]] == ["job"]
    assert own["slowest"][0]["url"] == "s3://vision/slow.tar"
    assert [error["url"] for error in own["errors"]] == [f"{origin.base}/d/broken.tar"]


def test_plans(service: Inside, origin: Origin) -> None:
    url, plan = f"{service.base}/v1/plan", {"shards": ["ais://b/x.tar"], "ahead": 4}
    status, _, body = ask(url, "POST", plan, Wds_Client="job-1")
    assert (status, json.loads(body)["shards"]) == (200, 1)
    assert json.loads(ask(f"{service.base}/v1/stats")[2])["plans"][0]["client"] == "job-1"
    assert ask(f"{url}/job-1", "DELETE", Wds_Client="job-1")[0] == 204
    assert json.loads(ask(f"{service.base}/v1/stats")[2])["plans"] == []
    assert ask(url, "POST", b"no json")[0] == 400
    assert ask(url, "POST", b"[" * 100_000)[0] == 400
    assert ask(url, "POST", b" " * (1 << 20) + b"{}")[0] == 413
    assert ask(url)[0] in (404, 405)


def test_a_whole_url_as_a_target_is_its_path(service: Inside) -> None:
    assert spoken(service, asked("http://elsewhere:99/ais/b/x.tar", Connection="close")).endswith(BODY)


def test_what_was_sent_is_not_written_down(service: Inside, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "wds_async")
    spoken(service, b"GET /ais/b/x.tar HTTP/1.1\r\nHost: x\r\nMy Authorization: Bearer hush\r\n\r\n")
    assert "peer=127.0.0.1 status=400 reason=malformed: a malformed request: HttpParserError" in caplog.text
    assert "hush" not in caplog.text
    assert "Traceback" not in caplog.text
    assert service.context.meters.refusals == 1


def test_a_body_that_never_comes_is_not_waited_for(service: Inside) -> None:
    head = b"POST /v1/plan HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{"
    assert spoken(service, head).startswith(b"HTTP/1.1 408")


def test_older_clients(service: Inside, origin: Origin) -> None:
    assert spoken(service, b"GET /ais/b/x.tar HTTP/1.0\r\n\r\n").endswith(BODY)
    origin.add("/d/y.tar", BODY)
    origin.behave(path="/d/y.tar", ignore_range=True, chunked=True)
    got = spoken(service, b"GET /ais/b/y.tar HTTP/1.0\r\n\r\n")
    assert got.endswith(BODY)  # and no chunks, which HTTP/1.0 has not


def test_what_the_service_itself_breaks_is_500_without_words_of_it(
    service: Inside, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("/home/me/secret")

    monkeypatch.setattr("wds_async.service.app.snapshot", broken)
    status, _, body = ask(f"{service.base}/v1/stats")
    assert (status, b"secret" in body) == (500, False)
    assert "GET /v1/stats failed" in caplog.text
