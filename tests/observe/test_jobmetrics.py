"""A training job's own figures: every name, what they count with and without workers, and that nothing stays behind."""

from __future__ import annotations

import gc
import json
import logging
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import wds_async as wds
from tests.servers import Origin, make_shard
from wds_async.errors import ConfigError, MissingExtra
from wds_async.handlers import ignore_and_continue
from wds_async.observe import metrics_server
from wds_async.observe.cost_limit import limit_of_job
from wds_async.transfer.stats import Stats

ROOT = Path(__file__).parents[2]
SHARD = make_shard({f"{i:03}": {"bin": bytes(10_000)} for i in range(20)})
NAMES = """wds_samples_total wds_bad_samples_total wds_wait_seconds_total wds_read_seconds_total wds_read_bytes_total
wds_epochs_total wds_processes wds_window_bytes wds_window_limit_bytes wds_origin_requests_total wds_origin_bytes_total
wds_origin_retries_total wds_origin_throttled_total wds_origin_hedges_total wds_origin_errors_total
wds_origin_connections wds_origin_seconds_count wds_origin_seconds_sum wds_origin_seconds_bucket wds_cost_dollars
wds_cost_limit_dollars wds_build_info"""


@pytest.fixture(autouse=True)
def metrics(monkeypatch: Any) -> Iterator[None]:
    """Any port; nothing of it stays."""
    monkeypatch.setenv("WDS_METRICS_PORT", "0")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    yield
    metrics_server.stop()


def get(path: str) -> bytes:
    host, port = metrics_server.address() or ("nowhere", 0)
    with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=20) as answer:
        body: bytes = answer.read()
        return body


