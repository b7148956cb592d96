"""Write down what a machine installs, with versions and hashes: ``python deploy/vm/lock.py``, then look at the changes.

The versions are those of docker/requirements-service.txt; of each package only the wheel for Ubuntu 24.04 (Python 3.12,
x86-64) is named, because user data has room for no more.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

VM = Path(__file__).parent
ROOT = VM.parents[1]
STORES = {"gcp": "gcs", "aws": "s3"}
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)] + ["manylinux2014_x86_64"]


def wanted(store: str) -> list[str]:
    """The requirements of the service with the client of ``store``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    return [line.partition(";")[0] for line in [*project["dependencies"], *extras["service"], *extras[store]]]


def _of_the_machine(pinned: str) -> Iterator[str]:
    """The versions for Python 3.12 on Linux, of those for every Python and system."""
    machine = {"python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux"}
    for line in re.findall(r"^[\w.-]+==[^\\\n]+", pinned, re.MULTILINE):
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(machine):
            yield f"{requirement.name}{requirement.specifier}"


def locked(store: str) -> str:
    """A requirements file for pip's ``--require-hashes``."""
    pinned = (ROOT / "docker" / "requirements-service.txt").read_text(encoding="utf-8")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(_of_the_machine(pinned)))
        constraints.flush()
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--report",
            "-",
        ]
        command += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", "--target", "unused"]
        command += ["--ignore-requires-python"]  # pip asks that of the Python it runs in, not of the one that is meant
        command += [word for platform in PLATFORMS for word in ("--platform", platform)]
        report = subprocess.run(
            [*command, "--constraint", constraints.name, *wanted(store)], check=True, stdout=subprocess.PIPE
        )
    lines = ["# Made by `python deploy/vm/lock.py`."]
    for one in sorted(json.loads(report.stdout)["install"], key=lambda one: one["metadata"]["name"].lower()):
        name, version = one["metadata"]["name"], one["metadata"]["version"]
        digest = one["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{name}=={version} \\\n  --hash=sha256:{digest}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for cloud, store in STORES.items():
        (VM / cloud / "requirements.txt").write_text(locked(store), encoding="utf-8")
