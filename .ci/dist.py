"""Build the wheel and the source archive in ``dist/``, and check them: ``make dist``.

They are built twice with the time of the last commit, and must be the same to the byte; the wheel holds the package and
nothing else, and installs in a fresh environment. ``out/sbom/`` gets the bills of materials of the images' locks.
"""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
SBOM = ROOT / "out" / "sbom"
LOCKS = ("service", "train")
"""Locks of docker/ whose images are published or documented."""


def run(*command: object, **options: object) -> None:
    """Run a command; its failure ends the program."""
    subprocess.run([str(part) for part in command], check=True, **options)  # type: ignore[call-overload]


def reproducible() -> dict[str, str]:
    """Return the environment with the time of the last commit."""
    time = subprocess.run(["git", "log", "-1", "--format=%ct"], capture_output=True, text=True, check=False, cwd=ROOT)
    return {**os.environ, "SOURCE_DATE_EPOCH": time.stdout.strip() or "1700000000"}


def build(folder: Path) -> list[Path]:
    """Build both in ``folder``; the wheel is built from the source archive."""
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, env=reproducible(), stdout=subprocess.DEVNULL)
    return sorted(folder.iterdir())


def bill_of_materials(lock: str) -> Path:
    """Write the CycloneDX document of a lock, which is validated, and compare its packages with the lock's lines."""
    source, target = ROOT / "docker" / f"requirements-{lock}.txt", SBOM / f"wds-async-{lock}.cdx.json"
    options = ["--pyproject", ROOT / "pyproject.toml", "--output-reproducible", "--validate", "--output-file", target]
    # A lock is a flat list; cyclonedx warns that it has no graph of dependencies.
    python = [sys.executable, "-W", "ignore::UserWarning"]
    run(*python, "-m", "cyclonedx_py", "requirements", *options, source, env=reproducible())
    components = json.loads(target.read_text(encoding="utf-8"))["components"]
    pinned = re.findall(r"^([\w.-]+)==([\w.+!-]+)", source.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted((one["name"], one["version"]) for one in components) == sorted(pinned), target.name
    return target


def main() -> None:
    """Build, compare and check."""
    shutil.rmtree(DIST, ignore_errors=True)
    files = build(DIST)
    with tempfile.TemporaryDirectory() as folder:
        again = build(Path(folder))
        assert [one.name for one in files] == [one.name for one in again]
        for one, other in zip(files, again, strict=True):
            assert filecmp.cmp(one, other, shallow=False), f"{one.name} differs from build to build"
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    (wheel,) = (one for one in files if one.suffix == ".whl")
    run(Path(sys.executable).parent / "check-wheel-contents", wheel)
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "wds_async",
        *(n.split("/")[0] for n in names if "dist-info" in n),
    }
    assert "wds_async/py.typed" in names
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
        shutil.copy(ROOT / ".ci" / "core_only.py", folder)
        run(python, "-W", "error", "core_only.py", cwd=folder)
    SBOM.mkdir(parents=True, exist_ok=True)
    files += map(bill_of_materials, LOCKS)
    print("\n".join(f"{one.name}  {one.stat().st_size:,} bytes" for one in files))


if __name__ == "__main__":
    main()
