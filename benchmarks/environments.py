"""The Python environments of peers: the main one where it has what a peer requires, else one of the peer's own."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from benchmarks.peer import Peer, load_peer

__all__ = ["absence", "install", "interpreter"]

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".bench" / "peers"
CONSTRAINTS = ("torch==2.13.0",)
"""No peer may bring another torch, which would come with CUDA."""


def install(name: str) -> None:
    """Make the environment of the peer ``name`` and install what it requires. subprocess.CalledProcessError where pip
    fails."""
    peer, folder = load_peer(name), FOLDER / name
    if reason := peer.cannot.get("install"):
        raise RuntimeError(f"{name} cannot be installed: {reason}")
    if not (peer.requirements or peer.without_dependencies) or absence(name) is None:
        return
    venv.create(folder, with_pip=False, clear=True)
    # The main environment's packages come last on the path: torch and numpy are shared, the peer's own go first.
    (_packages(folder) / "main.pth").write_text("\n".join(site.getsitepackages()) + "\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    pip.append("--disable-pip-version-check")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(CONSTRAINTS))
        constraints.flush()
        if peer.requirements:
            subprocess.run([*pip, "-c", constraints.name, *peer.requirements], check=True)
        if peer.without_dependencies:
            subprocess.run([*pip, "--no-deps", *peer.without_dependencies], check=True)


def interpreter(name: str) -> str:
    """Return the Python that runs the peer ``name``."""
    own = FOLDER / name / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def absence(name: str) -> str | None:
    """Return why the peer ``name`` cannot be run on this machine, or None where it can."""
    peer = load_peer(name)
    if reason := peer.cannot.get("install"):
        return f"cannot be installed: {reason}"
    for program in peer.programs:
        if shutil.which(program) is None:
            return f"the program {program} is not installed"
    own = FOLDER / name
    folders = (str(_packages(own)),) if own.exists() else ()
    missing = [wanted for wanted in _wanted(peer) if not _satisfied(wanted, (*folders, *site.getsitepackages()))]
    return f"{', '.join(missing)}: not installed (--install {name})" if missing else None


def _wanted(peer: Peer) -> tuple[str, ...]:
    return (*peer.requirements, *peer.without_dependencies)


def _packages(environment: Path) -> Path:
    return environment / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def _satisfied(requirement: str, folders: tuple[str, ...]) -> bool:
    """Whether a distribution of that name, and of that version where it is exact, is in one of the folders."""
    name, _, version = requirement.partition("==")
    name = re.split(r"[\[<>=!~ ;]", name)[0]
    found = _distributions(folders).get(_normal(name))
    return found is not None and version in ("", found)


@functools.cache
def _distributions(folders: tuple[str, ...]) -> dict[str, str]:
    """Return versions by name; the first folder that has a name counts."""
    found: dict[str, str] = {}
    for one in importlib.metadata.distributions(path=[os.fspath(folder) for folder in folders]):
        found.setdefault(_normal(one.metadata["Name"]), one.version)
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
