"""docs/service.md says what is true: settings and their defaults, options, figures, statuses; and its commands run."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import wds_async as wds
from tests.servers import Origin, make_shard
from tests.servers.process import ServerMissing, required
from tests.service.serving import Inside, ask
from wds_async.cli import main
from wds_async.cli.serve import command as serve
from wds_async.observe import metrics_server
from wds_async.service.config import ServiceConfig, load_config
from wds_async.service.refusals import _STATUSES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "service.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def table(name: str) -> list[list[str]]:
    """The cells of each row between the comments ``name``, without backquotes."""
    inner = TEXT.partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name} -->")[0]
    rows = [re.split(r"(?<!\\)\|", line.strip()[1:-1]) for line in inner.strip().splitlines()[2:]]
    assert rows, name
    return [[cell.strip().replace("`", "") for cell in row] for row in rows]


def blocks(language: str, text: str = TEXT) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


# -- settings ---------------------------------------------------------------------------------------------------


def test_every_setting_is_there_with_its_default(tmp_path: Path) -> None:
    rows = {row[0]: row[1] for row in table("settings")}
    assert set(rows) == set(ServiceConfig.__dataclass_fields__)
    file = tmp_path / "serve.yaml"
    file.write_text("".join(f"{name}: {default}\n" for name, default in rows.items() if default))
    assert load_config(file) == ServiceConfig()
    for name, default in rows.items():
        found = getattr(ServiceConfig(), name)
        assert bool(default) == (found is not None and found not in ("", ())), name


def test_every_option_stands_beside_its_setting() -> None:
    said = {row[2]: row[0] for row in table("settings") if row[2]}
    real = {parameter.opts[0]: str(parameter.name) for parameter in serve.params}
    assert said == {option: name for option, name in real.items() if option != "--config"}


def test_the_configurations_that_are_shown_parse(tmp_path: Path) -> None:
    shown = blocks("yaml")
    for text in shown:
        given = yaml.safe_load(text)
        if "host" in given:
            file = tmp_path / "serve.yaml"
            file.write_text(text)
            assert load_config(file).host == given["host"]
    assert any("host" in yaml.safe_load(text) for text in shown)


# -- figures ----------------------------------------------------------------------------------------------------


def families(page: bytes) -> set[str]:
    return set(re.findall(r"^# TYPE (\S+)", page.decode(), re.MULTILINE))


def labels(page: bytes, name: str) -> set[str]:
    found = re.findall(rf"^{name}(?:_bucket)?{{(.*?)}}", page.decode(), re.MULTILINE)
    return {label for text in found for label in re.findall(r"(\w+)=", text)} - {"le"}


def test_the_figures_are_those_of_the_page(origin: Origin) -> None:
    with Inside(allow=(f"{origin.base}/",), buckets={"b": f"{origin.base}/"}) as service:
        origin.add("/x", b"x" * 100)
        assert ask(f"{service.base}/ais/b/x")[0] == 200
        assert ask(f"{service.base}/ais/none/x")[0] == 404
        page = ask(f"{service.base}/metrics")[2]
    rows = table("metrics")
    assert {row[0] for row in rows} == families(page)
    for name, said, _ in rows:
        assert set(said.replace(",", " ").split()) == labels(page, name), name


def test_those_of_a_job_too(origin: Origin, monkeypatch: Any) -> None:
    monkeypatch.setenv("WDS_METRICS_PORT", "0")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    url = origin.add("a.tar", make_shard({"1": {"bin": b"1"}}))
    try:
        assert len(list(wds.WebDataset(url, shardshuffle=False))) == 1
        host, port = metrics_server.address() or ("nowhere", 0)
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=20) as answer:
            page = answer.read()
    finally:
        metrics_server.stop()
    alike = {name for name in families(page) if re.match(r"wds_(origin|window|cost|build)_", name)}
    assert {row[0] for row in table("job metrics")} | alike == families(page)
    assert alike <= {row[0] for row in table("metrics")}


# -- statuses ---------------------------------------------------------------------------------------------------


def refused() -> set[int]:
    """Every status that the service's modules refuse with."""
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "wds_async" / "service").glob("*.py"))
    codes = re.findall(r"(?:Refusal|_refuse|HttpResponse)\(\s*(304|[45]\d\d)\b|HttpResponse\((\d+) if", sources)
    return {status for _, status, _ in _STATUSES} | {int(code or other) for code, other in codes}


def test_the_statuses_are_those_that_are_given() -> None:
    assert {int(row[0]) for row in table("errors")} == refused()


# -- commands ---------------------------------------------------------------------------------------------------


def commands(text: str) -> list[list[str]]:
    """The arguments of each ``wds-async`` in the console blocks."""
    found = []
    for line in re.findall(r"^\$ (.*)$", "\n".join(blocks("console", text)), re.MULTILINE):
        words = shlex.split(line, comments=True)
        while "wds-async" in words:
            words = words[words.index("wds-async") + 1 :]
            end = next((n for n, word in enumerate(words) if word in ("&", "&&", "|", ";")), len(words))
            found.append(words[:end])
    return found


@pytest.mark.parametrize("page", [TEXT, README], ids=["service.md", "README.md"])
def test_the_options_of_its_commands_exist(page: str) -> None:
    shown = commands(page)
    assert shown
    for line in shown:
        words, found = list(line), main.get_command(click.Context(main), line[0])
        while isinstance(found, click.Group):
            words.pop(0)
            found = found.get_command(click.Context(found), words[0])
        assert found is not None, line
        found.make_parser(click.Context(found)).parse_args(words[1:])  # raises where an option is unknown


def test_what_is_to_be_tried_out_runs(tmp_path: Path) -> None:
    with required():
        if shutil.which("curl") is None or shutil.which("bash") is None:
            raise ServerMissing("curl or bash is not here: apt-get install curl bash")
    (block,) = [block for block in blocks("console") if "--bucket demo=" in block]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "wds-async").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m wds_async "$@"\n')
    (bin_ / "wds-async").chmod(0o755)
    (tmp_path / "serve.yaml").write_text(f"port: {port}\n")
    kept = {name: v for name, v in os.environ.items() if not name.startswith("AIS_") and "proxy" not in name.lower()}
    lines = [line[2:].replace("51080", port) for line in block.splitlines()]
    assert lines[-1] == "kill $!"
    script = "set -e -o pipefail\n" + "\n".join(lines) + "\nwait $!\n"
    environ = {**kept, "PATH": f"{bin_}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
               "WDS_SERVE_CONFIG": str(tmp_path / "serve.yaml")}  # fmt: skip
    said = tmp_path / "said"
    with said.open("wb") as out:
        bash = subprocess.Popen(
            ["bash", "-c", script], cwd=tmp_path, env=environ, stdout=out, stderr=out, start_new_session=True
        )
        try:
            status = bash.wait(90)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(bash.pid, signal.SIGKILL)  # a service that a failed command left behind
            bash.wait()
    text = said.read_text()
    assert status == 0, text
    for line in ("ready", "0.txt", "3  txt 9 B", "txt=number 2", "shards/train-1.tar", port):
        assert line in text, (line, text)
