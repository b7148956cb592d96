"""Install each extra in an environment of its own, and import what it promises: ``python .ci/extras.py [EXTRA]...``.

torch comes first, by the version of the Makefile, so that no package chooses another one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
PROMISED = {
    "s3": "s3fs aiobotocore",
    "gcs": "gcsfs",
    "azure": "adlfs",
    "hf": "huggingface_hub",
    "ais": "xxhash",
    "service": "prometheus_client msgpack wds_async.service.running",
    "sftp": "paramiko",
    "webdav": "webdav4",
    "torch": "torch wds_async.loader",
    "images": "PIL simplejpeg",
    "formats": "msgpack cbor2",
    "media": "av soundfile",
    "lmdb": "lmdb",
    "parquet": "pyarrow.parquet",
    "huggingface": "datasets wds_async.integrations.huggingface",
    "arrow": "pyarrow wds_async.tools.arrow",
    "nodes": "torchdata.nodes wds_async.nodes",
    "otel": "opentelemetry.metrics wds_async.integrations.telemetry",
    "ray": "ray.data wds_async.distributed.raydata",
    "dask": "distributed wds_async.distributed.engines.dask",
    "all": "s3fs gcsfs adlfs huggingface_hub torch simplejpeg soundfile lmdb pyarrow.parquet wds_async.loader",
    "demo": "torch PIL sklearn matplotlib webdataset psutil",
}
"""What each extra for users lets be imported."""
NEEDS_TORCH = ("torch", "nodes", "all", "demo")


def main(chosen: list[str]) -> int:
    """Return the number of extras that failed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    unknown = sorted({*chosen, *PROMISED} - (PROMISED.keys() & project["optional-dependencies"].keys()))
    assert not unknown, f"not extras for users, or not in PROMISED: {unknown}"
    failed = 0
    for extra in chosen or PROMISED:
        with tempfile.TemporaryDirectory() as folder:
            venv.create(folder, with_pip=True)
            python = Path(folder) / "bin" / "python"
            install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            first = [TORCH] if extra in NEEDS_TORCH else []
            code = "\n".join(f"import {module}" for module in PROMISED[extra].split())
            try:
                if first:
                    subprocess.run([*install, *first], check=True)
                subprocess.run([*install, *first, f"{ROOT}[{extra}]"], check=True)
                subprocess.run([python, "-m", "pip", "check"], check=True, stdout=subprocess.DEVNULL)
                subprocess.run([python, "-c", code], check=True, cwd=folder)
            except subprocess.CalledProcessError as exn:
                failed += 1
                print(f"{extra}: failed ({exn.cmd[1:4]})")
            else:
                print(f"{extra}: {PROMISED[extra]}")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
