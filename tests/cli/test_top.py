"""``wds-async top``."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin
from tests.servers.stats import StatsServer, job, service
from wds_async.cli.top import Followed, look, rates

pty = pytest.importorskip("pty")
QUICKLY = ("--interval", "0.05")


def grows(number: int) -> dict[str, Any]:
    return service(1e9 * number)


def test_one_picture_of_a_service_and_a_job(call: Any, tmp_path: Path) -> None:
    with StatsServer(grows) as one, StatsServer(job(5e9), socket=tmp_path / "job.sock") as other:
        result = call("top", one.address, other.address, "--once", "--width", 100, *QUICKLY)
    assert result.exit_code == 0
    assert "node-1" in result.output
    assert "gpu-7 job" in result.output
    assert "q leaves" not in result.output
    assert "\x1b" not in result.output
    assert max(map(len, result.output.splitlines())) <= 100


def test_output_that_is_no_terminal_is_one_picture(program: Any) -> None:
    with StatsServer(grows) as server:
        done = program("top", server.address, *QUICKLY)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.count(b"wds-async top") == 1


def test_json(call: Any) -> None:
    with StatsServer(grows) as server:
        result = call("top", server.address, "http://127.0.0.1:1", "--json", *QUICKLY)
    good, bad = json.loads(result.stdout)["sources"]
    assert (good["alive"], good["stats"]["name"], good["restarts"]) == (True, "node-1", 0)
    assert good["taken_bytes_per_s"] > good["origin_bytes_per_s"] > 0
    assert (bad["alive"], bad["address"]) == (False, "http://127.0.0.1:1")
    assert "no answer" in bad["error"]


def test_a_bearer_token_is_sent_and_not_shown(call: Any) -> None:
    with StatsServer(grows) as server:
        address = server.address.replace("//", "//any:s3cret@")
        text = call("top", address, "--json", *QUICKLY).stdout + call("top", address, "--once", *QUICKLY).stdout
        assert set(server.authorizations) == {"Bearer s3cret"}
    text += call("top", address, "--once", *QUICKLY).stdout
    assert "no answer" in text
    assert "s3cret" not in text


def test_nobody_answers(call: Any) -> None:
    result = call("top", "http://127.0.0.1:1", "--once", *QUICKLY)
    assert result.exit_code == 1
    assert "tried again" in result.output
    assert call("top", "ftp://x", "--once", *QUICKLY).exit_code == 1


def test_a_source_that_comes_back_is_seen() -> None:
    server = StatsServer(grows)
    with Followed((server.address,), 0.02) as followed:
        (line,) = followed.sources
        with server:
            while not line.alive:
                followed.wait(0.05)
        while line.alive:
            followed.wait(0.05)
        assert "no answer" in rates(line)["error"]
        with StatsServer(service(1.0, uptime_s=0.5), port=server.port):
            while not line.alive:
                followed.wait(0.05)
    assert rates(line)["stats"]["uptime_s"] == 0.5


def test_two_readings_are_taken_for_rates() -> None:
    with StatsServer(grows) as server:
        (line,) = look((server.address,), 0.01)
    assert server.asked >= 2
    assert line.client[-1] > 0


class Screen:
    """``wds-async top`` in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._here, there = pty.openpty()
        command = [sys.executable, "-m", "wds_async", "top", *arguments, *QUICKLY]
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
        self.process = subprocess.Popen(command, stdin=there, stdout=there, stderr=there, env=environment)
        os.close(there)
        self.shown = b""

    def until(self, text: bytes, count: int = 1) -> None:
        deadline = time.monotonic() + 30
        while self.shown.count(text) < count:
            assert time.monotonic() < deadline, self.shown
            if select.select([self._here], [], [], 1)[0]:
                self.shown += os.read(self._here, 1 << 16)

    def press(self, keys: bytes) -> None:
        os.write(self._here, keys)

    def ends(self) -> int:
        try:
            while True:
                self.shown += os.read(self._here, 1 << 16)
        except OSError:  # the other side is closed
            pass
        os.close(self._here)
        return self.process.wait(30)


def test_live_until_q() -> None:
    with StatsServer(grows) as server:
        screen = Screen(server.address)
        screen.until(b"fetched", 3)
        screen.press(b"xq")
        assert screen.ends() == 0
    assert screen.shown.count(b"\x1b[?1049h") == screen.shown.count(b"\x1b[?1049l") == 1
    assert b"\x1b[2J" not in screen.shown.split(b"\x1b[?1049h", 1)[1].split(b"fetched", 1)[1]  # drawn over, not wiped
    assert b"Traceback" not in screen.shown


def test_live_until_ctrl_c() -> None:
    with StatsServer(grows) as server:
        screen = Screen(server.address)
        screen.until(b"fetched")
        screen.process.send_signal(signal.SIGINT)
        assert screen.ends() == 130
    assert screen.shown.count(b"\x1b[?1049l") == 1
    assert b"Traceback" not in screen.shown


HOSTILE = {
    "depth": b"[" * 200_000,
    "kinds": b'{"kind": "service", "counters": {"client_bytes": "abc", "hit_bytes": [], "miss": NaN}, "gauges": [],'
    b'"origins": {"\\u001b[31m": {"requests": null, "dollars": [1], "bytes": "x"}, "b": 7}, "plans": [1, {"done": ""}],'
    b'"slowest": [{"url": 5, "seconds": "x"}], "errors": {"time": 1}, "uptime_s": [], "time": "x", "cost": 5}',
    "sizes": b'{"kind": "job", "counters": {"samples": 1' + b"0" * 400 + b', "bytes": -1}, "uptime_s": 1e308,'
    b'"gauges": {"window_bytes": 1, "window_limit_bytes": 1' + b"0" * 400 + b'}, "errors": [{"time": 1e300}]}',
}


@pytest.mark.parametrize("what", list(HOSTILE))
def test_what_one_source_says_hides_no_other(call: Any, what: str) -> None:
    with Origin({"/v1/stats": HOSTILE[what]}) as hostile, StatsServer(grows) as good:
        for how in ("--once", "--json"):
            result = call("top", hostile.base, good.address, how, *QUICKLY)
            assert result.exit_code == 0
            assert "node-1" in result.output
