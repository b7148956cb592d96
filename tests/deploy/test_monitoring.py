"""deploy/monitoring: dashboards and alerts ask for figures that the service and jobs really have."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import wds_async as wds
from tests.deploy.tools import DEPLOY, DOCKER, mapping, run, script, tool
from tests.servers import Origin, make_shard
from wds_async.observe import metrics_server

MONITORING = DEPLOY / "monitoring"
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
RULES = yaml.safe_load((MONITORING / "rules.yaml").read_text(encoding="utf-8"))
TESTS = yaml.safe_load((MONITORING / "rules_test.yaml").read_text(encoding="utf-8"))
TARGETS = {"instance", "job", "le"}
"""Labels that Prometheus adds, and that of a histogram."""
VARIABLES = {"$__rate_interval": "5m", "$instance": ".*"}


class _NoPlans(list[object]):
    """The plans of a service that has none."""

    fetched_bytes = 0

    def as_list(self, *_: object) -> list[object]:
        return []


def expressions() -> Iterator[tuple[str, str]]:
    """Each expression with the place it is at; Grafana's variables filled in."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            text = target["expr"]
            for name, value in VARIABLES.items():
                text = text.replace(name, value)
            yield f"panel {panel['title']!r}", text
    for group in RULES["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Every series that a service and a job show on /metrics, by name, with the names of its labels."""
    from prometheus_client.parser import text_string_to_metric_families

    monkeypatch.setenv("WDS_METRICS_PORT", "0")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    found: dict[str, set[str]] = {}
    for text in (service_page(), job_page()):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def service_page() -> str:
    """/metrics of a service that has done a little of everything."""
    from wds_async.observe.cost_limit import ServiceCostLimit
    from wds_async.observe.prices import PriceTable
    from wds_async.service.cache.entries import CacheStats
    from wds_async.service.config import ServiceConfig
    from wds_async.service.metrics import Meters
    from wds_async.service.pages import metrics_page
    from wds_async.transfer.traffic import Traffic

    traffic, meters = Traffic(), Meters()
    traffic.of("s3://bucket").requests += 1
    meters.served("ais", 200, 0.01, 100, "s3://bucket/x.tar")
    meters.refused("forbidden")
    plans = _NoPlans()
    seen = SimpleNamespace(
        config=ServiceConfig(), cache=SimpleNamespace(statistics=CacheStats), fetcher=SimpleNamespace(held_bytes=0),
        traffic=traffic, plans=plans, cost_limit=ServiceCostLimit(traffic, PriceTable.load(None)), meters=meters,
        readiness=SimpleNamespace(why_not=""), peers=None, orders=plans,
    )  # fmt: skip
    return metrics_page(seen).decode()


def job_page() -> str:
    """/metrics of a training job, asked of one while it runs."""
    with Origin() as origin:
        url = origin.add("shard-0.tar", make_shard({"a": {"txt": b"a"}, "b": {"txt": b"b"}}))
        try:
            for _ in wds.WebDataset(url, shardshuffle=False):
                host, port = metrics_server.address() or ("nowhere", 0)
                with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=20) as answer:
                    return str(answer.read(), "utf-8")
        finally:
            metrics_server.stop()
    raise AssertionError("no sample came")


def test_every_figure_that_is_asked_for_is_there(live: dict[str, set[str]]) -> None:
    for place, text in expressions():
        asked = set(re.findall(r"\b(wds_[a-z_]+|up)\b", text)) - {"up"}
        assert asked <= set(live), f"{place}: {sorted(asked - set(live))}"
        for name in asked:
            selectors = re.findall(rf"{name}{{([^}}]*)}}", text)
            labels = {part.split("=")[0].strip(" !~") for one in selectors for part in one.split(",")}
            assert labels <= live[name] | TARGETS, f"{place}: {name} has no {sorted(labels - live[name])}"
        grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", text) for label in group.split(",")}
        assert grouped <= set().union(TARGETS, *(live[name] for name in asked)), place


