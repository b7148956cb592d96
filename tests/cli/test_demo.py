"""``wds-async demo --quick``, whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

for needed in ("torch", "sklearn", "matplotlib", "webdataset", "PIL"):
    pytest.importorskip(needed)


def test_from_nothing_to_a_chart(program: Any, tmp_path: Path) -> None:
    png = tmp_path / "demo.png"
    done = program("demo", "--quick", "--folder", tmp_path / "data", "--png", png)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().startswith("test accuracy ")
    said = done.stderr.decode()
    for step in ("1 · Images", "2 · Serve", "3 · Train", "4 · Compare", "5 · Chart", "better by"):
        assert step in said
    assert png.read_bytes().startswith(b"\x89PNG")
