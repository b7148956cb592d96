"""Build the wheel and the source archive in ``dist/``, and check them: ``make dist``.

They are built twice with the time of the last commit, and must be the same to the byte; the wheel holds the package and
nothing else, and installs in a fresh environment.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"


def run(*command: object, **options: object) -> None:
    """Run a command; its failure ends the program."""
    subprocess.run([str(part) for part in command], check=True, **options)  # type: ignore[call-overload]


def build(folder: Path) -> list[Path]:
    """Build both in ``folder``; the wheel is built from the source archive."""
    time = subprocess.run(["git", "log", "-1", "--format=%ct"], capture_output=True, text=True, check=False, cwd=ROOT)
    environment = {**os.environ, "SOURCE_DATE_EPOCH": time.stdout.strip() or "1700000000"}
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, env=environment, stdout=subprocess.DEVNULL)
    return sorted(folder.iterdir())


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
    print("\n".join(f"{one.name}  {one.stat().st_size:,} bytes" for one in files))


if __name__ == "__main__":
    main()