def test_every_figure_is_shown(live: dict[str, set[str]]) -> None:
    """But for what the dashboard leaves out on purpose."""
    left_out = {
        "wds_build_info", "wds_cost_limit_dollars", "wds_cache_coalesced_total", "wds_cache_passed_bytes_total",
        "wds_cache_stale_total", "wds_cache_revalidations_total", "wds_cache_distrusted_total",
        "wds_cache_scrubbed_bytes_total", "wds_cache_free_bytes", "wds_cache_keep_free_bytes",
        "wds_epochs_total", "wds_read_seconds_total",
    }  # fmt: skip
    shown = " ".join(text for _, text in expressions())
    families = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in live if name.startswith("wds_")}
    missing = {name for name in families if name not in shown}
    assert missing <= left_out, sorted(missing - left_out)


def test_promtool_reads_them(tmp_path: Path) -> None:
    promtool = tool("promtool")
    run(promtool, "check", "rules", MONITORING / "rules.yaml")
    records = [{"record": f"panel:{i}", "expr": text} for i, (_, text) in enumerate(expressions())]
    asked = tmp_path / "panels.yaml"
    asked.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": records}]}), encoding="utf-8")
    assert f"{len(records)} rules found" in run(promtool, "check", "rules", asked)


def test_promtool_finds_a_mistake(tmp_path: Path) -> None:
    asked = tmp_path / "wrong.yaml"
    asked.write_text("groups: [{name: a, rules: [{record: x, expr: 'rate(wds_clients'}]}]", encoding="utf-8")
    with pytest.raises(AssertionError, match="unclosed left parenthesis"):
        run(tool("promtool"), "check", "rules", asked)


def test_alerts_fire_when_they_should() -> None:
    run(tool("promtool"), "test", "rules", MONITORING / "rules_test.yaml")


def test_the_demo_scrapes_and_shows() -> None:
    """Prometheus and Grafana of docker/compose.yaml: each asks for what the other end has, where it is mounted."""
    config = mapping(DOCKER / "demo" / "prometheus.yaml")
    run(tool("promtool"), "check", "config", "--syntax-only", DOCKER / "demo" / "prometheus.yaml")
    services = mapping(DOCKER / "compose.yaml")["services"]
    asked = [target for job in config["scrape_configs"] for one in job["static_configs"] for target in one["targets"]]
    assert asked == ["serve:51080", "trainer:9464", "trainer:9465"]
    assert "--nproc-per-node=2" in services["trainer"]["command"]
    mounts = {mount.split(":")[1] for name in ("prometheus", "grafana") for mount in services[name]["volumes"]}
    assert set(config["rule_files"]) <= mounts
    (provider,) = mapping(DOCKER / "demo" / "grafana" / "dashboards.yaml")["providers"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in mounts
    assert Path(home).parent.as_posix() == provider["options"]["path"]
    (source,) = mapping(DOCKER / "demo" / "grafana" / "datasource.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"


def test_every_alert_is_tested_and_says_what_to_do() -> None:
    alerts = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"]}
    fired = {one["alertname"] for test in TESTS["tests"] for one in test["alert_rule_test"] if one["exp_alerts"]}
    assert fired == set(alerts)
    for rule in alerts.values():
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert {"summary", "description"} == set(rule["annotations"])


def test_the_dashboard_is_one() -> None:
    panels: list[dict[str, Any]] = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert DASHBOARD["uid"] == "wds-async"
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, f"{panel['title']} lies over another panel"
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert panel["fieldConfig"]["defaults"]["unit"]


def test_what_is_made_is_made_of_what_is_here() -> None:
    """`python deploy/render.py` makes prometheusrule.yaml and cloud-init's files."""
    for path, text in script(DEPLOY / "render.py").rendered().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is behind: python deploy/render.py"
    assert yaml.safe_load((MONITORING / "prometheusrule.yaml").read_text(encoding="utf-8"))["spec"] == RULES