def values() -> dict[str, float]:
    """Of each name on the page the sum over its labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(get("/metrics").decode()):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def said() -> dict[str, Any]:
    stats: dict[str, Any] = json.loads(get("/v1/stats"))
    return stats


def urls(origin: Origin, count: int = 3) -> list[str]:
    return [origin.add(f"{i}.tar", SHARD) for i in range(count)]


def test_it_answers_from_the_first_iteration_on_if_the_variable_is_set(origin: Origin, monkeypatch: Any) -> None:
    dataset = wds.WebDataset(urls(origin), shardshuffle=False)
    assert metrics_server.address() is None
    next(iter(dataset))
    address = metrics_server.address()
    assert address is not None
    assert get("/healthz") == get("/healthz?x=1") == b"ok\n"
    with socket.create_connection(address):  # a client that sends nothing
        metrics_server.stop()
    with socket.create_server(address):  # the port is free
        pass
    monkeypatch.delenv("WDS_METRICS_PORT")
    list(wds.WebDataset(urls(origin), shardshuffle=False))
    assert metrics_server.address() is None


def test_what_is_no_page_and_what_fails(origin: Origin, monkeypatch: Any) -> None:
    next(iter(wds.WebDataset(urls(origin), shardshuffle=False)))
    monkeypatch.setattr(metrics_server, "origin_rows", lambda *_: 1 / 0)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get("/none")
    with pytest.raises(urllib.error.HTTPError, match="ZeroDivisionError; the job's log has more"):
        get("/v1/stats")
    assert get("/healthz") == b"ok\n"


def test_every_name_and_what_it_counts(origin: Origin, tmp_path: Path, monkeypatch: Any) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("origins: {'http://127.0.0.1': {internet: [0.5, 1]}}")
    monkeypatch.setenv("WDS_PRICES", str(prices))
    monkeypatch.setenv("WDS_COST_LIMIT", "7")
    origin.behave(path="/1.tar", status=503, times=1)
    dataset = wds.WebDataset([*urls(origin), "no.tar"], shardshuffle=False, handler=ignore_and_continue)
    assert sum(1 for _ in dataset) == 60
    found = values()
    assert set(NAMES.split()) <= set(found)
    assert found["wds_samples_total"] == 60
    assert found["wds_read_bytes_total"] == 3 * len(SHARD)
    assert found["wds_origin_bytes_total"] >= 3 * len(SHARD)
    assert found["wds_origin_requests_total"] >= 4
    assert found["wds_origin_retries_total"] >= 1
    assert found["wds_origin_throttled_total"] >= 1
    assert found["wds_origin_seconds_count"] >= 3
    assert found["wds_epochs_total"] == found["wds_processes"] == found["wds_build_info"] == 1
    assert found["wds_window_limit_bytes"] > 0
    assert found["wds_read_seconds_total"] > 0
    assert found["wds_cost_dollars"] == pytest.approx(1.5 * found["wds_origin_bytes_total"] / 1e9)
    assert found["wds_cost_limit_dollars"] == 7

    stats = said()
    names = "kind name version time uptime_s ready counters gauges origins slowest errors plans cost"
    assert " ".join(stats) == names
    assert (stats["kind"], stats["ready"], stats["cost"]["limit"]) == ("job", True, 7)
    assert stats["cost"]["dollars"][1] == pytest.approx(found["wds_origin_bytes_total"] / 1e9)
    assert stats["counters"]["samples"] == 60
    assert set(Stats().as_dict()) - set(stats["counters"]) == set(metrics_server._GAUGES) - {"processes"}
    assert stats["counters"]["origin_bytes"] == found["wds_origin_bytes_total"]
    (row,) = [row for name, row in stats["origins"].items() if name.startswith("http")]
    assert row["requests"] >= 4
    assert row["dollars"][0] == pytest.approx(row["bytes"] / 2e9)
    (error,) = stats["errors"]
    assert error["url"] == "no.tar"
    assert "ShardNotFound" in error["error"]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_count_in_their_parent(origin: Origin, method: str, tmp_path: Path, monkeypatch: Any) -> None:
    from torch.utils.data import DataLoader

    (tmp_path / "prices.yaml").write_text("origins: {'http://127.0.0.1': {internet: 1}}")
    monkeypatch.setenv("WDS_PRICES", str(tmp_path / "prices.yaml"))
    monkeypatch.setenv("WDS_COST_LIMIT", "9")
    dataset = wds.WebDataset(urls(origin, 4), shardshuffle=False)
    workers = 2 if method == "fork" else 1  # each imports torch anew
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=method)
    samples = iter(loader)
    next(samples)
    assert metrics_server.address() is not None  # the parent itself has read nothing
    assert sum(1 for _ in samples) == 79
    found = values()
    assert found["wds_samples_total"] == 80
    assert found["wds_epochs_total"] == workers
    del samples, loader
    limit = limit_of_job()
    assert limit is not None
    assert limit.spent() > 0  # what they have spent counts here too
    assert values()["wds_origin_bytes_total"] == said()["counters"]["origin_bytes"] >= 4 * len(SHARD)
    # What is gone stays counted, read by a collector of cycles or not.
    dataset.itself = dataset
    del dataset
    gc.collect()
    after = values()
    assert after["wds_samples_total"] == 80
    assert after["wds_origin_bytes_total"] >= 4 * len(SHARD)
    assert after["wds_window_limit_bytes"] == 0
    list(wds.WebDataset(urls(origin, 1), shardshuffle=False))
    assert values()["wds_samples_total"] == 100


def test_a_port_for_each_rank(origin: Origin, monkeypatch: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    monkeypatch.setenv("WDS_METRICS_PORT", str(free - 3))
    monkeypatch.setenv("LOCAL_RANK", "3")
    next(iter(wds.WebDataset(urls(origin), shardshuffle=False)))
    assert metrics_server.address() == ("127.0.0.1", free)


def test_addresses() -> None:
    assert metrics_server._where(9464) == ("127.0.0.1", 9464)
    assert metrics_server._where("0.0.0.0:9464") == ("0.0.0.0", 9464)
    assert metrics_server._where("[::1]:0") == ("::1", 0)
    for bad in ("70000", "x", "host:"):
        with pytest.raises(ConfigError, match="give no port"):
            metrics_server._where(bad)


def test_a_port_that_is_taken_costs_a_warning(origin: Origin, monkeypatch: Any, caplog: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, caplog.at_level(logging.WARNING, "wds_async"):
        port = server.getsockname()[1]
        monkeypatch.setenv("WDS_METRICS_PORT", str(port))
        for _ in range(2):
            assert sum(1 for _ in wds.WebDataset(urls(origin), shardshuffle=False)) == 60
    (record,) = [record for record in caplog.records if "WDS_METRICS_PORT" in record.message]
    assert f"127.0.0.1:{port} is not available" in record.message
    assert metrics_server.address() is None
    metrics_server.stop()
    monkeypatch.setenv("WDS_METRICS_PORT", "[::1]:0")
    with caplog.at_level(logging.WARNING, "wds_async"):
        assert sum(1 for _ in wds.WebDataset(urls(origin), shardshuffle=False)) == 60
    assert any("http://[::1]:" in record.message or "::1:0 is not" in record.message for record in caplog.records)


def test_what_is_missing_or_wrong_is_an_error_of_the_constructor(monkeypatch: Any) -> None:
    monkeypatch.setenv("LOCAL_RANK", "many")
    with pytest.raises(ConfigError, match="LOCAL_RANK=many"):
        wds.WebDataset("x.tar", shardshuffle=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtra, match=r"wds-async\[service\]"):
        wds.WebDataset("x.tar", shardshuffle=False)


def test_a_forked_child_has_its_own(origin: Origin) -> None:
    next(iter(wds.WebDataset(urls(origin), shardshuffle=False)))
    asking, answering = os.pipe()
    child = os.fork()
    if not child:
        os.write(answering, b"1" if metrics_server.address() is None else b"0")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(asking, 1) == b"1"
    os.close(asking)
    os.close(answering)
    assert get("/healthz") == b"ok\n"


PROGRAM = """
import sys
import wds_async as wds
from wds_async.observe import metrics_server
if __name__ == "__main__":
    dataset = wds.WebDataset(sys.argv[1], shardshuffle=False)
    read = iter(dataset)
    next(read)
    print(metrics_server.address()[1])
"""


def test_it_ends_without_a_trace(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(SHARD)
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", PROGRAM, str(tmp_path / "0.tar")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout.strip().isdigit()) == (0, True)
    left = [line for line in done.stderr.splitlines() if "metrics of this job" not in line]
    assert left == []


def test_who_does_not_ask_does_not_load_it() -> None:
    program = "import sys, wds_async as wds; wds.WebDataset('x.tar', shardshuffle=False); print(*sys.modules)"
    environ = {name: value for name, value in os.environ.items() if name != "WDS_METRICS_PORT"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {
        "prometheus_client",
        "http.server",
        "wds_async.observe.metrics_server",
        "wds_async.observe.metrics",
        "yaml",
    }
