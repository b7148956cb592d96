"""``/v1/stats``: its form, its figures, and that it shows no secret."""

from __future__ import annotations

import json
from pathlib import Path

from tests.servers import Origin
from tests.service.serving import Inside, ask
from tests.transfer.reading import data

CONTENT = data(300_000)
FORM = {
    "counters": "client_bytes client_requests origin_bytes origin_requests origin_retries hedges hit_bytes miss_bytes "
    "ahead_bytes evictions errors refusals",
    "gauges": "clients connections window_bytes window_limit_bytes cache_bytes cache_limit_bytes entries",
    "cost": "dollars limit spent",
}


def test_form_and_figures(origin: Origin, tmp_path: Path) -> None:
    url = origin.add("a.tar", CONTENT)
    secret = f"{url}?sig=geheim"
    origin.behave(path="/broken.tar", status=403)
    with Inside(folder=tmp_path / "cache", allow=(f"{origin.base}/",), private=True, cost_limit=5.0) as service:
        for _ in range(2):
            assert ask(f"{service.base}/url/{secret.replace('/', '%2F').replace('?', '%3F')}")[0] == 200
        assert ask(f"{service.base}/url/{origin.url('broken.tar').replace('/', '%2F')}%3Ftoken=geheim")[0] >= 400
        status, fields, body = ask(f"{service.base}/v1/stats")
        plan = {"client": "job", "shards": [url], "ahead": 1}
        ask(f"{service.base}/v1/plan", "POST", plan)
        planned = json.loads(ask(f"{service.base}/v1/stats")[2])
    assert status == 200
    assert fields["content-type"].startswith("application/json")
    assert b"geheim" not in body
    said = json.loads(body)
    assert " ".join(said) == ("kind name version time uptime_s ready counters gauges slowest errors plans origins cost")
    assert {name: " ".join(said[name]) for name in FORM} == FORM
    assert (said["kind"], said["ready"]) == ("service", True)
    counters = said["counters"]
    assert counters["client_requests"] >= 3
    assert counters["client_bytes"] >= 2 * len(CONTENT)
    assert counters["origin_bytes"] >= len(CONTENT)
    assert counters["hit_bytes"] + counters["miss_bytes"] >= 2 * len(CONTENT)
    assert counters["refusals"] >= 1
    row = said["origins"][origin.base]
    assert row["requests"] == counters["origin_requests"]
    assert row["dollars"] == [0, 0]
    assert said["cost"] == {"dollars": [0, 0], "limit": 5.0, "spent": [0, 0]}
    assert {"url", "seconds", "bytes"} == set(said["slowest"][0])
    assert said["slowest"][0]["url"].startswith(origin.base)
    assert said["gauges"]["window_limit_bytes"] > 0
    (known,) = planned["plans"]
    assert {"client", "shards", "done", "ahead_bytes"} <= set(known)
    assert known["shards"] == 1


def test_a_fault_of_an_origin_is_among_the_errors(origin: Origin) -> None:
    origin.behave(path="/gone.tar", status=500)
    with Inside(allow=(f"{origin.base}/",), private=True) as service:
        assert ask(f"{service.base}/url/{origin.url('gone.tar').replace('/', '%2F')}")[0] == 502
        said = json.loads(ask(f"{service.base}/v1/stats")[2])
    assert said["counters"]["errors"] == 1
    (error,) = said["errors"]
    assert set(error) == {"time", "url", "error"}
    assert error["url"] == origin.url("gone.tar")
