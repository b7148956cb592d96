"""The picture of ``wds-async top``."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from tests.servers.stats import job, service
from wds_async.cli.toppicture import StatsSource, draw, sparkline


def followed(*documents: Any, address: str = "http://node:51080") -> StatsSource:
    """A source that gave these documents a second apart; text stands for an error."""
    line = StatsSource(address)
    for second, document in enumerate(documents):
        failed = isinstance(document, str)
        line.take(float(second), {} if failed else document, document if failed else "")
    return line


def drawn(lines: list[StatsSource], width: int) -> list[str]:
    console = Console(record=True, width=width, file=io.StringIO(), highlight=False)
    console.print(draw(lines, width, at=1_700_000_000.0))
    return console.export_text().splitlines()


def test_rates_are_differences() -> None:
    line = followed(service(1e9), service(3e9), service(4e9))
    assert list(line.client) == [0.0, 2e9, 1e9]
    assert list(line.origin) == [0.0, 5e8, 2.5e8]
    assert line.rate("bytes", "s3://bucket") == 2.5e8
    assert line.rate("bytes", "gs://another") == 0.0


def test_of_a_job_its_decoders_take() -> None:
    line = followed(job(1e9), job(3e9))
    assert (line.is_job, line.client[-1], line.origin[-1]) == (True, 2e9, 2e9)


@pytest.mark.parametrize(
    "again",
    [service(5e8), service(9e9, uptime_s=1.0)],
    ids=["a counter went down", "it runs for a shorter time"],
)
def test_a_source_that_began_anew(again: dict[str, Any]) -> None:
    line = followed(service(1e9), service(3e9), again)
    assert (line.restarts, line.client[-1]) == (1, 0.0)
    line.take(3.0, {**again, "counters": {**again["counters"], "client_bytes": 1e10}})
    assert line.restarts == 1
    assert line.client[-1] > 0


def test_a_source_that_cannot_be_reached_comes_back() -> None:
    line = followed(service(1e9), "http://node:51080: no answer", service(9e9), service(10e9))
    assert list(line.client) == [0.0, 0.0, 0.0, 1e9]
    assert (line.alive, line.restarts) == (True, 0)


def test_sparklines() -> None:
    assert sparkline([0, 0.1, 2, 4, 8], 5) == "▁▂▃▅█"
    assert sparkline([1, 8, 8], 2) == "██"
    assert sparkline([0, 0], 5) == "▁▁"
    assert sparkline([], 5) == ""


def test_the_whole_picture() -> None:
    one = followed(service(1e9), service(3e9))
    other = followed(job(1e9), job(2e9), address="unix:/run/job.sock")
    gone = followed("http://gone:1: no answer: refused", address="http://gone:1")
    text = drawn([one, other, gone], 120)
    assert text[0].split("  ")[2:5] == ["3.0 GB/s taken", "1.5 GB/s fetched", "2 of 3 answer"]
    rows = {line.split()[0]: line for line in text if line.strip()}
    assert re.search(r"node-1:51080 +2\.0 GB +▁█ +500\.0 MB +▁█ +50% +25% +40% +━━────── 25%", rows["node-1:51080"])
    assert re.search(r"gpu-7 job +1\.0 GB +▁█ +1\.0 GB +▁█ +– +– +– +━━────── 19%", rows["gpu-7"])
    assert rows["http://gone:1:"].startswith("http://gone:1: no answer: refused; tried again")
    fast, slow, *_ = [line for line in text if line.startswith("s3://bucket")]
    assert re.search(r"s3://bucket +node-1:51080 +500\.0 MB +50 ms +2\.5 s +1 +0 +7 +0\.50–1\.25", fast)
    assert re.search(r"s3://bucket +gpu-7 +250\.0 MB", slow)
    assert re.search(r"s3://bucket/train-000042\.tar +3\.5 s +66\.0 MB", "\n".join(text))
    assert re.search(r"trainer-0  job 4711 +250 of 1,000 +━━━━─+ +500\.0 MB", "\n".join(text))
    assert any("refused (403)" in line for line in text)


@pytest.mark.parametrize("width", [60, 70, 80, 89, 90, 100, 120, 130, 160, 200])
def test_no_line_is_too_long_and_no_number_is_cut(width: int) -> None:
    large = service(9.99e14, name="a-node-with-a-very-long-name.example.com", ready=False)
    large["origins"] = {
        "s3://a-bucket-with-a-very-long-name-of-63-characters-" + "x" * 20: large["origins"]["s3://bucket"]
    }
    lines = [followed(service(0), large), followed(service(5), service(2), large)]
    lines.append(followed("http://gone:1: " + "very " * 60))
    text = drawn(lines, width)
    assert max(map(len, text)) <= width
    assert sum("999.0 TB" in line or "250" in line for line in text) >= 1
    for line in text:
        if line.startswith(("a-node", "s3://a-bucket")):
            assert line.count("…") <= 2, line  # of names
            assert re.search(r"\d ?(%|B|s|MB|TB|GB)\b|\d$", line), line


def test_what_a_source_says_is_not_obeyed() -> None:
    line = followed(service(0, name="\x1b]0;x\x07[red]n[/red]", errors=[{"time": 0, "error": "\x1b[2J[b]"}]))
    text = "\n".join(drawn([line], 100))
    assert "\x1b" not in text
    assert "[red]n[/red]" in text


def test_a_source_that_says_little() -> None:
    text = drawn([followed({"kind": "service", "counters": {}}), StatsSource("http://not-asked:1")], 80)
    assert "not-asked" in "\n".join(text)
