"""``wds-async doctor``."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.servers import Origin, make_shard
from tests.servers.stats import StatsServer, job, service
from wds_async.errors import ConfigError, TransferError
from wds_async.observe.doctor import fetch_stats, is_running


def test_in_words(call: Any, tmp_path: Path) -> None:
    image = io.BytesIO()
    Image.new("RGB", (1500, 1500)).save(image, "PNG")  # of few bytes, so that reading them is nothing
    (tmp_path / "0.tar").write_bytes(make_shard({str(i): {"png": image.getvalue()} for i in range(20)}))
    result = call("doctor", tmp_path / "0.tar", "--decode", "rgb8", "--seconds", "0.3")
    first, second, *rest = result.output.splitlines()
    assert first.startswith("Bound by the CPU: parsing, decoding and functions of the program are ")
    assert second.startswith("Next: ")
    assert any("/s over" in line for line in rest)
    assert any("parsing, decoding, functions  ━━━━" in line for line in rest)


def test_as_json_from_a_store(call: Any, origin: Origin) -> None:
    origin.latency_s = 0.05
    urls = [origin.add(f"{i}.tar", make_shard({str(i): {"txt": b"x"}})) for i in range(100)]
    found = json.loads(call("doctor", *urls, "--seconds", "0.4", "--json").stdout)
    assert found["figures"]["requests"] > 0
    assert found["figures"]["head_s"] > found["figures"]["body_s"]
    text = call("doctor", *urls, "--seconds", "0.2").output
    assert "ms to its head" in text


def test_with_workers(call: Any, shards: Any) -> None:
    pytest.importorskip("torch")
    found = json.loads(call("doctor", *shards(2, 5), "--seconds", "0.2", "--workers", 1, "--json").stdout)
    assert found["figures"]["workers"] == 1
    assert found["figures"]["batches"] > 0
    found = json.loads(call("doctor", *shards(1, 5), "--seconds", "0.2", "--workers", 2, "--json").stdout)
    assert (found["bound"], found["knob"]) == ("shards", "num_workers=1, or more and smaller shards")


def test_a_function(call: Any, function: str) -> None:
    found = json.loads(call("doctor", f"{function}samples", "--seconds", "0.1", "--json").stdout)
    assert found["bound"] == "nothing_read"  # it reads no shards
    assert call("doctor", f"{function}samples", "x.tar").exit_code == 2


def test_what_cannot_be_read_is_an_error(program: Any, tmp_path: Path) -> None:
    done = program("doctor", tmp_path / "none.tar", "--seconds", "0.2")
    assert done.returncode == 1
    assert b"none.tar" in done.stderr


def test_a_running_job_by_what_came_since(call: Any) -> None:
    before = job(1e9, thread_s=100.0, cpu_s=100.0, starved_s=50.0, consumer_s=1.0)
    now = job(2e9, thread_s=110.0, cpu_s=101.0, starved_s=50.1, consumer_s=4.0)
    with StatsServer(lambda number: before if number == 0 else now) as server:
        result = call("doctor", server.address, "--seconds", "0.1")
    assert result.output.startswith("Bound by the consumer: it waits for batches 3% of its time")
    assert server.asked == 2


def test_a_running_service(call: Any, tmp_path: Path) -> None:
    with StatsServer(lambda number: service(1e9 * number), socket=tmp_path / "s.sock") as server:
        found = json.loads(call("doctor", server.address, "--seconds", "0.1", "--json").stdout)
    assert (found["bound"], found["shares"]) == ("consumer", {"from_disk": 0.75})
    assert call("doctor", "http://127.0.0.1:1", "http://127.0.0.1:2").exit_code == 2


def test_what_is_an_address_and_what_a_shard() -> None:
    assert all(map(is_running, ("http://n:51080", "http://n:51080/", "http://n/v1/stats", "unix:/run/x.sock")))
    assert not any(map(is_running, ("http://host/train-000.tar", "train.tar", "s3://bucket/")))


def test_who_answers_must_be_ours() -> None:
    ours = "no service or job of wds_async"
    odd: list[tuple[Any, int, str]] = [(b"<html>", 200, ours), ({"counters": 3, "kind": "job"}, 200, ours)]
    for document, status, words in [*odd, ({}, 403, "403"), ({}, 401, r"401 .*any:TOKEN@")]:
        with StatsServer(document, status=status) as server, pytest.raises(TransferError, match=words):
            fetch_stats(server.address)
    with pytest.raises(TransferError, match="no answer"):
        fetch_stats("http://user:secret@127.0.0.1:1")
    with pytest.raises(ConfigError, match="is no address"):
        fetch_stats("s3://bucket/x")
