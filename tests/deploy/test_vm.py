"""deploy/vm: what a machine is told at its first start, and the unit that runs the service there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import wds_async
from tests.deploy.tools import DEPLOY, DOCKER, run, tool
from wds_async.service.config import load_config

VM = DEPLOY / "vm"
CLOUDS = ("gcp", "aws")
MOST_BYTES = 16 * 1024
"""AWS takes no more user data; GCP takes 256 KiB."""
UNIT = (VM / "wds-async.service").read_text(encoding="utf-8")


def user_data(cloud: str) -> dict[str, Any]:
    """What cloud-init reads."""
    found: dict[str, Any] = yaml.safe_load((VM / f"cloud-init-{cloud}.yaml").read_text(encoding="utf-8"))
    return found


def setting(name: str) -> list[str]:
    """The values of ``name`` in the unit, in order."""
    return re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)


@pytest.mark.parametrize("cloud", CLOUDS)
def test_cloud_init_reads_it(cloud: str) -> None:
    raw = (VM / f"cloud-init-{cloud}.yaml").read_bytes()
    assert raw.startswith(b"#cloud-config\n"), "cloud-init goes by the first line"
    assert len(raw) <= MOST_BYTES
    data = user_data(cloud)
    assert set(data) == {"packages", "package_update", "write_files", "runcmd"}
    assert all(isinstance(word, str) for command in data["runcmd"] for word in command)
    modes = {one["path"]: one["permissions"] for one in data["write_files"]}
    assert all(re.fullmatch(r"0[0-7]{3}", mode) for mode in modes.values()), "a number would lose its zero"
    assert modes["/usr/local/sbin/local-disks"] == "0755"
    assert modes["/etc/wds-async/env"] == "0640", "keys may be written there"


@pytest.mark.parametrize("cloud", CLOUDS)
def test_files_arrive_as_they_are_here(cloud: str) -> None:
    sources = {
        "/etc/systemd/system/wds-async.service": VM / "wds-async.service",
        "/etc/sysusers.d/wds-async.conf": VM / "sysusers.conf",
        "/etc/tmpfiles.d/wds-async.conf": VM / "tmpfiles.conf",
        "/usr/local/sbin/local-disks": VM / "local-disks.sh",
        "/etc/wds-async/env": VM / cloud / "wds-async.env",
        "/etc/wds-async/serve.yaml": VM / cloud / "serve.yaml",
        "/etc/wds-async/requirements.txt": VM / cloud / "requirements.txt",
    }
    written = {one["path"]: one["content"] for one in user_data(cloud)["write_files"]}
    assert written == {path: source.read_text(encoding="utf-8") for path, source in sources.items()}


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_machine_installs_this_version_with_its_store(cloud: str) -> None:
    """By version and hash all that it needs, in the versions of the image."""
    first, second, check = (command[1:] for command in user_data(cloud)["runcmd"] if command[0].endswith("/pip"))
    assert first[-2:] == ["--requirement", "/etc/wds-async/requirements.txt"]
    assert {"--require-hashes", "--only-binary=:all:"} <= set(first)
    assert second[-2:] == ["--no-deps", f"wds-async=={wds_async.__version__}"]
    assert check == ["check"]
    text = (VM / cloud / "requirements.txt").read_text(encoding="utf-8").replace(" \\\n  ", " ")
    lines = [line for line in text.splitlines() if line[0] != "#"]
    assert all(re.fullmatch(r"[\w.-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    pinned = (DOCKER / "requirements-service.txt").read_text(encoding="utf-8").lower()
    named = {line.partition(" ")[0].lower() for line in lines}
    for line in lines:
        name, _, digest = line.lower().partition(" --hash=")
        assert re.search(rf"^{re.escape(name).replace('_', '[_-]')}\b", pinned, re.MULTILINE), name
        assert digest in pinned, f"{name}: not a file that the image would take"
    assert any(name.startswith({"gcp": "gcsfs==", "aws": "s3fs=="}[cloud]) for name in named)


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_unit_runs_the_configuration(cloud: str) -> None:
    config = load_config(VM / cloud / "serve.yaml")
    assert config.loopback, "the machine's own jobs, and nobody else"
    assert config.socket == f"/run/{setting('RuntimeDirectory')[0]}/serve.sock"
    (writable,) = setting("ReadWritePaths")
    assert Path(config.folder).parent.as_posix() == writable
    assert setting("BindReadOnlyPaths") == [f"{config.folder}:{config.hand_from}"]
    (prepare,) = setting("ExecStartPre")
    assert prepare.split() == ["+/usr/local/sbin/local-disks", writable, Path(config.folder).name]
    assert setting("User") == [Path(config.folder).name]
    assert float(setting("TimeoutStopSec")[0]) >= config.drain_s + config.grace_s + 5
    assert any("WDS_SERVE_CONFIG=/etc/wds-async/serve.yaml" in line for line in setting("Environment"))
    files = int(setting("LimitNOFILE")[0])
    assert files >= 2 * (config.clients + config.connections)


def test_a_reload_is_the_signal_that_reloads() -> None:
    assert setting("ExecReload") == ["/bin/kill -HUP $MAINPID"]


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """With programs that are there: the real ones are on the machine that the unit is for."""
    analyze = tool("systemd-analyze")
    unit = tmp_path / "wds-async.service"
    unit.write_text(re.sub(r"^(ExecStart(?:Pre)?=\+?).*$", r"\1/bin/true", UNIT, flags=re.MULTILINE), encoding="utf-8")
    assert run(analyze, "verify", "--man=no", unit) == ""
    said = run(analyze, "security", "--offline=true", "--no-pager", unit)
    exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", said)
    assert exposure is not None
    assert float(exposure.group(1)) < 2, said


def test_systemd_finds_a_mistake(tmp_path: Path) -> None:
    unit = tmp_path / "wrong.service"
    unit.write_text("[Service]\nExecStart=/bin/true\nTimeoutStopSec=soon\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="soon"):
        assert run(tool("systemd-analyze"), "verify", "--man=no", unit) == ""
