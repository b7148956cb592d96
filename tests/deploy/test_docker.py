"""docker/: what can be known of images and of the compose file without an engine that builds and runs them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import wds_async
from tests.deploy.tools import DEPLOY, DOCKER, ROOT, mapping, run, tool
from tests.servers import Origin
from tests.servers.process import free_port
from wds_async import environment
from wds_async.errors import ConfigError
from wds_async.service.config import load_config

DOCKERFILES = [DOCKER / "Dockerfile", DOCKER / "Dockerfile.train", DOCKER / "Dockerfile.ray"]
LOCKS = {
    "service": ("service", "s3", "gcs", "azure", "hf", "ais"),
    "train": ("images",),
    "ray": ("ray", "images"),
    "build": (),
}
"""What each docker/requirements-*.txt holds: these extras of pyproject.toml."""
PINNED = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)
DIGEST = r"[\w./-]+:[\w.-]+(@sha256:[0-9a-f]{64})?"
COMPOSE = mapping(DOCKER / "compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def locked(name: str) -> dict[str, set[str]]:
    """The versions of each package in a lock file; more than one where Pythons differ."""
    found: dict[str, set[str]] = {}
    for package, version in PINNED.findall((DOCKER / f"requirements-{name}.txt").read_text(encoding="utf-8")):
        found.setdefault(canonicalize_name(package), set()).add(version)
    return found


def source_of(dockerfile: Path) -> str:
    """Its instructions, each on one line, without comments."""
    lines = [line for line in dockerfile.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    return "\n".join(lines).replace("\\\n", " ")


def test_hadolint_has_nothing_to_say() -> None:
    assert run(tool("hadolint"), *DOCKERFILES) == ""


def test_the_compose_file_is_one() -> None:
    run(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", DOCKER / "compose.yaml")


def test_yaml_is_in_order() -> None:
    assert run(tool("yamllint"), "--strict", "--config-file", DEPLOY / ".yamllint.yaml", "docker", "deploy") == ""


def test_shell_scripts_parse() -> None:
    scripts = [*DOCKER.glob("*.sh"), *DEPLOY.rglob("*.sh")]
    assert {path.name for path in scripts} == {"check.sh", "lock.sh", "pin.sh", "local-disks.sh"}
    for path in scripts:
        run("sh", "-n", path)
        assert path.stat().st_mode & 0o111, f"{path.name} cannot be started"


@pytest.mark.parametrize("name", LOCKS)
def test_the_lock_is_whole(name: str) -> None:
    """Each package has hashes, and what pyproject.toml asks for is there in a version that it asks for."""
    text = (DOCKER / f"requirements-{name}.txt").read_text(encoding="utf-8")
    entries = re.split(r"\n(?=[A-Za-z0-9])", text)
    for entry in entries:
        if PINNED.match(entry):
            assert "--hash=sha256:" in entry, entry.splitlines()[0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [] if name != "service" else list(project["dependencies"])
    for extra in LOCKS[name]:
        asked += project["optional-dependencies"][extra]
    versions = locked(name)
    for requirement in map(Requirement, asked):
        if requirement.marker is None or requirement.marker.evaluate(dict(default_environment())):
            found = versions.get(canonicalize_name(requirement.name))
            assert found, f"{requirement} is not in requirements-{name}.txt: run docker/lock.sh"
            assert all(requirement.specifier.contains(version) for version in found), f"{requirement}: {found}"


def test_locks_agree_and_torch_is_in_none() -> None:
    service, train, ray = locked("service"), locked("train"), locked("ray")
    for one, other in ((service, train), (service, ray), (train, ray)):
        for package in one.keys() & other.keys():
            assert one[package] == other[package], package
    for name in LOCKS:
        assert "torch" not in locked(name)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_is_made_of_what_there_is(dockerfile: Path) -> None:
    text = source_of(dockerfile)
    let_through = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [words.split()[:-1] for words in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE)]
    assert copied
    for path in [path for paths in copied for path in paths]:
        assert (ROOT / path).exists(), path
        assert f"!{path.split('/')[0]}" in let_through, f"{path} does not reach the builder"
    assert "USER 10001:10001" in text
    assert "--require-hashes" in text
    assert re.search(rf"ARG PYTHON={DIGEST}$", text, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${PYTHON}"}


def test_images_stand_on_the_same_ground() -> None:
    grounds = {re.search(r"ARG PYTHON=(\S+)", source_of(path)).group(1) for path in DOCKERFILES}  # type: ignore[union-attr]
    assert len(grounds) == 1
    assert "@sha256:" in grounds.pop()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (torch,) = {version for path in DOCKERFILES for version in re.findall(r"ARG TORCH=(\S+)", source_of(path))}
    assert f"torch=={torch}" in makefile, "the images train with the torch that is tested"


def test_the_image_does_not_start_open() -> None:
    with pytest.raises(ConfigError, match="allow"):
        load_config(DOCKER / "serve.yaml")
    config = load_config(DOCKER / "serve.yaml", allow=("gs://bucket/",))
    text = source_of(DOCKERFILES[0])
    assert f"EXPOSE {config.port}" in text
    assert f'VOLUME ["{config.folder}"]' in text
    assert "WDS_SERVE_CONFIG=/etc/wds-async/serve.yaml" in text
    assert "docker/serve.yaml /etc/wds-async/serve.yaml" in text


@pytest.mark.parametrize(("status", "ends"), [(200, 0), (503, 1), (404, 1)])
def test_the_health_check_is_what_the_service_says(origin: Origin, status: int, ends: int) -> None:
    if status != 404:
        origin.add("/healthz", b"ok")
    if status == 503:
        origin.behave(status=503)
    done = subprocess.run(
        [sys.executable, "-I", DOCKER / "healthy.py", f"{origin.base}/healthz"], capture_output=True, check=False
    )
    assert done.returncode == ends


def test_nobody_there_is_not_healthy() -> None:
    command = [sys.executable, "-I", str(DOCKER / "healthy.py"), f"http://127.0.0.1:{free_port()}/healthz"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "healthz" in done.stderr


def test_compose_names_versions_and_files_that_are_there() -> None:
    for name, service in SERVICES.items():
        if "build" in service:
            assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).exists()
        else:
            assert re.fullmatch(DIGEST, service["image"]), f"{name}: {service['image']} is no version"
            assert ":latest" not in service["image"]
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert source in COMPOSE["volumes"] or (DOCKER / source).is_file(), mount
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), "for this machine only"


def test_compose_starts_in_order() -> None:
    """Who waits for a health check waits for one that there is: the compose file's, or the image's own."""
    checked = {name for name, service in SERVICES.items() if "healthcheck" in service} | {"serve"}
    assert "HEALTHCHECK" in source_of(DOCKERFILES[0])
    ends = {"seed"}
    for service in SERVICES.values():
        for other, how in service.get("depends_on", {}).items():
            assert how["condition"] == ("service_completed_successfully" if other in ends else "service_healthy")
            assert other in checked | ends
    assert set(SERVICES["trainer"]["depends_on"]) == {"serve"}
    assert set(SERVICES["serve"]["depends_on"]) == ends


def test_the_trainer_has_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    given = SERVICES["trainer"]["environment"]
    assert given["AIS_ENDPOINT"] == "http://serve:51080"
    assert not {name for name in given if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "STORAGE_"))}
    for name, text in given.items():
        if name in {variable.name for variable in environment.VARIABLES}:
            monkeypatch.setenv(name, str(text))
            environment.value(name)
    serve = load_config(DOCKER / "demo" / "serve.yaml")
    assert {url.split("://")[0] for url in serve.allow} == {"s3", "gs", "az"}
    assert float(SERVICES["serve"]["stop_grace_period"].removesuffix("s")) >= serve.grace_s + serve.drain_s + 5


def test_images_are_called_by_their_version_elsewhere() -> None:
    readme = (DOCKER / "README.md").read_text(encoding="utf-8")
    assert f"wds-async:{wds_async.__version__}" in readme
